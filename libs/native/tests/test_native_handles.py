"""Kernels that a process has loaded, in the place of an archive's images: by the modules of kernels
that were launched, and by symbol. Over a fake driver.
"""

import ctypes
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from fake_cuda import MIB, FakeCuda, fake_cuda
from graph_archives import ImageMaker, form_notes
from graph_driver import Driver

from pilotlight.native.building import compiler
from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.graphs import GraphArchive, add_image, dump_graphs
from pilotlight.native.handles import SymbolKernels, mapped_libraries, triggered_kernels
from pilotlight.native.library import NoDriver

ADDRESS, BYTES = 0x6100_0000_0000, 64 * MIB
_names = count()

RUNTIME = """
// A runtime that takes a symbol for the handle that it holds.
extern "C" {
void *NAME;
long plain = 3, forgotten = 0;
int cudaGetLastError() { return forgotten++, 98; }
int cudaGetFuncBySymbol(void **handle, void **symbol) {
    if (symbol == reinterpret_cast<void **>(&plain)) return 98;
    *handle = *symbol;
    return 0;
}
}
"""


class Rig:
    def __init__(self) -> None:
        self.fake: FakeCuda = fake_cuda()
        self.fake.reset()
        self.driver = Driver(ctypes.CDLL(self.fake.path))
        self.device = Device(0, self.fake.path)
        self.arena = DeviceArena(self.device, BYTES, ADDRESS)
        self.arena.back(0, BYTES // 2, BYTES // 2)

    def image(self, *names: str, code: bytes = b"", sizes: tuple[int, ...] = (8, 8)) -> bytes:
        return ImageMaker(list(names), code=code, notes=form_notes(sizes, 128)).image()

    def graph(self, *functions: int) -> int:
        graph, before = self.driver.graph(), ()
        for number, function in enumerate(functions):
            params = (ADDRESS + 64 * number).to_bytes(8, "little") + bytes(8)
            before = (self.driver.kernel(graph, function, params, before=before),)
        return graph

    def recorded(self, image: bytes, *names: str) -> tuple[bytes, bytes]:
        """An archive of a graph of an image's kernels, and what they write."""
        functions = [self.driver.load(image, name) for name in names]
        for function in functions:
            add_image(image, function)
        graph = self.graph(*functions)
        ctypes.memset(ADDRESS, 7, 4096)
        self.driver.replay(graph)
        return dump_graphs({1: graph}, self.arena).archive, ctypes.string_at(ADDRESS, 4096)

    def run(self, archive: GraphArchive) -> bytes:
        archive.build(1)
        ctypes.memset(ADDRESS, 7, 4096)
        archive.launch(1)
        return ctypes.string_at(ADDRESS, 4096)


def names_of(number: int) -> list[str]:
    """Images of other tests stay in the process."""
    return [f"loaded_{next(_names)}" for _ in range(number)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.fake.reset()
    made.arena.close()


def test_one_kernel_that_was_launched_triggers_all_of_its_module(rig: Rig) -> None:
    names = names_of(3)
    image = rig.image(*names)
    recorded, expected = rig.recorded(image, *names)
    first = rig.driver.load(image, names[0])  # the library's own module, as it loads it
    found = triggered_kernels([rig.graph(first)])
    assert {*found} == {*names}
    assert found[names[0]] == [first]
    archive = GraphArchive(rig.device, recorded, rig.arena)
    offered = archive.offer(found)
    assert (offered.taken, offered.missing) == (3, ())
    loads = rig.fake.calls("cuModuleLoadData")
    assert rig.run(archive) == expected
    assert rig.fake.calls("cuModuleLoadData") == loads, "no image is needed"
    unloads = rig.fake.calls("cuModuleUnload")
    archive.close()
    assert rig.fake.calls("cuModuleUnload") == unloads, "they stay their library's"
    assert triggered_kernels([]) == {}


def test_what_was_not_triggered_comes_from_its_image(rig: Rig) -> None:
    names = names_of(2)
    images = [rig.image(name) for name in names]
    functions = [rig.driver.load(image, name) for image, name in zip(images, names, strict=True)]
    for image, function in zip(images, functions, strict=True):
        add_image(image, function)
    graph = rig.graph(*functions)
    ctypes.memset(ADDRESS, 7, 4096)
    rig.driver.replay(graph)
    expected = ctypes.string_at(ADDRESS, 4096)
    archive = GraphArchive(rig.device, dump_graphs({1: graph}, rig.arena).archive, rig.arena)
    offered = archive.offer(triggered_kernels([rig.graph(functions[0])]))
    assert (offered.taken, offered.missing) == (1, (names[1],))
    loads = rig.fake.calls("cuModuleLoadData")
    assert rig.run(archive) == expected
    assert rig.fake.calls("cuModuleLoadData") == loads + 1
    archive.close()


def test_of_two_kernels_of_one_name_none_is_taken(rig: Rig) -> None:
    (name,) = names_of(1)
    recorded, expected = rig.recorded(rig.image(name, code=b"ours"), name)
    others = [rig.driver.load(rig.image(name, code=code), name) for code in (b"ours", b"theirs")]
    archive = GraphArchive(rig.device, recorded, rig.arena)
    assert archive.offer({name: others}).missing == (name,)
    assert rig.run(archive) == expected
    archive.close()


def test_a_kernel_that_takes_other_parameters_is_not_taken(rig: Rig) -> None:
    (name,) = names_of(1)
    recorded, expected = rig.recorded(rig.image(name), name)
    other = rig.driver.load(rig.image(name, sizes=(8, 16)), name)
    archive = GraphArchive(rig.device, recorded, rig.arena)
    assert archive.offer({name: [other]}).missing == (name,)
    assert rig.run(archive) == expected
    archive.close()


def test_a_graph_that_has_its_kernels_takes_no_others(rig: Rig) -> None:
    (name,) = names_of(1)
    image = rig.image(name)
    recorded, _ = rig.recorded(image, name)
    archive = GraphArchive(rig.device, recorded, rig.arena)
    archive.load(1)
    assert archive.offer({name: [rig.driver.load(image, name)]}).missing == (name,)
    archive.close()


@pytest.fixture
def runtime(tmp_path: Path) -> tuple[str, str]:
    """A library that is CUDA's runtime and has a kernel's host function: its path, and the name."""
    found, (name,) = compiler(), names_of(1)
    assert found is not None
    source, made = tmp_path / "runtime.cpp", tmp_path / "libcudart.so.12"
    source.write_text(RUNTIME.replace("NAME", name))
    subprocess.run(
        [found, "-shared", "-fPIC", str(source), "-o", str(made)], check=True, timeout=120
    )
    return str(made), name


def test_a_kernel_is_found_by_the_symbol_of_its_host_function(
    rig: Rig, runtime: tuple[str, str]
) -> None:
    path, name = runtime
    image = rig.image(name)
    recorded, expected = rig.recorded(image, name)
    function = rig.driver.load(image, name)
    c_symbol = ctypes.c_void_p.in_dll(ctypes.CDLL(path), name)
    c_symbol.value = function
    symbols = SymbolKernels([path, "/nowhere/lib.so"], path)
    assert symbols[name] == [function]
    for other in ("plain", "no_symbol", names_of(1)[0]):
        assert symbols.get(other, ()) == ()
    assert ctypes.c_long.in_dll(ctypes.CDLL(path), "forgotten").value == 1
    archive = GraphArchive(rig.device, recorded, rig.arena)
    assert archive.offer(symbols).taken == 1
    loads = rig.fake.calls("cuModuleLoadData")
    assert rig.run(archive) == expected
    assert rig.fake.calls("cuModuleLoadData") == loads
    archive.close()
    # The runtime of this process is found by itself.
    assert path in mapped_libraries()
    assert SymbolKernels(cudart=path)[name] == [function]


def test_a_process_without_the_runtime_has_no_symbols(tmp_path: Path) -> None:
    with pytest.raises(NoDriver, match="no runtime of CUDA's names symbols"):
        SymbolKernels(cudart=str(tmp_path / "libcudart.so"))
