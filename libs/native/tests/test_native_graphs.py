"""Graphs written down by one process and made again by another, over a fake driver that has the
driver's rules: every kernel comes from its own image, and what is refused says all of why.
"""

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import pytest
from fake_cuda import MIB, fake_cuda
from graph_archives import ImageMaker, form_notes
from graph_driver import Driver, device_of_the_fake

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.graphs import GraphArchive, GraphDump, add_image, dump_graphs, prune_image
from pilotlight.native.library import NativeError, Nowhere
from pilotlight.native.proving import dump_proved, refused_kernels

ADDRESS, ARENA_BYTES = 0x6100_0000_0000, 64 * MIB
POINTER_AND_WORD = struct.Struct("<QQ")
_names = count()


@dataclass
class Rig:
    """An arena with memory behind its first half, and a driver."""

    driver: Driver
    device: Device
    arena: DeviceArena
    path: str

    def fill(self) -> None:
        ctypes.memset(ADDRESS, 7, 4096)

    @property
    def found(self) -> bytes:
        return ctypes.string_at(ADDRESS, 4096)

    def dump(self, **graphs: int) -> GraphDump:
        return dump_graphs({int(tag[1:]): graph for tag, graph in graphs.items()}, self.arena)

    def archive(self, data: bytes) -> GraphArchive:
        return GraphArchive(self.device, data, self.arena)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with device_of_the_fake(ADDRESS, ARENA_BYTES) as (driver, device, arena):
        yield Rig(driver, device, arena, fake_cuda().path)
        driver.fake.fake_silence(0)


def image_of(name: str, code: bytes, threads: int = 128, sizes: Sequence[int] = (8, 8)) -> bytes:
    return ImageMaker([name], code=code, notes=form_notes(sizes, threads)).image()


def name_of_its_own() -> str:
    """Images of other tests stay in the process."""
    return f"kernel_{next(_names)}"


def place(number: int) -> int:
    return ADDRESS + 64 * number


def graph_of_one(rig: Rig, image: bytes, name: str) -> int:
    """A graph of one of an image's kernels."""
    function, graph = rig.driver.load(image, name), rig.driver.graph()
    add_image(image, function)
    rig.driver.kernel(graph, function, POINTER_AND_WORD.pack(place(0), 1))
    return graph


def some_of_one_name(
    rig: Rig, forms: Mapping[bytes, int], *, told: bool = True
) -> tuple[int, str, dict[bytes, bytes]]:
    """A graph of kernels that a compiler made of one function for several numbers of threads; their
    name and their images.
    """
    name, graph = name_of_its_own(), rig.driver.graph()
    before: tuple[int, ...] = ()
    images: dict[bytes, bytes] = {}
    for number, (code, threads) in enumerate(forms.items()):
        images[code] = image_of(name, code, threads)
        function = rig.driver.load(images[code], name)
        add_image(images[code], function if told else 0)
        params = POINTER_AND_WORD.pack(place(number), number)
        before = (rig.driver.kernel(graph, function, params, threads=threads, before=before),)
    return graph, name, images


def test_each_of_the_kernels_of_one_name_comes_from_its_own_image(rig: Rig) -> None:
    graph, *_ = some_of_one_name(rig, {b"wide": 128, b"narrow": 32, b"single": 64})
    rig.fill()
    rig.driver.replay(graph)
    expected = rig.found
    dump = rig.dump(_8=graph)
    assert (dump.nodes, dump.kernels, dump.images) == (3, 3, 3)
    archive = rig.archive(dump.archive)
    archive.build(8)
    for launch in (archive.launch, archive.walk):
        rig.fill()
        launch(8)
        assert rig.found == expected
    archive.close()


def test_a_graphs_kernels_are_loaded_before_it_is_made_and_no_others(rig: Rig) -> None:
    one, *_ = some_of_one_name(rig, {b"one": 128, b"both": 64})
    other, *_ = some_of_one_name(rig, {b"other": 128})
    archive = rig.archive(rig.dump(_8=one, _16=other).archive)
    fake = fake_cuda()

    def asked() -> tuple[int, int]:
        return fake.calls("cuModuleLoadData"), fake.calls("cuGraphCreate")

    modules, graphs = asked()
    archive.load(8)
    assert asked() == (modules + 2, graphs)
    assert archive.spent_ms["images"] > 0.0
    assert archive.spent_ms["nodes"] == archive.spent_ms["upload"] == 0.0
    archive.build(8)
    assert asked() == (modules + 2, graphs + 1)
    archive.build(16)
    assert asked() == (modules + 3, graphs + 2)
    assert all(ms > 0.0 for ms in archive.spent_ms.values())
    with pytest.raises(NativeError, match="no graph 9"):
        archive.load(9)
    archive.close()


def test_addresses_of_one_graph_are_looked_at_alone(rig: Rig) -> None:
    one, *_ = some_of_one_name(rig, {b"one": 128})
    other, *_ = some_of_one_name(rig, {b"first": 128, b"second": 128})
    archive = rig.archive(rig.dump(_8=one, _16=other).archive)
    slot, known = (ADDRESS, ADDRESS + ARENA_BYTES // 2), [(place(0), place(0) + 8)]
    assert archive.check_addresses(known, *slot, 8) == 0
    for tag in (16, None):
        with pytest.raises(Nowhere, match="of graph 16"):
            archive.check_addresses(known, *slot, tag)
    archive.close()


def test_kernels_of_one_name_that_nobody_tells_apart_are_refused(rig: Rig) -> None:
    """CUPTI gives images without handles: any choice would be a guess."""
    graph, *_ = some_of_one_name(rig, {b"wide": 128, b"narrow": 32}, told=False)
    with pytest.raises(NativeError, match=r"2 recorded images have the kernel kernel_.*which one"):
        rig.dump(_8=graph)


def test_an_image_that_is_anothers_is_found_when_it_is_written_down(rig: Rig) -> None:
    name = name_of_its_own()
    function = rig.driver.load(image_of(name, b"loaded", 128), name)
    add_image(image_of(name, b"another", 32, (8, 8, 8)), function)
    graph = rig.driver.graph()
    rig.driver.kernel(graph, function, POINTER_AND_WORD.pack(place(0), 1))
    with pytest.raises(
        NativeError,
        match=r"another one of that name: threads at most 32, not 128; parameters 0\+8 8\+8 16\+8, not 0\+8 8\+8",
    ):
        rig.dump(_8=graph)


def test_a_kernel_that_takes_other_parameters_never_reaches_a_graph(rig: Rig) -> None:
    """The driver would read more addresses than it is given."""
    graph, name, images = some_of_one_name(rig, {b"recorded": 128})
    other = image_of(name, b"recorded", 128, (8, 16))
    broken = with_image(rig.dump(_8=graph).archive, images[b"recorded"], other)
    archive = rig.archive(broken)
    with pytest.raises(NativeError, match=r"takes parameters 0\+8 16\+16 as loaded, and 0\+8 8\+8"):
        archive.build(8)
    archive.close()


def test_a_node_that_the_driver_refuses_is_described(rig: Rig) -> None:
    graph, name, images = some_of_one_name(rig, {b"first": 128, b"second": 128})
    other = image_of(name, b"second", 32)
    broken = with_image(rig.dump(_8=graph).archive, images[b"second"], other)
    archive = rig.archive(broken)
    with pytest.raises(NativeError) as refused:
        archive.build(8)
    for said in (
        "CUDA_ERROR_INVALID_VALUE (1) in add_kernel",
        "node 1 of 2 of graph 8, after 1 nodes, kernel kernel_",
        "grid 4x1x1, block 128x1x1, 0 bytes of shared memory, 16 bytes of parameters 0+8 8+8",
        "at most 32 threads",
    ):
        assert said in str(refused.value)
    archive.close()


@pytest.mark.parametrize("old", [False, True])
def test_a_pruned_image_has_its_kernels_form(rig: Rig, old: bool) -> None:
    """Notes and constants follow their code to its new number, whatever compiler made them."""
    names = [name_of_its_own() for _ in range(5)]
    image = ImageMaker(names, notes=form_notes((8, 8), 128), old=old).image()
    graph = graph_of_one(rig, image, names[3])
    rig.fill()
    rig.driver.replay(graph)
    expected = rig.found
    dump = rig.dump(_8=graph)
    assert (dump.images_whole, dump.params_unknown) == (0, 0)
    assert dump.image_bytes < len(image) / 2
    archive = rig.archive(dump.archive)
    archive.build(8)
    rig.fill()
    archive.launch(8)
    assert rig.found == expected
    archive.close()


def test_an_image_whose_smaller_one_is_another_is_kept_whole(rig: Rig) -> None:
    """Whatever it is in it that the driver misses."""
    names = [name_of_its_own() for _ in range(5)]
    image = ImageMaker(names, notes=form_notes((8, 8), 128)).image()
    graph = graph_of_one(rig, image, names[3])
    rig.driver.fake.fake_silence(2)
    dump = rig.dump(_8=graph)
    assert (dump.images_whole, dump.params_unknown) == (1, 0)
    assert dump.archive.count(image) == 1


@pytest.mark.parametrize("refuses", [False, True])
def test_images_are_proved_in_a_process_that_has_none_of_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """The one that records may take what no other one takes: there it falls back to the whole."""
    if refuses:
        monkeypatch.setenv("FAKE_CUDA_REFUSES_PRUNED", "1")
    names = [name_of_its_own() for _ in range(5)]
    image = ImageMaker(names, notes=form_notes((8, 8), 128)).image()
    graph = graph_of_one(rig, image, names[3])
    pruned = dump_graphs({8: graph}, rig.arena)
    assert pruned.images_whole == 0, "this process takes it"
    refused = refused_kernels(pruned.archive, driver=rig.path)
    assert refused.keys() == ({names[3]} if refuses else set())
    assert all("(200) in module_load" in why for why in refused.values())
    proved = dump_proved({8: graph}, rig.arena, driver=rig.path)
    assert proved.images_whole == proved.archive.count(image) == refuses


def test_what_no_other_process_can_load_is_not_written_down(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_REFUSES_PRUNED", "1")
    name = name_of_its_own()
    graph = graph_of_one(rig, prune_image(image_of(name, b"code"), [name]), name)
    with pytest.raises(NativeError, match=rf"whole images: {name}: .*\(200\) in module_load"):
        dump_proved({8: graph}, rig.arena, driver=rig.path)
    with pytest.raises(NativeError, match="no process could prove the kernels"):
        refused_kernels(b"no archive", driver=rig.path)


@pytest.mark.parametrize("others", [0, 1])
def test_a_driver_that_is_silent_about_parameters(rig: Rig, others: int) -> None:
    """They are as captured where nothing else has the kernel's name, and given in one buffer."""
    name, graph = name_of_its_own(), rig.driver.graph()
    image = image_of(name, b"code")
    function = rig.driver.load(image, name)
    add_image(image, function)
    for _ in range(others):
        add_image(image_of(name, b"other"))
    rig.driver.kernel(graph, function, POINTER_AND_WORD.pack(place(0), 1))
    rig.fill()
    rig.driver.replay(graph)
    expected = rig.found
    rig.driver.fake.fake_silence(1)
    if others:
        with pytest.raises(NativeError, match=r"that name: parameters none, not 0\+8 8\+8"):
            rig.dump(_8=graph)
        return
    dump = rig.dump(_8=graph)
    assert dump.params_unknown == 1
    archive = rig.archive(dump.archive)
    archive.build(8)
    rig.fill()
    archive.launch(8)
    assert rig.found == expected
    archive.close()


def with_image(archive: bytes, old: bytes, new: bytes) -> bytes:
    """The archive with another image of the same length in the place of one."""
    assert len(new) == len(old)
    assert archive.count(old) == 1
    return archive.replace(old, new)


def test_what_a_kernel_was_allowed_it_is_allowed_again(rig: Rig) -> None:
    """Shared memory beyond the usual, clusters, edges that let a kernel begin early, and parameters
    in one buffer.
    """
    name, graph = name_of_its_own(), rig.driver.graph()
    image = image_of(name, b"code")
    function = rig.driver.load(image, name)
    add_image(image, function)
    rig.driver.allow_shared(function, 100_000)
    params = [POINTER_AND_WORD.pack(place(number), number) for number in range(3)]
    first = rig.driver.kernel(graph, function, params[0], shared=90_000)
    rig.driver.cluster(first, 2)
    second = rig.driver.kernel(graph, function, params[1], packed=True, before=[first])
    rig.driver.kernel(
        graph, function, params[2], before=[first, second], edge=b"\1\0\1".ljust(8, b"\0")
    )
    rig.fill()
    rig.driver.replay(graph)
    expected = rig.found
    archive = rig.archive(rig.dump(_1=graph).archive)
    archive.build(1)
    rig.fill()
    archive.launch(1)
    assert rig.found == expected
    archive.close()


def test_an_address_where_nothing_is_known_is_refused_before_the_driver_hears_of_it(
    rig: Rig,
) -> None:
    graph, *_ = some_of_one_name(rig, {b"one": 128, b"other": 128})
    archive = rig.archive(rig.dump(_8=graph).archive)
    slot = ADDRESS, ADDRESS + ARENA_BYTES // 2
    known = [(place(0), place(0) + 8), (place(1) - 8, place(1) + 8)]
    before = fake_cuda().calls("cuGraphCreate"), fake_cuda().calls("cuModuleLoadData")
    assert archive.check_addresses(known, *slot) == 0
    assert archive.check_addresses([], ADDRESS + 4096, slot[1]) == 2, "in the arena, but not there"
    for wrong in (known[:1], [known[0], (place(1) + 1, place(1) + 8)]):
        with pytest.raises(Nowhere, match=rf"at {place(1):#x}, in byte 0; node 1 of 2 of graph 8"):
            archive.check_addresses(wrong, *slot)
    assert before == (fake_cuda().calls("cuGraphCreate"), fake_cuda().calls("cuModuleLoadData"))
    archive.close()


def test_a_walk_names_the_node_whose_address_is_wrong(rig: Rig) -> None:
    name, graph = name_of_its_own(), rig.driver.graph()
    image = image_of(name, b"code")
    function = rig.driver.load(image, name)
    add_image(image, function)
    first = rig.driver.kernel(graph, function, POINTER_AND_WORD.pack(place(0), 1))
    nowhere = POINTER_AND_WORD.pack(ADDRESS + ARENA_BYTES - 64, 2)
    rig.driver.kernel(graph, function, nowhere, before=[first])
    archive = rig.archive(rig.dump(_1=graph).archive)
    with pytest.raises(NativeError, match=r"\(700\) in ctx_synchronize.*; node 1 of 2 of graph 1"):
        archive.walk(1)
    archive.close()
