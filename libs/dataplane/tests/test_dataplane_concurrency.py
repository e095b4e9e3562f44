"""How many chunks are read at once, which read comes first, and which gives way."""

import asyncio
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.common.clock import ManualClock, SystemClock
from pilotlight.common.testing import until
from pilotlight.dataplane import bandwidth
from pilotlight.dataplane.bandwidth import BandwidthLimit, SourceLimits
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.concurrency import Concurrency
from pilotlight.dataplane.lanes import Lane, LaneLimits, Lanes
from pilotlight.dataplane.priority_semaphore import PrioritySemaphore, Recalled, in_order_of_arrival
from pilotlight.policy.cluster import FetchPriority, OriginKind
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model


def settle(policy: Concurrency, link: Any, measurements: int) -> list[int]:
    """What it comes to when a link gives ``link(reads)`` bytes per second."""
    return [policy.measured(link(policy.limit)) for _ in range(measurements)]


@pytest.mark.parametrize("enough", [4, 6, 9, 16, 40])
def test_it_finds_about_what_the_link_needs(enough: int) -> None:
    """Each connection gives 50 MB/s, all together ``enough`` times that."""
    policy = Concurrency(least=2, most=64)
    limits = settle(policy, lambda reads: 50e6 * min(reads, enough), 60)
    later = limits[30:]
    # It may stop one step early, where the last one would bring less than 5 %, and looks one step
    # further now and then.
    assert min(later) >= enough / 1.25 - 1
    assert max(later) <= enough * 1.5 + 1
    assert sum(limit * 50e6 >= 50e6 * enough * 0.75 for limit in later) >= 0.9 * len(later)


def test_a_link_that_one_read_fills_is_asked_ever_more_rarely() -> None:
    policy = Concurrency(least=4, most=64)
    limits = settle(policy, lambda _: 25e6, 300)
    assert set(limits) == {4, 5}
    assert limits.count(5) <= 10


def test_a_link_that_becomes_faster_is_noticed() -> None:
    policy = Concurrency(least=4, most=32)
    settle(policy, lambda _: 25e6, 20)
    limits = settle(policy, lambda reads: 25e6 * reads, 80)
    assert limits[-1] == 32


def test_what_breaks_is_asked_for_less() -> None:
    policy = Concurrency(least=2, most=64)
    settle(policy, lambda reads: 1e6 * reads, 40)
    assert policy.limit > 60
    assert [policy.broke() for _ in range(6)] == [31, 15, 7, 3, 2, 2]


@settings(max_examples=300, deadline=None)
@given(least=st.integers(1, 20), more=st.integers(0, 60), seed=st.integers(0, 1000))
def test_it_stays_within_its_bounds_whatever_is_measured(least: int, more: int, seed: int) -> None:
    rng, policy = random.Random(seed), Concurrency(least=least, most=least + more)
    for _ in range(200):
        limit = policy.broke() if rng.random() < 0.05 else policy.measured(rng.expovariate(1e-6))
        assert limit == policy.limit
        assert least <= limit <= least + more


@pytest.mark.parametrize(("least", "most"), [(0, 4), (5, 4), (-1, -1)])
def test_bounds_that_hold_nothing_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="reads at once"):
        Concurrency(least=least, most=most)


@pytest.mark.anyio
async def test_who_matters_more_is_next_and_asks_one_back() -> None:
    permits = PrioritySemaphore(2)
    ranks = {"low": 1, "joined": 1}
    low = [await permits.take(lambda: (ranks["low"],)) for _ in range(2)]
    waiting = asyncio.create_task(permits.take(lambda: (ranks["joined"],)))
    await asyncio.sleep(0)
    assert not any(permit.recalled.is_set() for permit in low)
    high = asyncio.create_task(permits.take(lambda: (0,)))
    await asyncio.sleep(0)
    assert [permit.recalled.is_set() for permit in low] == [False, True], (
        "the newest of those that matter least"
    )
    permits.give_back(low[1])
    first = await high
    # The rank of a waiting read may rise meanwhile.
    ranks["joined"] = 0
    late = asyncio.create_task(permits.take(lambda: (1,)))
    await asyncio.sleep(0)
    permits.give_back(first)
    assert (await waiting).rank() == (0,)
    assert not late.done()
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert (permits.held, permits.wanted) == (2, 0)


@pytest.mark.anyio
async def test_a_turn_that_comes_as_its_waiter_leaves_is_given_on() -> None:
    permits = PrioritySemaphore(1)
    held = await permits.take(in_order_of_arrival)
    leaving = asyncio.create_task(permits.take(in_order_of_arrival))
    await asyncio.sleep(0)
    permits.give_back(held)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert permits.held == 0
    async with asyncio.timeout(5):
        await permits.take(in_order_of_arrival)


@pytest.mark.anyio
async def test_a_lane_measures_its_link_and_asks_for_more() -> None:
    clock = ManualClock()
    lane = Lane(LaneLimits(least=2, most=8), BandwidthLimit(None, clock), clock)
    left = 200

    async def read() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            async with lane.permit(1000, in_order_of_arrival, asyncio.Event()) as progress:
                # Each read takes a second for 1000 bytes, however many there are.
                progress(1000)
                clock.advance(1.0 / lane.reads)
                await asyncio.sleep(0)

    async with asyncio.timeout(10):
        await asyncio.gather(*(read() for _ in range(16)))
    assert lane.reads == 8
    assert lane.bytes_per_s == pytest.approx(8000, rel=0.3)


@pytest.mark.anyio
async def test_who_waits_for_the_link_gives_its_turn_back_when_asked() -> None:
    clock = SystemClock()
    lane = Lane(LaneLimits(least=1, most=1), BandwidthLimit(1.0, clock), clock)
    recalled = asyncio.Event()

    async def prefetch() -> None:
        async with lane.permit(10**9, lambda: (1,), recalled):
            raise AssertionError("the link has no room for it for years")

    reading = asyncio.create_task(prefetch())
    await until(lambda: lane.busy == 1)
    cold = asyncio.create_task(first_of(lane))
    async with asyncio.timeout(5):
        with pytest.raises(Recalled):
            await reading
        await cold


async def first_of(lane: Lane) -> None:
    async with lane.permit(0, lambda: (0,), asyncio.Event()):
        pass


class Slow:
    """A source that gives a byte whenever the test says so, for every read at once."""

    kind = OriginKind.SOURCE
    trusted = True
    link = "slow"
    name = "slow"

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[tuple[int, int]] = []
        self.reading = 0

    def __call__(self, model: Model, manifest: Manifest) -> "Slow":
        return self

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        self.begun.append((part, work.position))
        self.reading += 1
        try:
            while work.left_bytes > 1 and not self.open.wait(0.005):
                work.write(b"\1")
            work.write(b"\1" * work.left_bytes)
        finally:
            self.reading -= 1

    def close(self) -> None:
        pass


@pytest.mark.anyio
async def test_a_prefetch_gives_way_to_a_cold_start_and_goes_on_where_it_was(
    make_node, register
) -> None:
    slow = Slow()
    node = make_node(open_source=slow, threads=2)
    low, high = node.add(register("low")), node.add(register("high", vocab_size=64))
    prefetch = node.copies.claim(
        low.model, [0, 1], InstanceId("a"), leased=False, priority=FetchPriority.PREFETCH
    )
    await until(lambda: slow.reading == 2 and node.copies.transfers()[0].done_bytes > 2)
    before = list(slow.begun)
    cold = node.copies.claim(high.model, [0, 1], InstanceId("b"), leased=False)
    await until(lambda: len(slow.begun) == 4)
    assert [position for _, position in before] == [0, 0]
    assert [position for _, position in slow.begun[2:]] == [0, 0], (
        "both threads are the cold start's"
    )
    slow.open.set()
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(cold)] == [0, 1]
        assert [part.part async for part in node.copies.ready_parts(prefetch)] == [0, 1]
    resumed = slow.begun[4:]
    assert sorted(part for part, _ in resumed) == [0, 1]
    assert all(position > 0 for _, position in resumed), "what had come was kept"


@pytest.mark.anyio
async def test_a_prefetch_that_a_worker_waits_for_is_one_no_more(make_node, register) -> None:
    slow = Slow()
    node = make_node(open_source=slow, threads=1)
    low, other = node.add(register("low")), node.add(register("other", vocab_size=64))
    node.copies.claim(
        low.model, [0], InstanceId("a"), leased=False, priority=FetchPriority.PREFETCH
    )
    await until(lambda: slow.reading == 1)
    lease = node.copies.claim(low.model, [0], InstanceId("a"), leased=True)
    cold = node.copies.claim(other.model, [0], InstanceId("b"), leased=False)
    await until(lambda: len(node.copies.transfers()) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(slow.begun) == 1, "it is not asked to give way"
    slow.open.set()
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(lease)] == [0]
        assert [part.part async for part in node.copies.ready_parts(cold)] == [0]


@pytest.mark.anyio
async def test_a_lease_that_can_wait_leaves_a_prefetch_what_it_is(make_node, register) -> None:
    """A stage that grows leases parts which nobody waits for."""
    slow = Slow()
    node = make_node(open_source=slow, threads=1)
    low, other = node.add(register("low")), node.add(register("other", vocab_size=64))
    low_priority = FetchPriority.PREFETCH
    node.copies.claim(low.model, [0], InstanceId("a"), leased=False, priority=low_priority)
    await until(lambda: slow.reading == 1)
    lease = node.copies.claim(low.model, [0], InstanceId("a"), leased=True, priority=low_priority)
    cold = node.copies.claim(other.model, [0], InstanceId("b"), leased=False)
    await until(lambda: len(slow.begun) == 2)
    slow.open.set()
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(cold)] == [0]
        assert [part.part async for part in node.copies.ready_parts(lease)] == [0]


@pytest.mark.anyio
async def test_the_link_is_the_cold_starts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    async def passes(seconds: float) -> None:
        """One turn at a time is on the link, so its pauses are all the time that passes; the others
        come to the queue meanwhile.
        """
        for _ in range(5):
            await asyncio.sleep(0)
        clock.advance(seconds)

    monkeypatch.setattr(bandwidth, "pause", passes)
    limit, first_s = BandwidthLimit(1e6, clock), clock.monotonic_s()
    ended_s: dict[str, float] = {}

    async def take(name: str, size_bytes: int, rank: int) -> None:
        await limit.take(size_bytes, lambda: (rank,))
        ended_s[name] = clock.monotonic_s() - first_s

    low = asyncio.create_task(take("prefetch", 150_000, 1))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await asyncio.gather(*(take(f"cold {number}", 30_000, 0) for number in range(3)))
        await low
    assert list(ended_s) == ["cold 0", "cold 1", "cold 2", "prefetch"]
    # A prefetch keeps the link for 20 ms at most, and only what it had begun.
    assert list(ended_s.values()) == pytest.approx([0.05, 0.08, 0.11, 0.24])


@pytest.mark.anyio
async def test_what_a_cold_start_needs_of_a_model_comes_before_the_rest_of_it(
    make_node, register
) -> None:
    """The second part of a model is for later, on the same node and in the same fetch: even where
    its parts come first in order.
    """
    slow = Slow()
    node = make_node(open_source=slow, threads=2)
    one, other = node.add(register("one")), node.add(register("other", vocab_size=64))
    last = len(one.manifest.parts) - 1
    rest = node.copies.claim(
        one.model, range(last), InstanceId("a"), leased=False, priority=FetchPriority.PREFETCH
    )
    needed = node.copies.claim(one.model, [last], InstanceId("a"), leased=False)
    await until(lambda: slow.reading == 2)
    assert sorted(part for part, _ in slow.begun) == [0, last]
    cold = node.copies.claim(other.model, [1], InstanceId("b"), leased=False)
    await until(lambda: len(slow.begun) == 3)
    assert slow.begun[2] == (1, 0), "the rest gives way to what another model's cold start needs"
    slow.open.set()
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(needed)] == [last]
        assert [part.part async for part in node.copies.ready_parts(cold)] == [1]
        assert [part.part async for part in node.copies.ready_parts(rest)] == list(range(last))


@pytest.mark.anyio
async def test_a_permit_that_is_free_is_had_at_once_and_never_before_those_who_wait() -> None:
    permits = PrioritySemaphore(2)
    first, second = permits.take_now(in_order_of_arrival), permits.take_now(in_order_of_arrival)
    assert first is not None
    assert second is not None
    assert permits.take_now(in_order_of_arrival) is None
    waiting = asyncio.create_task(permits.take(in_order_of_arrival))
    await until(lambda: permits.wanted == 1)
    permits.resize(1)
    permits.give_back(first)
    assert permits.take_now(in_order_of_arrival) is None
    permits.give_back(second)
    permits.give_back(await waiting)
    assert permits.take_now(in_order_of_arrival) is not None


@pytest.mark.parametrize(
    ("link", "kind", "reads"),
    [
        ("file://", OriginKind.SOURCE, 8),
        ("disk", OriginKind.DISK, 8),
        ("s3://bucket", OriginKind.SOURCE, 2),
        ("node-2", OriginKind.PEER, 2),
    ],
)
def test_files_of_this_machine_are_read_by_every_core_from_the_first_moment(
    link: str, kind: OriginKind, reads: int
) -> None:
    class From:
        def __init__(self) -> None:
            self.link, self.kind = link, kind

    clock = SystemClock()
    lanes = Lanes(LaneLimits(least=2, most=8, local=64), SourceLimits(None, clock), clock)
    assert lanes.of(From()).reads == reads
