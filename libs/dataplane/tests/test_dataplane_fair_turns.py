"""Fetches that share a link: each gets as much of it as the others."""

import asyncio
import threading
from collections import Counter

import pytest

from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.common.clock import ManualClock
from pilotlight.common.testing import until
from pilotlight.dataplane import bandwidth
from pilotlight.dataplane.bandwidth import BandwidthLimit
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.fair_turns import FairTurns
from pilotlight.dataplane.lanes import Lane, LaneLimits
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model


def test_a_newcomer_begins_where_the_least_served_one_is() -> None:
    turns = FairTurns()
    with turns.of("a") as first, turns.of("b") as second:
        first.took(10)
        second.took(4)
        with turns.of("c") as newcomer:
            assert newcomer.had_bytes == 4
            newcomer.took(3)
        with turns.of("a") as again, turns.of("c") as back:
            assert again is first
            assert back.had_bytes == 4, "what it had before it left is forgotten"


def test_who_leaves_is_forgotten() -> None:
    turns = FairTurns()
    with turns.of("a") as turn:
        turn.took(10)
    with turns.of("b") as turn:
        assert turn.had_bytes == 0


@pytest.mark.anyio
async def test_a_limited_link_is_shared_within_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fetch has a large chunk on its way when the second one begins."""
    clock, half = ManualClock(), asyncio.Event()
    began_s, ended_s = clock.monotonic_s(), dict[str, float]()

    async def passes(seconds: float) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        clock.advance(seconds)
        if clock.monotonic_s() - began_s >= 0.5:
            half.set()

    monkeypatch.setattr(bandwidth, "pause", passes)
    lane = Lane(LaneLimits(least=4, most=4), BandwidthLimit(1e6, clock), clock)

    async def read(name: str, part: int, size_bytes: int) -> None:
        with lane.turns.of(name) as turn:

            def rank() -> tuple[int, ...]:
                return (0, turn.had_bytes, part, 0)

            async with lane.permit(size_bytes, rank, asyncio.Event(), turn):
                ended_s[name] = clock.monotonic_s() - began_s

    first = asyncio.create_task(read("first", 9, 1_000_000))
    async with asyncio.timeout(10):
        await half.wait()
        await asyncio.gather(first, read("second", 0, 400_000))
    # Half of the link each: the second has its 0.4 MB after 0.8 s, the first the rest of its 1 MB
    # when all 1.4 MB are there.
    assert ended_s["second"] == pytest.approx(1.3, abs=0.05)
    assert ended_s["first"] == pytest.approx(1.4, abs=0.01)


class StepByStep:
    """A source of several models that answers one read whenever the test says so."""

    kind = OriginKind.SOURCE
    trusted = True
    link = "narrow"
    name = "narrow"

    def __init__(self, begun: list[tuple[str, int]], steps: threading.Semaphore) -> None:
        self._begun, self._steps = begun, steps
        self._model = ""

    def __call__(self, model: Model, manifest: Manifest) -> "StepByStep":
        source = StepByStep(self._begun, self._steps)
        source._model = model.name
        return source

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        self._begun.append((self._model, work.left_bytes))
        assert self._steps.acquire(timeout=10)
        work.write(b"\1" * work.left_bytes)

    def close(self) -> None:
        pass


@pytest.mark.anyio
async def test_a_later_cold_start_does_not_hold_up_an_earlier_one(make_node, register) -> None:
    begun, steps = list[tuple[str, int]](), threading.Semaphore(0)
    node = make_node(open_source=StepByStep(begun, steps), threads=1, native=False)
    one, two = node.add(register("one")), node.add(register("two", vocab_size=64))
    parts = range(len(one.manifest.parts))
    first = node.copies.claim(one.model, parts, InstanceId("a"), leased=False)
    steps.release()
    steps.release()
    await until(lambda: len(begun) == 3)
    second = node.copies.claim(two.model, parts, InstanceId("b"), leased=False)
    await until(lambda: len(node.copies.transfers()) == 2)
    before = len(begun)
    for _ in range(2 * len(parts) - 2):
        steps.release()
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(first)] == list(parts)
        assert [part.part async for part in node.copies.ready_parts(second)] == list(parts)
    shared, had = begun[before:], Counter[str]()
    last = len(shared) - 1 - [name for name, _ in reversed(shared)].index("one")
    for name, size_bytes in shared[: last + 1]:
        had[name] += size_bytes
        assert had["two"] - had["one"] <= max(size for _, size in begun)
