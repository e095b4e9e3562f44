"""What an engine says reaches the one that listens: everything, in order, within a bound."""

import asyncio

import pytest

from pilotlight.common.envelope import Timed
from pilotlight.common.messages.engine import StepDone
from pilotlight.common.messages.pipelines import DoorOpened
from pilotlight.worker.engines.client import EngineEvent
from pilotlight.worker.engines.event_queue import EventQueue

pytestmark = pytest.mark.anyio

AT_MOST = 4


def event(number: int) -> Timed[EngineEvent]:
    return Timed(DoorOpened(port=number))


def step(number: int) -> Timed[EngineEvent]:
    return Timed(
        StepDone(produced=(), waiting=0, running=number, kv_free_tokens=0, step_time_s=0.0)
    )


def number_of(told: Timed[EngineEvent]) -> int:
    assert isinstance(told.message, DoorOpened)
    return told.message.port


async def test_everything_is_heard_in_order_by_a_slow_and_by_a_fast_listener() -> None:
    for pauses in (0, 3):
        queue, heard = EventQueue(AT_MOST), list[int]()

        async def say(queue: EventQueue = queue) -> None:
            for number in range(50):
                await queue.put(event(number))

        saying = asyncio.create_task(say())
        async for told in queue.events():
            heard.append(number_of(told))
            for _ in range(pauses):
                await asyncio.sleep(0)
            if len(heard) == 50:
                queue.end()
        await saying
        assert heard == list(range(50))


async def test_an_engine_waits_for_room() -> None:
    queue = EventQueue(AT_MOST)
    for number in range(AT_MOST):
        assert queue.has_room
        queue.put_now(event(number))
    assert not queue.has_room
    late = asyncio.create_task(queue.put(event(AT_MOST)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not late.done()
    listening = queue.events()
    assert number_of(await anext(listening)) == 0
    await late
    assert [number_of(await anext(listening)) for _ in range(AT_MOST)] == [1, 2, 3, 4]


async def test_steps_that_are_there_are_heard_together_up_to_what_is_no_step() -> None:
    queue = EventQueue(AT_MOST)
    queue.put_all_now([step(1), step(2), event(0), step(3)])
    late = asyncio.create_task(queue.put(step(4)))
    await asyncio.sleep(0)
    listening = queue.events()
    assert await anext(listening) == step(1)
    assert queue.steps_now() == [step(2)]
    assert queue.steps_now() == []
    assert await anext(listening) == event(0)
    await late
    assert queue.steps_now() == [step(3), step(4)]
    assert queue.room == AT_MOST


async def test_the_end_comes_at_once() -> None:
    queue = EventQueue(AT_MOST)
    queue.put_now(event(1))
    queue.end()
    assert [told async for told in queue.events()] == []
