"""Archives whose addresses are written anew for an arena that lies elsewhere, over a fake driver;
and tables of addresses that do not hold together.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from fake_cuda import MIB, FakeCuda, fake_cuda
from graph_archives import ImageMaker, archive_of_all_kinds, form_notes
from graph_driver import Driver

from pilotlight.native.device import Device, DeviceArena, Pool
from pilotlight.native.graphs import GraphArchive, add_image, dump_graphs
from pilotlight.native.library import NativeError, OutOfMemory
from pilotlight.native.pointers import (
    NEVER,
    PointerTable,
    RecordedAllocation,
    Word,
    check_pointers,
    moved,
    nodes_of,
    pointers_of,
    tags_of,
    with_pointers,
)

HERE, THERE, BYTES = 0x6100_0000_0000, 0x5200_0000_0000, 64 * MIB
OFFSETS = (0, 64, 4096)
_names = count()


@dataclass
class Rig:
    driver: Driver
    device: Device
    here: DeviceArena
    there: DeviceArena

    def graph(self, arena: DeviceArena, name: str) -> int:
        """Kernels that write to three places of an arena; one has its parameters in one buffer."""
        function, graph = self.functions[name], self.driver.graph()
        before: tuple[int, ...] = ()
        for number, offset in enumerate(OFFSETS):
            params = (arena.address + offset).to_bytes(8, "little") + number.to_bytes(8, "little")
            node = self.driver.kernel(graph, function, params, before=before, packed=number == 1)
            before = (node,)
        return graph

    def __post_init__(self) -> None:
        self.functions: dict[str, int] = {}

    def load(self) -> str:
        name = f"moved_{next(_names)}"
        image = ImageMaker([name], notes=form_notes((8, 8), 128)).image()
        self.functions[name] = self.driver.load(image, name)
        add_image(image, self.functions[name])
        return name


@pytest.fixture
def rig() -> Iterator[Rig]:
    fake: FakeCuda = fake_cuda()
    fake.reset()
    device = Device(0, fake.path)
    arenas = [DeviceArena(device, BYTES, address) for address in (HERE, THERE)]
    for arena in arenas:
        arena.back(0, BYTES // 2, BYTES // 2)
    yield Rig(Driver(ctypes.CDLL(fake.path)), device, *arenas)
    fake.reset()
    for arena in arenas:
        arena.close()


def table_of(archive: bytes) -> PointerTable:
    """The first word of every node is an address of one buffer."""
    words = []
    for node in nodes_of(archive):
        inside = int.from_bytes(node.parameters[:8], "little") - HERE
        words.append(Word(node.place, 0, inside))
    return PointerTable((RecordedAllocation(HERE, 2 * 4096),), (8,), tuple(words))


def test_a_moved_graph_does_there_what_one_captured_there_does(rig: Rig) -> None:
    name = rig.load()
    recorded = dump_graphs({8: rig.graph(rig.here, name)}, rig.here).archive
    archive = with_pointers(recorded, table_of(recorded))
    assert tags_of(archive) == (8,)
    ctypes.memset(THERE, 7, 8192)
    rig.driver.replay(rig.graph(rig.there, name))
    expected = ctypes.string_at(THERE, 8192)
    ctypes.memset(THERE, 7, 8192)
    ctypes.memset(HERE, 7, 8192)
    made = GraphArchive(rig.device, moved(archive, [THERE], rig.there), rig.there)
    made.build(8)
    made.launch(8)
    assert ctypes.string_at(THERE, 8192) == expected != bytes([7]) * 8192
    assert ctypes.string_at(HERE, 8192) == bytes([7]) * 8192, "nothing is left of where it was"
    made.close()


def test_the_same_archive_is_restored_at_its_addresses_too(rig: Rig) -> None:
    name = rig.load()
    recorded = dump_graphs({8: rig.graph(rig.here, name)}, rig.here).archive
    found = []
    for archive in (recorded, with_pointers(recorded, table_of(recorded))):
        ctypes.memset(HERE, 7, 8192)
        made = GraphArchive(rig.device, archive, rig.here)
        made.build(8)
        made.launch(8)
        found.append(ctypes.string_at(HERE, 8192))
        made.close()
    assert found[0] == found[1] != bytes([7]) * 8192
    assert moved(archive, [HERE], rig.here) == archive


def test_what_is_said_of_addresses_comes_back() -> None:
    whole = archive_of_all_kinds()
    words = tuple(Word(node.place, 1, 8) for node in nodes_of(whole))
    table = PointerTable(
        (
            RecordedAllocation(4096, 100, 0),
            RecordedAllocation(8192, 16, 1, 2, 1),
            RecordedAllocation(8192, 5, 3, NEVER, 2, b"bytes"),
        ),
        (1, 2, 256),
        words,
    )
    archive = with_pointers(whole, table)
    assert pointers_of(archive) == table
    other = replace(table, words=())
    assert pointers_of(with_pointers(archive, other)) == other, "in the place of the one before"
    assert len(with_pointers(archive, table)) == len(archive)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (lambda at: [Word(at, 1, 0)], "no allocation"),
        (lambda at: [Word(at, 0, 4097)], "no allocation"),
        (lambda at: [Word(at + 1, 0, 0)], "in order"),
        (lambda at: [Word(at + 8, 0, 0), Word(at, 0, 0)], "in order"),
        (lambda at: [Word(at, 0, 0), Word(at, 0, 0)], "in order"),
        (lambda at: [Word(0, 0, 0)], "no node's parameters"),
        (lambda at: [Word(1 << 40, 0, 0)], "no node's parameters"),
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(words: Any, why: str) -> None:
    whole = archive_of_all_kinds()
    first = next(nodes_of(whole)).place
    table = PointerTable((RecordedAllocation(HERE, 4096),), (1, 2, 256), tuple(words(first)))
    with pytest.raises(NativeError, match=why):
        with_pointers(whole, table)


def test_an_archive_without_a_table_is_not_moved(rig: Rig) -> None:
    whole = archive_of_all_kinds()
    for read in (check_pointers, pointers_of, lambda one: moved(one, [], rig.here)):
        with pytest.raises(NativeError, match="which of its parameters are addresses"):
            read(whole)


@pytest.mark.parametrize(
    ("bases", "why"),
    [
        ([], "0 allocations were made, and 1 recorded"),
        ([THERE, THERE], "2 allocations were made"),
        ([0], "allocation 0 was not made"),
        ([THERE - 8], "outside of the arena"),
        ([THERE + BYTES - 4096], "outside of the arena"),
        ([1 << 63], "outside of the arena"),
        ([-1], "begins nowhere"),
    ],
)
def test_memory_that_is_not_the_arenas_is_refused(rig: Rig, bases: list[int], why: str) -> None:
    name = rig.load()
    recorded = dump_graphs({8: rig.graph(rig.here, name)}, rig.here).archive
    archive = with_pointers(recorded, table_of(recorded))
    before = fake_cuda().calls("cuGraphCreate"), fake_cuda().calls("cuModuleLoadData")
    with pytest.raises(NativeError, match=why):
        moved(archive, bases, rig.there)
    assert before == (fake_cuda().calls("cuGraphCreate"), fake_cuda().calls("cuModuleLoadData"))


def test_a_pool_says_what_it_gave_and_got_back(rig: Rig) -> None:
    pool = Pool(rig.device, rig.here, BYTES // 2, BYTES, 2 * MIB)
    first = pool.take(MIB)
    second = pool.take(4 * MIB)
    pool.give(first)
    third = pool.take(2 * MIB)
    assert (first, second, third) == (HERE + BYTES // 2, first + 2 * MIB, first)
    assert [tuple(event) for event in pool.events] == [
        (True, first, 2 * MIB),
        (True, second, 4 * MIB),
        (False, first, 2 * MIB),
        (True, first, 2 * MIB),
    ]
    with pytest.raises(NativeError, match="no addresses"):
        pool.take(BYTES)
    fake_cuda().set_memory(BYTES)
    with pytest.raises(OutOfMemory):
        pool.take(16 * MIB)
    assert len(pool.events) == 4
    pool.give(second)
    pool.give(third)
    pool.close()


def test_of_very_many_segments_not_all_are_kept(rig: Rig) -> None:
    pool = Pool(rig.device, rig.here, BYTES // 2, BYTES, 2 * MIB)
    for _ in range(2049):
        pool.give(pool.take(MIB))
    with pytest.raises(NativeError, match="of 4098 segments not all are known"):
        _ = pool.events
    pool.close()
