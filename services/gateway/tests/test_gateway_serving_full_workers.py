"""Workers that have refused a request for want of a place: who waits for one gets the next."""

import asyncio

import pytest

from pilotlight.common.clock import ManualClock, SystemClock
from pilotlight.common.messages.tokens import SubmitReply
from pilotlight.gateway.serving.full_workers import FullWorkers
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.policy.full import FORGET_S
from pilotlight.policy.ids import ModelName, WorkerId

pytestmark = pytest.mark.anyio

WORKER, OTHER = WorkerId("w0"), WorkerId("w1")
FOX, OWL = ModelName("fox"), ModelName("owl")
PROMPT = {"model": "fox", "prompt": "x", "max_tokens": 99}


async def test_a_full_worker_takes_one_for_each_that_ends_whoever_waits():
    full, called = FullWorkers(ManualClock()), list[ModelName]()
    full.on_room = called.append
    full.refused(WORKER, 1.0)
    assert full.may_take(OTHER, FOX)
    assert not any(full.may_take(WORKER, model) for model in (FOX, OWL, FOX))
    full.freed(WORKER)
    assert called == [FOX, OWL], "the place is there until one of them is sent"
    assert full.may_take(WORKER, FOX)
    full.sent(WORKER)
    assert not full.may_take(WORKER, FOX)
    full.forget(WORKER)
    assert len(full) == 0


async def test_the_first_that_waits_is_called_first_and_the_next_with_the_next_place():
    full, sent = FullWorkers(ManualClock()), list[ModelName]()

    def send(model: ModelName) -> None:
        while full.may_take(WORKER, model):
            full.sent(WORKER)
            sent.append(model)

    full.on_room = send
    full.refused(WORKER, 1.0)
    for model in (OWL, FOX):
        assert not full.may_take(WORKER, model)
    for _ in range(4):
        full.freed(WORKER)
    assert sent == [OWL, FOX, OWL, FOX], "by turns"
    full.forget(WORKER)


async def test_who_waits_is_called_when_one_may_go_to_see():
    full, called = FullWorkers(SystemClock()), asyncio.Event()
    full.on_room = lambda _: called.set()
    full.refused(WORKER, 0.02)
    assert not full.may_take(WORKER, FOX)
    await asyncio.wait_for(called.wait(), 5.0)
    assert full.may_take(WORKER, FOX)


async def test_a_worker_that_refuses_again_is_looked_at_later():
    full, called = FullWorkers(SystemClock()), asyncio.Event()
    full.on_room = lambda _: called.set()
    full.refused(WORKER, 0.01)
    assert not full.may_take(WORKER, FOX)
    full.refused(WORKER, 0.05)
    await asyncio.wait_for(called.wait(), 5.0)
    assert full.may_take(WORKER, FOX), "not at the first time, which was over before"


async def test_a_worker_that_refuses_no_more_is_forgotten_and_who_waits_is_called():
    clock = ManualClock()
    full, called = FullWorkers(clock), list[ModelName]()
    full.on_room = called.append
    full.refused(WORKER, 2 * FORGET_S)
    assert not full.may_take(WORKER, FOX)
    clock.advance(FORGET_S)
    assert full.may_take(WORKER, OWL)
    assert (called, len(full)) == ([FOX], 0)


async def test_nothing_is_remembered_of_workers_that_nobody_asks_for_any_more():
    clock = ManualClock()
    full = FullWorkers(clock)
    full.refused(OTHER, 1.0)
    clock.advance(FORGET_S)
    full.refused(WORKER, 1.0)
    assert len(full) == 1
    clock.advance(FORGET_S)
    full.refused(WORKER, 1.0)
    assert not full.may_take(WORKER, FOX), "it has refused again"
    full.forget(WORKER)


async def test_a_request_goes_as_soon_as_another_has_ended(world):
    """Not when the worker said that one might try again: all that runs there ends before that."""
    worker = await world.worker()
    ids = world.ids("The quick brown fox")
    worker.script = lambda submit: entries_of(submit, ids)
    worker.post = lambda ran: ran.entries[:1]
    first = asyncio.create_task(world.client.completions.create(**PROMPT))
    await worker.until(lambda: len(worker.submits) == 1)
    worker.refuse = [
        SubmitReply(accepted=False, code="queue_full", message="full", retry_after_s=600.0)
    ]
    second = asyncio.create_task(world.client.completions.create(**PROMPT))
    await worker.until(lambda: not worker.refuse)
    await world.until(lambda: len(world.serving.queue._lines["fox"]) == 1)
    worker.post = lambda ran: ran.entries
    (ran,) = worker.ran.values()
    await worker.send(ran, ran.entries[1:])
    answers = await asyncio.gather(first, second)
    assert [answer.choices[0].text for answer in answers] == ["The quick brown fox"] * 2
