"""A graph's nodes launched one by one in its place, over a fake driver that writes down what each
node is given: as a graph and as a list the same runs, in an order that every edge allows.
"""

import ctypes
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from fake_cuda import MIB, FakeCuda, fake_cuda
from graph_archives import ImageMaker, archive_of_all_kinds, form_notes
from graph_driver import Driver, device_of_the_fake

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.graphs import GraphArchive, add_image, dump_graphs
from pilotlight.native.library import NativeError

ADDRESS, ARENA_BYTES = 0x6200_0000_0000, 64 * MIB
STREAM = 0x5EED
PRIORITY = 8
EARLY = b"\1\0\1".ljust(8, b"\0")
"""An edge that lets a kernel begin before the other one has ended."""
_names = count()


@dataclass
class Rig:
    """An arena with memory behind its first half, and a driver."""

    driver: Driver
    device: Device
    arena: DeviceArena
    fake: FakeCuda

    def archive(self, **graphs: int) -> GraphArchive:
        dump = dump_graphs({int(tag[1:]): graph for tag, graph in graphs.items()}, self.arena)
        return GraphArchive(self.device, dump.archive, self.arena)

    def function(self, threads: int = 128) -> int:
        """A kernel of its own, loaded as its library loads it."""
        name = f"listed_{next(_names)}"
        image = ImageMaker([name], code=b"code", notes=form_notes((8, 8), threads)).image()
        function = self.driver.load(image, name)
        add_image(image, function)
        return function

    def after(self, archive: GraphArchive, way: str) -> tuple[bytes, bytes]:
        """What ran, and what it left in the arena."""
        ctypes.memset(ADDRESS, 7, 4096)
        assert self.driver.ran is not None
        if way == "graph":
            archive.launch(8)
        else:
            archive.launch_list(8, STREAM)
        return self.driver.ran, ctypes.string_at(ADDRESS, 4096)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with device_of_the_fake(ADDRESS, ARENA_BYTES) as (driver, device, arena):
        yield Rig(driver, device, arena, fake_cuda())


def place(number: int) -> int:
    return ADDRESS + 64 * number


def params(number: int, word: int = 1) -> bytes:
    return struct.pack("<QQ", place(number), word)


def graph_of_all_kinds(rig: Rig) -> int:
    """A chain of everything that graphs are recorded with."""
    driver, graph = rig.driver, rig.driver.graph()
    function, narrow = rig.function(), rig.function(threads=32)
    driver.allow_shared(function, 100_000)
    first = driver.kernel(graph, function, params(0), shared=90_000)
    driver.cluster(first, 2)
    driver.attribute(first, PRIORITY, b"\3")
    second = driver.kernel(graph, narrow, params(0, 2), threads=32, packed=True, before=[first])
    third = driver.kernel(graph, function, params(0, 3), before=[first, second], edge=EARLY)
    waits = driver.empty(graph, [third])
    copied = driver.copy(graph, place(1), place(0), 8, [waits])
    last = driver.set(graph, place(2), 0xABCD, 2, 5, [copied], height=3, pitch=64)
    for element in (1, 2, 4):
        last = driver.set(graph, place(5 + element), 0x61626364, element, 3, [last])
        last = driver.set(graph, place(20 + element), 0x65, element, 2, [last], height=2, pitch=512)
    driver.kernel(graph, function, params(1, 4), before=[last])
    return graph


def test_a_list_gives_every_node_what_its_graph_gives_it(rig: Rig) -> None:
    archive = rig.archive(_8=graph_of_all_kinds(rig))
    archive.build(8)
    as_graph = rig.after(archive, "graph")
    assert len(as_graph[0]) > 1000, "all of it ran"
    assert rig.after(archive, "list") == as_graph
    assert rig.driver.last_stream == STREAM
    archive.close()


def test_a_list_needs_no_graph(rig: Rig) -> None:
    graph = graph_of_all_kinds(rig)
    archive = rig.archive(_8=graph)
    archive.load(8)
    made = [rig.fake.calls(name) for name in ("cuGraphCreate", "cuGraphInstantiate")]
    ran, left = rig.after(archive, "list")
    assert made == [rig.fake.calls(name) for name in ("cuGraphCreate", "cuGraphInstantiate")]
    ctypes.memset(ADDRESS, 7, 4096)
    assert rig.driver.ran == b""
    rig.driver.replay(graph)
    assert (rig.driver.ran, ctypes.string_at(ADDRESS, 4096)) == (ran, left)
    archive.close()


def test_nodes_run_in_an_order_that_every_edge_allows(rig: Rig) -> None:
    """They were made in another one: a node that came last is what the first waits for."""
    driver, graph, function = rig.driver, rig.driver.graph(), rig.function()
    early = [driver.kernel(graph, function, params(0, word)) for word in (1, 2)]
    joined = driver.kernel(graph, function, params(0, 3), before=early)
    root = driver.kernel(graph, function, params(0, 4))
    driver.depend(graph, root, early[1])
    driver.depend(graph, root, early[0])
    archive = rig.archive(_8=graph)
    archive.load(8)
    ran, _ = rig.after(archive, "list")
    order = [ran.index(params(0, word)) for word in (4, 1, 2, 3)]
    assert order == sorted(order), joined
    archive.close()


def test_a_list_is_refused_before_its_kernels_are_loaded(rig: Rig) -> None:
    driver = rig.driver
    graphs = [driver.graph(), driver.graph()]
    for number, graph in enumerate(graphs):
        driver.kernel(graph, rig.function(), params(number))
    archive = rig.archive(_8=graphs[0], _16=graphs[1])
    archive.load(16)
    for ask in (archive.check_list, archive.launch_list):
        with pytest.raises(NativeError, match="kernels of graph 0 are not loaded"):
            ask(8)
    archive.load(8)
    archive.check_list(8)
    with pytest.raises(NativeError, match="no graph 9"):
        archive.check_list(9)
    archive.close()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("element", "a memset of elements of 3 bytes .*node 1 of 2 of graph 8, type 2"),
        ("attribute", "a kernel with the attribute 13 .*node 1 of 2 of graph 8, kernel listed_"),
    ],
)
def test_what_no_launch_takes_is_refused_by_name_before_anything_runs(
    rig: Rig, what: str, said: str
) -> None:
    driver, graph, function = rig.driver, rig.driver.graph(), rig.function()
    first = driver.kernel(graph, function, params(0))
    if what == "element":
        driver.set(graph, place(1), 1, 4, 1, [first])
    else:
        driver.attribute(driver.kernel(graph, function, params(1), before=[first]), PRIORITY, b"\5")
    data = bytearray(dump_graphs({8: graph}, rig.arena).archive)
    # Nothing that is recorded has such a thing: it is written into the archive.
    if what == "element":
        (at,) = found(data, struct.pack("<2I2Q", 1, 4, 1, 1))
        struct.pack_into("<I", data, at + 4, 3)
    else:
        (at,) = found(data, struct.pack("<2I", PRIORITY, 0) + b"\5".ljust(64, b"\0"))
        struct.pack_into("<I", data, at, 13)
    archive = GraphArchive(rig.device, bytes(data), rig.arena)
    archive.load(8)
    assert rig.driver.ran is not None
    launched = rig.fake.calls("cuLaunchKernelEx")
    for ask in (archive.check_list, archive.launch_list):
        with pytest.raises(NativeError, match=said):
            ask(8)
    assert (rig.driver.ran, rig.fake.calls("cuLaunchKernelEx")) == (b"", launched)
    archive.close()


def found(data: bytes, part: bytes) -> list[int]:
    assert data.count(part) == 1
    return [data.index(part)]


@pytest.mark.parametrize(
    ("number", "name"), [(3, "host"), (4, "graph"), (7, "event_record"), (13, "conditional")]
)
def test_nodes_of_other_types_are_refused_by_name_when_an_archive_is_opened(
    rig: Rig, number: int, name: str
) -> None:
    data = bytearray(archive_of_all_kinds())
    at = data.index(struct.pack("<2I3I3I", 5, 0, 0, 0, 0, 0, 0, 0))
    struct.pack_into("<I", data, at, number)
    with pytest.raises(NativeError, match=f"a node of type {name}, which no other process"):
        GraphArchive(rig.device, bytes(data), rig.arena)


def test_a_launch_that_the_driver_refuses_is_described(rig: Rig) -> None:
    driver, graph = rig.driver, rig.driver.graph()
    first = driver.kernel(graph, rig.function(), params(0))
    driver.kernel(graph, rig.function(), params(1), before=[first])
    archive = rig.archive(_8=graph)
    archive.load(8)
    rig.fake.fail("cuLaunchKernelEx", 719, in_calls=2)
    with pytest.raises(NativeError, match=r"\(719\) .*node 1 of 2 of graph 8, kernel listed_"):
        archive.launch_list(8)
    archive.close()


def test_a_list_waits_for_no_graph_that_is_being_made(rig: Rig) -> None:
    """Another thread is in the driver with a graph, and holds what guards the archive."""
    driver, graphs = rig.driver, [rig.driver.graph(), rig.driver.graph()]
    for number, graph in enumerate(graphs):
        driver.kernel(graph, rig.function(), params(number))
    archive = rig.archive(_8=graphs[0], _16=graphs[1])
    archive.load(8)
    driver.fake.fake_hold_instantiate(1)
    thread = threading.Thread(target=archive.build, args=(16,))
    thread.start()
    try:
        driver.fake.fake_wait_instantiate()
        archive.launch_list(8)
    finally:
        driver.fake.fake_hold_instantiate(0)
        thread.join()
    archive.build(8)
    archive.launch(16)
    archive.close()
