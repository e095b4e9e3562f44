"""In which order a link takes over what has landed, and what it does where anything is wrong.

Nothing is read here.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest, unit_digests
from pilotlight.common.errors import HostPoolFull
from pilotlight.common.messages.link import Placed, Region
from pilotlight.dataplane.chunk_fill import ChunkFill, ChunkWork
from pilotlight.dataplane.link.nixl_process import NixlFailed
from pilotlight.dataplane.link.nixl_reads import UnitRead
from pilotlight.dataplane.link.one_sided import WINDOW, OneSidedReads
from pilotlight.dataplane.readers import ReadProgress
from pilotlight.policy.ids import NodeId

pytestmark = pytest.mark.anyio

REGION = Region(agent=b"sender", address=1 << 40, size_bytes=64 * UNIT_BYTES)
DATA = random.Random(1).randbytes(3 * UNIT_BYTES + 1000)


class FakeMemory:
    """``ReadsMemory`` whose reads end when the test says so."""

    def __init__(self) -> None:
        self.generation = 1
        self.under_way: list[UnitRead] = []
        self.released: list[UnitRead] = []
        self.forgotten: list[int] = []

    async def learn(self, region: Region) -> int:
        if region.agent == b"unknown":
            raise NixlFailed("no way there")
        return 7

    def forget(self, peer: int) -> None:
        self.forgotten.append(peer)

    def read(self, read: UnitRead) -> None:
        assert read.peer == 7
        self.under_way.append(read)

    def release(self, read: UnitRead) -> None:
        self.released.append(read)

    def end(self, read: UnitRead, data: bytes | None = None) -> None:
        """It lands: what lies at its address in a pool that begins with ``DATA``."""
        self.under_way.remove(read)
        at = read.address - REGION.address
        read.view = memoryview(data if data is not None else DATA[at : at + read.size_bytes])
        read.end()


class FakeListener:
    def __init__(self) -> None:
        self.read_bytes = 0
        self.ended: list[tuple[int, Exception | None]] = []

    def on_read_bytes(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes

    def on_read_end(self, number: int, error: Exception | None) -> None:
        self.ended.append((number, error))


class Pool:
    """Where a chunk's bytes go."""

    def __init__(self, data: bytes = DATA) -> None:
        self.bytes = bytearray(len(data))
        self.is_full = False
        self.fill = ChunkFill(chunk_digest(data), len(data), self._place)
        self.work = self.fill.begin("sender", ReadProgress())
        self.work.expect(unit_digests(data))

    def _place(self, offset: int, data: memoryview) -> None:
        if self.is_full:
            raise HostPoolFull("no room")
        self.bytes[offset : offset + len(data)] = data


async def one_sided_of(
    memory: FakeMemory | None, listener: FakeListener, region: Region | None = REGION
) -> OneSidedReads:
    one_sided = OneSidedReads(memory, NodeId("sender"), 1.0, listener)
    if region is not None:
        one_sided.offer(region)
    # It has learned of the memory.
    await asyncio.gather(
        *(task for task in asyncio.all_tasks() if task.get_name() == "memory of sender")
    )
    return one_sided


def place_all(one_sided: OneSidedReads, number: int) -> None:
    for at in range(0, len(DATA), UNIT_BYTES):
        one_sided.place(number, Placed(offset=at, size_bytes=min(UNIT_BYTES, len(DATA) - at)))


@pytest.mark.parametrize("seed", range(8))
async def test_what_lands_in_any_order_is_written_in_order(seed: int) -> None:
    memory, listener, pool, rng = FakeMemory(), FakeListener(), Pool(), random.Random(seed)
    one_sided = await one_sided_of(memory, listener)
    assert one_sided.begin(3, pool.work)
    place_all(one_sided, 3)
    assert one_sided.on_sent(3)
    while memory.under_way:
        assert listener.ended == []
        memory.end(rng.choice(memory.under_way))
    assert listener.ended == [(3, None)]
    assert pool.bytes == DATA
    assert listener.read_bytes == len(DATA)
    assert len(set(memory.released)) == 4
    one_sided.stop()
    assert memory.forgotten == [7]


async def test_a_link_has_a_bounded_number_of_reads_under_way() -> None:
    memory, listener = FakeMemory(), FakeListener()
    one_sided = await one_sided_of(memory, listener)
    pools = {number: Pool() for number in range(4)}
    for number, pool in pools.items():
        assert one_sided.begin(number, pool.work)
        place_all(one_sided, number)
    assert len(memory.under_way) == WINDOW
    # A request that leaves makes room for the others.
    one_sided.give_up(0)
    while memory.under_way:
        assert len(memory.under_way) <= 2 * WINDOW
        memory.end(memory.under_way[0])
    assert all(pool.bytes == DATA for number, pool in pools.items() if number)


def breaks(memory: FakeMemory, pool: Pool, one_sided: OneSidedReads) -> None:
    memory.under_way[1].end("broke")


def lies(memory: FakeMemory, pool: Pool, one_sided: OneSidedReads) -> None:
    memory.end(memory.under_way[0], bytes(UNIT_BYTES))


def names_no_place(memory: FakeMemory, pool: Pool, one_sided: OneSidedReads) -> None:
    one_sided.place(3, Placed(offset=0, size_bytes=1))


def names_a_place_beyond(memory: FakeMemory, pool: Pool, one_sided: OneSidedReads) -> None:
    one_sided.begin(4, Pool().work)
    one_sided.place(4, Placed(offset=REGION.size_bytes - 10, size_bytes=11))


def names_a_place_before(memory: FakeMemory, pool: Pool, one_sided: OneSidedReads) -> None:
    one_sided.begin(4, Pool().work)
    one_sided.place(4, Placed(offset=-1, size_bytes=11))


def names_two_units(memory: FakeMemory, pool: Pool, one_sided: OneSidedReads) -> None:
    one_sided.begin(4, Pool().work)
    one_sided.place(4, Placed(offset=0, size_bytes=UNIT_BYTES + 1))


def was_written_by_another_try(memory: FakeMemory, pool: Pool, one_sided: OneSidedReads) -> None:
    pool.work.write(DATA[:10])
    memory.end(memory.under_way[0])


@pytest.mark.parametrize(
    "fails",
    [
        breaks,
        lies,
        names_no_place,
        names_a_place_beyond,
        names_a_place_before,
        names_two_units,
        was_written_by_another_try,
    ],
    ids=lambda fails: fails.__name__,
)
async def test_where_anything_is_wrong_everything_is_asked_for_over_tcp(
    fails: Callable[..., None],
) -> None:
    memory, listener, pool = FakeMemory(), FakeListener(), Pool()
    one_sided = await one_sided_of(memory, listener)
    other = Pool()
    assert one_sided.begin(3, pool.work)
    place_all(one_sided, 3)
    assert one_sided.begin(5, other.work)
    place_all(one_sided, 5)
    with capture_logs() as logs:
        fails(memory, pool, one_sided)
    assert {number for number, error in listener.ended if isinstance(error, NixlFailed)} >= {3, 5}
    assert [entry["action"] for entry in logs] == ["link_nixl_failed"]
    assert not one_sided.begin(6, pool.work)
    # What lands now belongs to no request.
    assert not any(read.is_wanted for read in memory.under_way)
    # The other node offers its memory anew, or the process that reads is another one: it is tried
    # again.
    memory.generation += 1
    assert not one_sided.begin(6, pool.work)
    await asyncio.gather(
        *(task for task in asyncio.all_tasks() if task.get_name() == "memory of sender")
    )
    assert one_sided.begin(6, pool.work)
    one_sided.stop()


async def test_a_full_pool_ends_the_request_and_not_the_link() -> None:
    memory, listener, pool, other = FakeMemory(), FakeListener(), Pool(), Pool()
    one_sided = await one_sided_of(memory, listener)
    one_sided.begin(3, pool.work)
    place_all(one_sided, 3)
    pool.is_full = True
    memory.end(memory.under_way[0])
    assert isinstance(listener.ended[0][1], HostPoolFull)
    assert one_sided.begin(4, other.work)
    one_sided.stop()


@pytest.mark.parametrize("why", ["nothing reads here", "nothing is offered", "no way there"])
async def test_without_a_way_nothing_is_begun(why: str) -> None:
    memory = None if why == "nothing reads here" else FakeMemory()
    region = {
        "nothing is offered": None,
        "no way there": Region(agent=b"unknown", address=0, size_bytes=1),
    }.get(why, REGION)
    one_sided = await one_sided_of(memory, FakeListener(), region)
    work: Any = ChunkWork(ChunkFill(None, 8, lambda _offset, _data: None), "sender", ReadProgress())
    assert not one_sided.begin(1, work)
    one_sided.place(1, Placed(offset=0, size_bytes=8))
    assert not one_sided.on_sent(1)
    one_sided.stop()
