"""Graphs that are made piece by piece, over a fake driver: each piece asks it for one thing."""

import struct
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from fake_cuda import MIB, fake_cuda
from graph_archives import ImageMaker, form_notes
from graph_driver import Driver, device_of_the_fake

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.graphs import GraphArchive, add_image, dump_graphs
from pilotlight.native.library import NativeError

ADDRESS, ARENA_BYTES = 0x6100_0000_0000, 64 * MIB
POINTER_AND_WORD = struct.Struct("<QQ")
ASKED = ("cuModuleLoadData", "cuGraphCreate", "cuGraphInstantiate", "cuGraphUpload")
_names = count()

Opened = Callable[..., GraphArchive]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """opened(kernels, *tags): an archive with one graph of so many kernels under each tag."""
    with device_of_the_fake(ADDRESS, ARENA_BYTES) as (driver, device, arena):
        yield lambda kernels, *tags: archive_of(driver, device, arena, kernels, tags)


def archive_of(
    driver: Driver, device: Device, arena: DeviceArena, kernels: int, tags: tuple[int, ...]
) -> GraphArchive:
    graph, before = driver.graph(), tuple[int, ...]()
    for number in range(kernels):
        name = f"piece_{next(_names)}"
        image = ImageMaker([name], code=b"code", notes=form_notes((8, 8), 128)).image()
        function = driver.load(image, name)
        add_image(image, function)
        params = POINTER_AND_WORD.pack(ADDRESS + 64 * number, number)
        before = (driver.kernel(graph, function, params, before=before),)
    dump = dump_graphs(dict.fromkeys(tags, graph), arena)
    return GraphArchive(device, dump.archive, arena)


def calls(*names: str) -> dict[str, int]:
    return {name: fake_cuda().calls(name) for name in names}


def test_each_asks_the_driver_for_one_thing(opened: Opened) -> None:
    archive = opened(2, 8)
    pieces: list[dict[str, int]] = []
    left = True
    while left:
        before = calls(*ASKED)
        left = archive.advance(8)
        pieces.append({name: new for name in ASKED if (new := calls(name)[name] - before[name])})
        if left:
            with pytest.raises(NativeError, match="graph 0 is not built"):
                archive.launch(8)
    kernels = [{"cuModuleLoadData": 1}] * 2
    rest = [{"cuGraphCreate": 1}, {"cuGraphInstantiate": 1}, {"cuGraphUpload": 1}]
    assert pieces == [*kernels, *rest]
    assert not archive.advance(8), "it is made"
    archive.launch(8)
    archive.close()


def test_a_graph_that_lacks_no_kernel_has_none_for_that(opened: Opened) -> None:
    archive = opened(1, 8, 16)
    pieces = {8: 1, 16: 1}
    for tag in pieces:
        while archive.advance(tag):
            pieces[tag] += 1
    assert pieces == {8: 4, 16: 3}
    archive.close()


@pytest.mark.parametrize("pieces", range(1, 6))
def test_what_is_made_of_a_graph_goes_with_its_archive(opened: Opened, pieces: int) -> None:
    made, gone = ("cuGraphCreate", "cuGraphInstantiate"), ("cuGraphDestroy", "cuGraphExecDestroy")
    archive = opened(1, 8)
    before = calls(*made, *gone)
    for _ in range(pieces):
        archive.advance(8)
    archive.close()
    counts = {name: new - before[name] for name, new in calls(*made, *gone).items()}
    assert [counts[name] for name in made] == [counts[name] for name in gone]
