import asyncio
import gc
import random
from contextlib import suppress
from weakref import ReferenceType, ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.clock import ManualClock, SystemClock, wall_offset_s
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.ids import new_request_id, worker_id_of
from pilotlight.common.secret_files import read_secret
from pilotlight.common.waiting import (
    Backoff,
    Flag,
    Group,
    SharedTimers,
    Wake,
    cancel_all,
    every,
    pause,
    within,
    woken,
)
from pilotlight.policy.ids import NodeId


@pytest.mark.anyio
async def test_within_ends_what_takes_too_long() -> None:
    ended = asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(DeadlineExceeded, match="the answer"):
        await within(0.01, never(), "the answer")
    assert ended.is_set()


@pytest.mark.anyio
async def test_within_goes_on_as_a_plain_await_does() -> None:
    """Through several waits, with what they raise, and with its result at the end."""
    seen: list[str] = []
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    broken.set_exception(KeyError("x"))

    async def work() -> str:
        await asyncio.sleep(0)
        try:
            await broken
        except KeyError:
            seen.append("raised")
        await asyncio.sleep(0.001)
        return "done"

    assert await within(5, work(), "the answer") == "done"
    assert seen == ["raised"]
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ready.set_result(7)
    assert await within(0, ready, "what is there already") == 7


@pytest.mark.anyio
async def test_within_is_cancelled_as_its_task_is() -> None:
    """What it awaits may clean up meanwhile, and wait for that."""
    begun, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    task = asyncio.create_task(within(5, work(), "the answer"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


class Thing:
    """Something that a frame has."""


@pytest.mark.anyio
async def test_within_leaves_nothing_to_the_collector_when_it_is_cancelled() -> None:
    things: list[ReferenceType[Thing]] = []

    async def wait() -> None:
        thing = Thing()
        things.append(ref(thing))
        await within(60.0, asyncio.Event().wait(), "nothing")

    gc.disable()
    try:
        waiting = asyncio.create_task(wait())
        await pause(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        del waiting
        assert [thing() for thing in things] == [None]
    finally:
        gc.enable()


@pytest.mark.anyio
async def test_within_has_no_timer_where_there_is_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> int:
        return 7

    monkeypatch.setattr(asyncio, "timeout", None)
    assert await within(5, work(), "the answer") == 7


@pytest.mark.anyio
async def test_a_flag_lets_its_task_go_on() -> None:
    flag = Flag()
    assert not flag.is_set()
    waiting = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    flag.set()
    assert await waiting
    assert await flag.wait(), "it stays set"
    flag.clear()
    waiting = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    flag.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.anyio
async def test_woken_says_why_it_returns() -> None:
    event = asyncio.Event()
    assert not await woken(event, 0.001)
    event.set()
    assert await woken(event, 5)
    assert not event.is_set()


@pytest.mark.anyio
async def test_a_wake_says_why_it_returns_and_forgets_it() -> None:
    wake = Wake()
    assert not await wake.wait(0.001)
    wake.set()
    assert await wake.wait(5)
    wake.set()
    wake.clear()
    assert not await wake.wait(0.0)
    waiting = asyncio.create_task(wake.wait(5))
    await asyncio.sleep(0)
    wake.set()
    wake.set()
    assert await waiting
    cancelled = asyncio.create_task(wake.wait(5))
    await asyncio.sleep(0)
    await cancel_all((cancelled,))
    wake.set()
    assert await wake.wait(0.0), "what came after a cancelled waiter is for the next one"


@pytest.mark.anyio
async def test_every_comes_again() -> None:
    count = 0
    async for _ in every(0.0):
        count += 1
        if count == 3:
            break
    assert count == 3


async def deaf_at_first(ended: asyncio.Event) -> None:
    """Loses its first cancellation, as what waits with ``asyncio.wait_for`` can."""
    for _ in range(2):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    ended.set()


@pytest.mark.anyio
async def test_a_group_ends_with_its_body_also_when_a_task_loses_its_cancellation() -> None:
    ended = asyncio.Event()

    async def body() -> None:
        async with Group() as group:
            group.create_task(deaf_at_first(ended))
            await pause(0)
            raise KeyError

    with pytest.raises(ExceptionGroup) as caught:
        await within(10.0, body(), "the group")
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
    assert ended.is_set()


@pytest.mark.anyio
async def test_a_group_ends_with_the_first_task_that_fails() -> None:
    ended = asyncio.Event()

    async def fails() -> None:
        raise KeyError

    async def body() -> None:
        async with Group() as group:
            group.create_task(deaf_at_first(ended))
            await pause(0)
            group.create_task(fails())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await within(10.0, body(), "the group")
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
    assert ended.is_set()


@pytest.mark.anyio
async def test_a_group_that_is_cancelled_time_and_again_ends_its_tasks_first() -> None:
    ended, started = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with Group() as group:
            group.create_task(deaf_at_first(ended))
            await pause(0)
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await started.wait()
    await within(10.0, cancel_all((task,), again_s=0.05), "the group")
    assert task.cancelled()
    assert ended.is_set()


@given(st.integers(0, 1000), st.integers(0, 2**32))
def test_delays_grow_to_their_limit(attempt: int, seed: int) -> None:
    backoff = Backoff(first_s=0.1, limit_s=2.0)
    delay_s = backoff.delay_s(attempt, random.Random(seed))
    ceiling_s = min(2.0, 0.1 * 2.0 ** min(attempt, 30))
    assert ceiling_s / 2 <= delay_s <= ceiling_s


def test_a_manual_clock_goes_when_told() -> None:
    clock = ManualClock(10.0)
    offset_s = wall_offset_s(clock)
    clock.advance(2.5)
    assert clock.monotonic_s() == 12.5
    assert wall_offset_s(clock) == pytest.approx(offset_s)
    assert SystemClock().monotonic_s() > 0


def test_ids_are_safe_in_subjects() -> None:
    assert new_request_id() != new_request_id()
    assert worker_id_of(NodeId("node-1"), 3) == "node-1-w3"
    assert not set(new_request_id()) & set(".*> ")


def test_a_secret_is_its_file_without_the_newline(tmp_path) -> None:
    (tmp_path / "x").write_text("hidden\n")
    assert read_secret(tmp_path, "x") == "hidden"
    assert read_secret(tmp_path, "y") is None
    assert read_secret(None, "x") is None


@pytest.mark.anyio
async def test_shared_timers_end_waits_and_leave_what_has_happened() -> None:
    timers, loop = SharedTimers(0.01), asyncio.get_running_loop()
    began_s = loop.time()
    ended, happened = loop.create_future(), loop.create_future()
    timers.limit(ended, 0.03)
    timers.limit(happened, 0.02)
    happened.set_result(True)
    assert await ended is False
    assert loop.time() - began_s >= 0.03
    assert await happened is True


@pytest.mark.anyio
async def test_as_many_waits_as_there_are_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, loop, made = SharedTimers(60.0), asyncio.get_running_loop(), list[float]()
    monkeypatch.setattr(loop, "call_at", lambda at_s, *_: made.append(at_s))
    for _ in range(100):
        timers.limit(loop.create_future(), 1.0)
    assert 1 <= len(set(made)) == len(made) <= 2
