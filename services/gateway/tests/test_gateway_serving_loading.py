"""Requests that are given to an instance which is still loading: they wait there as they would
here, and nothing of them is lost.
"""

import asyncio
import re
from dataclasses import replace

import openai
import pytest

from pilotlight.common.messages.demand import DEMAND_SUBJECTS, DemandVector
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
PROMPT = {"model": "fox", "prompt": "x", "max_tokens": 99}


class Told:
    """What the scheduler was told."""

    def __init__(self):
        self.waiting: list[int] = []
        self.reports: list[PhaseReport] = []

    async def listen(self, bus):
        await bus.subscribe(DEMAND_SUBJECTS, DemandVector, self._demand)
        await bus.serve(PHASES_SUBJECT, PhaseReport, self._phases)
        return self

    async def _demand(self, vector):
        self.waiting.append(sum(demand.waiting for demand in vector.demands))

    async def _phases(self, report):
        self.reports.append(report)
        return PhasesKept()

    @property
    def first_tokens(self):
        return [report.first_token for report in self.reports if report.first_token is not None]


def fails(submit, code="not_loaded"):
    key = {"request_id": submit.request_id, "attempt": submit.attempt}
    return [
        TokenEntry(
            seq=len(submit.output_ids),
            token_ids=[],
            finish=FinishReason.ERROR,
            code=code,
            message="gone",
            **key,
        )
    ]


async def loading(world, name="w0", kv_tokens=1000):
    """A worker whose instance loads; what it has for its requests it sends when the test says
    so.
    """
    worker = await world.worker(name, ready=False)
    worker.kv_capacity_tokens = kv_tokens
    worker.post = lambda ran: ()
    await worker.loading()
    return worker


async def ready(worker):
    """Its instance is loaded, and sends what it has."""
    await worker.ready()
    for ran in list(worker.ran.values()):
        await worker.send(ran, ran.entries)


async def test_a_held_request_is_given_to_an_instance_that_loads(world):
    told = await Told().listen(world.bus)
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={**PROMPT, "stream": True})
    )
    await world.until(lambda: world.serving.queue.held == 1)
    worker = await loading(world)
    await worker.until(lambda: len(worker.submits) == 1)
    assert world.serving.queue.held == 0
    # It waits still: the scheduler hears of it all the time, and its client within a second.
    count = len(told.waiting)
    await world.until(lambda: len(told.waiting) >= count + 6)
    assert set(told.waiting[count:]) == {1}
    await worker.ready()
    await world.until(lambda: told.waiting[-1] == 0)
    (ran,) = worker.ran.values()
    await worker.send(ran, ran.entries)
    response = await asking
    comments = [line for line in response.text.split("\n\n") if line.startswith(": pilotlight")]
    assert re.fullmatch(r": pilotlight queue=0 phase=queue elapsed=\d+\.\ds", comments[0])
    assert (
        len(
            [
                line
                for line in comments
                if re.fullmatch(r": pilotlight queue=0 phase=load elapsed=\d+\.\ds", line)
            ]
        )
        >= 2
    )
    assert " dogs." in response.text
    await world.until(lambda: bool(told.first_tokens))
    phases = {phase.name: phase for report in told.reports for phase in report.phases}
    assert set(phases) == {"queue", "submit", "deliver"}
    (first,) = told.first_tokens
    assert (
        phases["queue"].start_s
        == first.arrived_s
        <= phases["submit"].start_s
        <= phases["submit"].end_s
    )
    assert phases["submit"].end_s < phases["deliver"].start_s
    assert len(worker.submits) == 1
    # A request that comes now meets a ready instance.
    worker.post = lambda ran: ran.entries
    warm = await world.http.post("/v1/completions", json={**PROMPT, "stream": True})
    assert ": pilotlight" not in warm.text
    assert len(told.first_tokens) == 1


async def test_tokens_may_come_before_the_instance_is_shown_as_ready(world):
    told = await Told().listen(world.bus)
    worker = await loading(world)
    worker.post = lambda ran: ran.entries[:3]
    stream = await world.client.completions.create(**PROMPT, stream=True)
    await anext(aiter(stream))
    await world.until(lambda: bool(told.first_tokens))
    assert told.waiting[-1] == 1, "the start is not over before it is said to be"
    (ran,) = worker.ran.values()
    await worker.send(ran, ran.entries)
    await world.until(lambda: told.waiting[-1] == 0)
    await stream.close()


async def test_a_request_that_comes_while_it_loads_goes_there_at_once(world):
    told = await Told().listen(world.bus)
    worker = await loading(world)
    await world.until(lambda: bool(world.serving.fleet.open(world.entry.model.name)))
    asking = [asyncio.create_task(world.client.completions.create(**PROMPT, n=n)) for n in (1, 2)]
    await worker.until(lambda: len(worker.submits) == 3)
    await world.until(lambda: bool(told.waiting) and told.waiting[-1] == 3)
    await ready(worker)
    answers = await asyncio.gather(*asking)
    assert [choice.text for answer in answers for choice in answer.choices] == [ANSWER] * 3
    await world.until(lambda: bool(told.first_tokens))
    assert len(told.first_tokens) == 1


async def test_an_instance_that_loads_and_is_not_open_gets_nothing(world):
    worker = await world.worker(ready=False)
    await worker.ready(InstanceState.LOADING)
    await world.until(lambda: bool(world.serving.fleet.instances()))
    asking = asyncio.create_task(world.client.completions.create(**PROMPT))
    await world.until(lambda: world.serving.queue.held == 1)
    await worker.report()
    assert not worker.submits
    await worker.ready()
    assert (await asking).choices[0].text == ANSWER


async def test_no_more_are_given_than_its_kv_has_room_for(world):
    worker = await loading(world, kv_tokens=25)
    await world.until(lambda: bool(world.serving.fleet.open(world.entry.model.name)))
    asking = [
        asyncio.create_task(
            world.client.completions.create(model="fox", prompt=[5] * 10, max_tokens=4)
        )
        for _ in range(4)
    ]
    await worker.until(lambda: len(worker.submits) == 2)
    await world.until(lambda: world.serving.queue.held == 2)
    # One leaves, and the next has its room.
    asking[0].cancel()
    await worker.until(lambda: len(worker.submits) == 3)
    assert world.serving.queue.held == 1
    await ready(worker)
    await worker.until(lambda: len(worker.submits) == 4)
    await ready(worker)
    await asyncio.gather(*asking[1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_loads_that_fail_cost_time_alone(world, stream):
    """As often as may be: the request was held as long, and never ran."""
    failures = 5
    for number in range(failures):
        worker = await loading(world, f"w{number}")
        if number == 0:
            asking = asyncio.create_task(
                world.http.post("/v1/completions", json={**PROMPT, "stream": stream})
            )
        await worker.until(lambda worker=worker: len(worker.submits) == 1)
        (ran,) = worker.ran.values()
        ran.entries = fails(ran.submit)
        await worker.ready(InstanceState.FAILED)
        await world.until(
            lambda number=number: (
                world.serving.fleet.instances()[number].instance.state is InstanceState.FAILED
            )
        )
        await worker.send(ran, ran.entries)
        await world.until(lambda: world.serving.queue.held == 1)
    last = await world.worker("last")
    response = await asking
    assert response.status_code == 200
    assert "error" not in response.text
    assert [submit.attempt for submit in last.submits] == [failures + 1]
    assert response.text.count("dogs") == 1


async def test_a_worker_that_dies_while_it_loads_loses_nothing(world):
    first = await loading(world, "w0")
    asking = asyncio.create_task(world.client.completions.create(**PROMPT))
    await first.until(lambda: len(first.submits) == 1)
    await first.die()
    await first.declare_dead()
    await world.until(lambda: world.serving.queue.held == 1)
    second = await loading(world, "w1")
    await second.until(lambda: len(second.submits) == 1)
    await ready(second)
    assert (await asking).choices[0].text == ANSWER
    assert second.submits[0].attempt == 2


async def test_a_resumed_request_waits_where_it_loads(world):
    first = await world.worker("w0")
    first.post = lambda ran: ran.entries[:5]
    stream = await world.client.completions.create(**PROMPT, stream=True)
    chunks = aiter(stream)
    text = (await anext(chunks)).choices[0].text
    (ran,) = first.ran.values()
    await first.until(lambda: ran.acked_seq == 5)
    second = await loading(world, "w1")
    await first.die()
    await first.declare_dead()
    await first.ready(InstanceState.FAILED)
    await second.until(lambda: len(second.submits) == 1)
    assert len(second.submits[0].output_ids) == 5
    await ready(second)
    async for chunk in chunks:
        text += chunk.choices[0].text
    assert text == ANSWER


async def test_it_waits_no_longer_than_it_may_be_held(make_world):
    world = await make_world(hold_timeout_s=1.5, hold_slo_factor=0)
    worker = await loading(world)
    with pytest.raises(openai.InternalServerError, match="phase load") as caught:
        await world.client.completions.create(**PROMPT)
    assert (caught.value.status_code, caught.value.code) == (503, "deadline_exceeded")
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.cancelled)
    # Once it is ready, the time of being held is over.
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={**PROMPT, "stream": True})
    )
    await worker.until(lambda: len(worker.ran) == 2)
    ran = worker.ran[worker.submits[1].request_id, 1]
    entries, ran.entries = ran.entries, []
    await worker.ready()
    await world.until(lambda: world.serving.queue.demand() == ())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await asyncio.shield(asking)
    ran.entries = entries
    await ready(worker)
    response = await asking
    assert " dogs." in response.text
    assert ": pilotlight queue=0 phase=prefill " in response.text
    assert len(worker.submits) == 2


async def test_another_instance_that_is_ready_first_takes_over(world):
    slow = await loading(world, "w0")
    asking = asyncio.create_task(world.client.completions.create(**PROMPT))
    await slow.until(lambda: len(slow.submits) == 1)
    fast = await world.worker("w1")
    assert (await asking).choices[0].text == ANSWER
    assert [submit.attempt for submit in fast.submits] == [2]
    (ran,) = slow.ran.values()
    await slow.until(lambda: ran.done)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_waits_no_more(world, stream):
    told = await Told().listen(world.bus)
    worker = await loading(world)
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={**PROMPT, "stream": stream})
    )
    await worker.until(lambda: len(worker.submits) == 1)
    await world.until(lambda: bool(told.waiting) and told.waiting[-1] == 1)
    asking.cancel()
    (ran,) = worker.ran.values()
    await worker.until(lambda: ran.cancelled)
    await world.until(lambda: told.waiting[-1] == 0 and world.serving.requests.live == 0)


@pytest.mark.parametrize("told_first", [False, True])
async def test_a_changed_source_ends_it(world, told_first):
    worker = await loading(world)
    asking = asyncio.create_task(world.http.post("/v1/completions", json=PROMPT))
    await worker.until(lambda: len(worker.submits) == 1)
    (ran,) = worker.ran.values()
    worker.instance = replace(worker.instance, reason="source_changed: model.safetensors is gone")
    if told_first:
        await worker.ready(InstanceState.FAILED)
        await world.until(
            lambda: world.serving.fleet.instances()[0].instance.state is InstanceState.FAILED
        )
    await worker.send(ran, fails(ran.submit))
    if not told_first:
        await worker.ready(InstanceState.FAILED)
    response = await asking
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "source_changed"
    assert len(worker.submits) == 1


async def test_a_changed_source_is_nothing_to_those_who_are_served(world):
    """Another start of the model failed for it; this one had its bytes by then.

    It is resumed as any other request.
    """
    first = await loading(world, "w0")
    first.post = lambda ran: ran.entries[:5]
    stream = await world.client.completions.create(**PROMPT, stream=True)
    chunks = aiter(stream)
    text = (await anext(chunks)).choices[0].text
    other = await loading(world, "w1")
    other.instance = replace(other.instance, reason="source_changed: model.safetensors is gone")
    await other.ready(InstanceState.FAILED)
    await world.until(
        lambda: world.serving.fleet.instances()[1].instance.state is InstanceState.FAILED
    )
    await first.ready()
    await world.until(lambda: world.serving.queue.demand() == ())
    await world.worker("w2")
    await first.die()
    await first.declare_dead()
    async for chunk in chunks:
        text += chunk.choices[0].text
    assert text == ANSWER


async def test_stopping_lets_it_go(make_world):
    world = await make_world(drain_s=20.0)
    worker = await loading(world)
    asking = asyncio.create_task(world.http.post("/v1/completions", json=PROMPT))
    await worker.until(lambda: len(worker.submits) == 1)
    await world.server.stop()
    assert (await asking).status_code == 503


async def test_an_engine_that_dies_of_a_request_is_not_asked_for_ever(world):
    """What has run counts, also on an instance that was loading."""
    worker = await loading(world)
    worker.script = lambda submit: (
        fails(submit, "engine_failed") if not submit.output_ids else entries_of(submit, [])
    )
    worker.post = lambda ran: ran.entries
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client.completions.create(**PROMPT)
    assert caught.value.code == "engine_failed"
    assert len(worker.submits) == 3
