"""A request's way may name two instances: one that is handed it, one that gives its tokens."""

import asyncio
from dataclasses import replace

import pytest

from pilotlight.gateway.serving.route import Route
from pilotlight.gateway.serving.testing import Ran, entries_of
from pilotlight.policy.plan import InstanceRole

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox"
PROMPT = {"model": "fox", "prompt": "x", "max_tokens": 99}


async def test_an_instance_that_does_both_is_the_whole_way(world):
    await world.worker()
    await world.until(lambda: world.serving.fleet.serving(world.entry.model.name))
    (seen,) = world.serving.fleet.serving(world.entry.model.name)
    await world.until(
        lambda: world.serving.requests._parts.router.pick(world.entry.model.name, 1) is not None
    )
    route = world.serving.requests._parts.router.pick(world.entry.model.name, 1)
    assert route == Route(seen, seen)
    assert (route.instance, route.serving) == (seen.instance, True)


async def test_an_instance_that_does_one_of_the_two_is_given_nothing(world):
    router, name = world.serving.requests._parts.router, world.entry.model.name
    for role in (InstanceRole.PREFILL, InstanceRole.DECODE):
        worker = await world.worker(role.value, ready=False)
        worker.instance = replace(worker.instance, role=role)
        await worker.ready()
    await world.until(lambda: len(world.serving.fleet.serving(name)) == 2)
    await world.until(lambda: len(world.serving.fleet.workers()) == 2)
    assert router.pick(name, 1) is None
    await world.worker("both")
    await world.until(lambda: router.pick(name, 1) is not None)
    assert router.pick(name, 1).instance.role is InstanceRole.BOTH


async def test_what_one_instance_is_handed_another_may_answer(world, monkeypatch):
    """Nothing chooses such a way yet: it is given here."""
    prefill, decode = [await world.worker(name) for name in ("prefill", "decode")]
    name, fleet, token_ids = world.entry.model.name, world.serving.fleet, world.ids(ANSWER)
    await world.until(lambda: len(fleet.serving(name)) == 2)
    seen = {one.instance.lead: one for one in fleet.serving(name)}
    route = Route(prefill=seen[prefill.worker_id], decode=seen[decode.worker_id])
    monkeypatch.setattr(world.serving.requests._parts.router, "pick", lambda *_: route)
    sending = []

    def pass_on(submit):
        ran = decode.ran[submit.request_id, submit.attempt] = Ran(
            submit, entries_of(submit, token_ids)
        )
        sending.append(asyncio.create_task(decode.send(ran, ran.entries)))
        return []

    prefill.script = pass_on
    answer = await world.client.completions.create(**PROMPT)
    assert answer.choices[0].text == ANSWER
    assert [submit.instance_id for submit in prefill.submits] == [prefill.instance.instance_id]
    assert not decode.submits
    (ran,) = decode.ran.values()
    await decode.until(lambda: ran.done)
    assert ran.acked_seq == len(token_ids)
    await asyncio.gather(*sending)
