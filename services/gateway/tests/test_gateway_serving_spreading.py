"""Requests of a group's lead that go on at the instances which its workers have become."""

import asyncio
from dataclasses import replace

import pytest

from pilotlight.gateway.serving.testing import ScriptedWorker, entries_of
from pilotlight.policy.ids import InstanceId

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
PROMPT = {"model": "fox", "prompt": "x", "max_tokens": 99}


async def became(world, name: str, group: InstanceId, gives: int = 99) -> ScriptedWorker:
    """A worker whose instance was a stage of a group, and so many tokens of whose answers come."""
    worker = await world.worker(name, ready=False)
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER))[:gives]
    place = replace(worker.instance.placements[0], grown_from=group)
    worker.instance = replace(worker.instance, placements=(place,))
    await worker.ready()
    return worker


async def running_on(world, worker: ScriptedWorker, count: int) -> None:
    """Until so many requests are on it, and have what tokens they get."""

    def are_there() -> bool:
        there = [
            one
            for one in world.serving.relay.attempts
            if one.instance_id == worker.instance.instance_id
        ]
        heard = all(one.accepted and one.log.next_seq >= ends(one.number) for one in there)
        return len(there) == count and heard

    def ends(number: int) -> int:
        runs = [ran for (_, attempt), ran in worker.ran.items() if attempt == number]
        return min((ran.entries[-1].seq + 1 for ran in runs if ran.entries), default=0)

    await world.until(are_there)


async def asked(world, lead: ScriptedWorker, count: int, gives: int) -> list[asyncio.Task]:
    """Requests that have some tokens of the lead, and wait for the others."""
    lead.script = lambda submit: entries_of(submit, world.ids(ANSWER))[:gives]
    asking = [asyncio.create_task(world.client.completions.create(**PROMPT)) for _ in range(count)]
    await running_on(world, lead, count)
    return asking


async def end(world, worker: ScriptedWorker) -> None:
    """Give what is left to the requests that it has."""
    for ran in [one for one in worker.ran.values() if not one.done]:
        ran.entries = entries_of(ran.submit, world.ids(ANSWER))
        await worker.send(ran, ran.entries)


@pytest.mark.parametrize("given", [0, 1, 7])
async def test_an_equal_share_goes_on_with_its_tokens(world, given):
    lead = await world.worker("w0")
    asking = await asked(world, lead, 4, given)
    other = await became(world, "w1", lead.instance.instance_id)
    await other.until(lambda: len(other.submits) == 2)
    await lead.until(lambda: sum(ran.done for ran in lead.ran.values()) == 2)
    await end(world, lead)
    answers = await asyncio.gather(*asking)
    assert [one.choices[0].text for one in answers] == [ANSWER] * 4
    assert [one.output_ids for one in other.submits] == [world.ids(ANSWER)[:given]] * 2
    assert len(lead.submits) == 4, "nothing comes back"
    assert {one.moved_from for one in lead.submits} == {None}
    assert {one.moved_from for one in other.submits} == {lead.instance.instance_id}


async def test_each_instance_that_comes_has_its_share(world):
    lead = await world.worker("w0")
    asking = await asked(world, lead, 6, 2)
    first = await became(world, "w1", lead.instance.instance_id, gives=1)
    await first.until(lambda: len(first.submits) == 3)
    await running_on(world, first, 3)
    second = await became(world, "w2", lead.instance.instance_id)
    await lead.until(lambda: sum(ran.done for ran in lead.ran.values()) == 4)
    await world.until(
        lambda: sum(len(one.submits) for one in (first, second)) == 4 and second.submits
    )
    await end(world, lead)
    await end(world, first)
    answers = await asyncio.gather(*asking)
    assert [one.choices[0].text for one in answers] == [ANSWER] * 6


async def test_another_instance_of_the_model_takes_nothing_over(world):
    """Only what was a stage of the group."""
    lead = await world.worker("w0")
    asking = await asked(world, lead, 2, 1)
    other = await world.worker("w1")
    await world.until(lambda: len(world.serving.fleet.serving(world.entry.model.name)) == 2)
    await end(world, lead)
    assert [one.choices[0].text for one in await asyncio.gather(*asking)] == [ANSWER] * 2
    assert other.submits == []
