"""Which memory reads may land in, and in which order a link takes over what has landed.

Nothing is read here.
"""

import asyncio
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest, unit_digests
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import HostPoolFull
from pilotlight.common.messages.link import Placed, Region
from pilotlight.dataplane.chunk_fill import ChunkFill, ChunkWork
from pilotlight.dataplane.link.nixl_process import NixlFailed, has_rdma, takes_nixl
from pilotlight.dataplane.link.nixl_reader import AWAKE_S, BUSY_NAP_MS, IDLE_NAP_MS, Reader
from pilotlight.dataplane.link.nixl_reads import Reads, UnitRead
from pilotlight.dataplane.link.nixl_wire import (
    MAX_MESSAGE_BYTES,
    Done,
    Forget,
    FromReader,
    Learn,
    Learned,
    Read,
    Stir,
    decode,
)
from pilotlight.dataplane.link.one_sided import WINDOW, OneSidedReads
from pilotlight.dataplane.link.sender import LONGEST_BEAT_S
from pilotlight.dataplane.readers import ReadProgress
from pilotlight.policy.ids import NodeId

SLOTS = 4


def a_read(on_end: Callable[[UnitRead], None] = lambda _: None) -> UnitRead:
    return UnitRead(peer=1, address=0, size_bytes=8, deadline_s=1.0, on_end=on_end)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "done", "break", "late", "release", "give up"]),
            st.integers(0, 99),
        ),
        max_size=80,
    )
)
def test_a_slot_is_used_again_only_when_nothing_can_be_written_to_it(
    steps: list[tuple[str, int]],
) -> None:
    """Against a model of what a library may still do: it writes to the slot of each read that it
    has not said is done.
    """
    reads, landing = Reads(memoryview(bytearray(SLOTS * UNIT_BYTES)), SLOTS), dict[int, UnitRead]()
    may_be_written: dict[int, int] = {}
    ended: list[UnitRead] = []
    landed: list[UnitRead] = []
    for what, which in steps:
        numbers = list(landing)
        if what == "add":
            reads.add(a_read(ended.append))
        elif what in ("done", "break") and numbers:
            number = numbers[which % len(numbers)]
            read = landing.pop(number)
            if what == "done":
                del may_be_written[number]
                landed.append(read)
            reads.done(number, "" if what == "done" else "broke")
        elif what == "late" and numbers:
            reads.late(numbers[which % len(numbers)])
        elif what == "release" and landed:
            reads.release(landed.pop(which % len(landed)))
        elif what == "give up" and numbers:
            reads.release(landing[numbers[which % len(numbers)]])
        while (begun := reads.next()) is not None:
            number, read = begun
            assert read.slot not in may_be_written.values()
            assert all(read.slot != other.slot for other in landed if other.view is not None)
            landing[number], may_be_written[number] = read, read.slot
    assert all((read.view is None) != (read.error is None) or not read.is_wanted for read in ended)
    assert len(ended) == len(set(ended))
    assert 0 <= reads.out_of_use <= SLOTS
    assert reads.is_spent == (reads.out_of_use >= SLOTS / 2)


def test_reads_that_are_late_or_broke_off_use_it_up_and_one_that_is_done_after_all_does_not() -> (
    None
):
    reads = Reads(memoryview(bytearray(SLOTS * UNIT_BYTES)), SLOTS)
    ended: list[UnitRead] = []
    for _ in range(SLOTS):
        reads.add(a_read(ended.append))
    numbers = [number for number, _ in iter(reads.next, None)]
    reads.late(numbers[0])
    reads.late(numbers[0])
    assert (reads.out_of_use, reads.is_spent) == (1, False)
    reads.done(numbers[0])
    assert (reads.out_of_use, reads.free) == (0, 1)
    reads.done(numbers[1], "broke")
    reads.late(numbers[2])
    assert (reads.out_of_use, reads.is_spent) == (2, True)
    reads.end("it was ended")
    assert [read.error for read in ended] == [
        "a read was not done within 1 s",
        "broke",
        "a read was not done within 1 s",
        "it was ended",
    ]


# ---------------------------------------------------------------- the initiator side of a link

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


@pytest.mark.anyio
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


@pytest.mark.anyio
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


@pytest.mark.anyio
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


@pytest.mark.anyio
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


@pytest.mark.anyio
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


def test_the_process_looks_often_as_long_as_somebody_reads() -> None:
    ours, theirs = socket.socketpair()
    clock = ManualClock()
    reader = Reader(sock=theirs, agent=FakeAgent(), landing=0, clock=clock)
    naps = [reader._nap_ms()]
    reader._on_message(Stir())
    for seconds in (1.0, LONGEST_BEAT_S - 1.0, AWAKE_S):
        clock.advance(seconds)
        naps.append(reader._nap_ms())
    assert naps == [IDLE_NAP_MS, BUSY_NAP_MS, BUSY_NAP_MS, IDLE_NAP_MS]
    ours.close()
    theirs.close()


def test_a_node_is_forgotten_once_nothing_of_it_is_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = FakeAgent()
    reader = Reader(sock=theirs, agent=agent, landing=1000, clock=ManualClock())
    for message in (
        Learn(peer=1, agent=b"x"),
        Learn(peer=2, agent=b"x"),
        Read(number=9, peer=1, address=5, offset=8, size_bytes=3),
    ):
        reader._on_message(message)
    assert agent.begun == [("x", 5, 1008, 3)]
    reader._on_message(Forget(peer=2))
    reader._on_message(Forget(peer=1))
    reader._look()
    assert agent.forgotten == []
    agent.is_finished = True
    reader._look()
    # Two links knew it by one name: it is forgotten with the second one.
    assert agent.forgotten == ["x"]
    reader._on_message(Read(number=10, peer=1, address=5, offset=8, size_bytes=3))
    said = [decode(ours.recv(MAX_MESSAGE_BYTES), FromReader) for _ in range(4)]
    assert said[:3] == [Learned(peer=1), Learned(peer=2), Done(number=9)]
    assert said[3] == Done(number=10, error="nobody knows that node")
    ours.close()
    theirs.close()


class FakeAgent:
    """``Agent`` whose reads end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int, int]] = []
        self.forgotten: list[str] = []
        self.is_finished = False

    def register(self, memory: memoryview) -> int:
        return 0

    def offer(self) -> bytes:
        return b""

    def learn(self, agent: bytes) -> str:
        return agent.decode()

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def read(self, name: str, theirs: int, ours: int, size_bytes: int) -> Any:
        self.begun.append((name, theirs, ours, size_bytes))
        return object()

    def is_done(self, read: Any) -> bool:
        return self.is_finished

    def progress(self) -> None: ...


def test_nixl_is_taken_where_it_is_wanted_or_where_there_is_a_device(tmp_path: Path) -> None:
    nothing, empty, device = tmp_path / "nothing", tmp_path / "empty", tmp_path / "device"
    empty.mkdir()
    (device / "mlx5_0").mkdir(parents=True)
    assert [has_rdma(folder) for folder in (nothing, empty, device)] == [False, False, True]
    assert [takes_nixl("auto", folder) for folder in (nothing, empty, device)] == [
        False,
        False,
        True,
    ]
    assert [takes_nixl(transport, nothing) for transport in ("tcp", "nixl")] == [False, True]
    assert not takes_nixl("tcp", device)
