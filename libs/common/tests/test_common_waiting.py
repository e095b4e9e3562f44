import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.clock import ManualClock, SystemClock, wall_offset_s
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.ids import new_request_id, worker_id_of
from pilotlight.common.settings import read_secret
from pilotlight.common.waiting import Backoff, every, within, woken
from pilotlight.policy.types import NodeId


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
async def test_woken_says_why_it_returns() -> None:
    event = asyncio.Event()
    assert not await woken(event, 0.001)
    event.set()
    assert await woken(event, 5)
    assert not event.is_set()


@pytest.mark.anyio
async def test_every_comes_again() -> None:
    count = 0
    async for _ in every(0.0):
        count += 1
        if count == 3:
            break
    assert count == 3


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


def test_a_secret_is_its_file_without_the_newline(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "x").write_text("hidden\n")
    assert read_secret(tmp_path, "x") == "hidden"
    assert read_secret(tmp_path, "y") is None
    assert read_secret(None, "x") is None
