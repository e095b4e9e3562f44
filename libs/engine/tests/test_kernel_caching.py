"""A process that has what another one has compiled compiles nothing: with triton's own cache and
compiler where triton is installed, and with what stands in for them everywhere.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_caching import path_of, run

pytestmark = pytest.mark.slow

TRITON = importlib.util.find_spec("triton") is not None
WAYS = [True, *([False] if TRITON else [])]


@pytest.fixture(params=WAYS, ids=lambda stand_in: "stand-in" if stand_in else "triton")
def stand_in(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_a_fresh_process_with_an_empty_cache_compiles_nothing(
    tmp_path: Path, stand_in: bool
) -> None:
    archive = tmp_path / "kernels"
    recorded = run("record", archive, tmp_path / "cache", stand_in=stand_in)
    assert all(recorded["fresh"])
    assert recorded["entries"] == len(recorded["fresh"])
    assert len(recorded["cached"]) >= 1
    for way, cache in (("restore", "empty"), ("only", "cache")):
        restored = run(way, archive, tmp_path / cache, stand_in=stand_in)
        assert restored["images"] == recorded["images"]
        assert not any(restored["fresh"])
        assert (restored["compiled"], restored["started"]) == ([], [])
        assert restored["restored"] == recorded["entries"]
        assert restored["cached"] == ([] if way == "restore" else recorded["cached"])


def test_a_warm_cache_is_recorded_as_well(tmp_path: Path, stand_in: bool) -> None:
    """A builder's machine has compiled before."""
    first, second = tmp_path / "first", tmp_path / "second"
    run("record", first, tmp_path / "cache", stand_in=stand_in)
    again = run("record", second, tmp_path / "cache", stand_in=stand_in)
    assert not any(again["fresh"])
    assert second.read_bytes() == first.read_bytes()


def test_without_an_archive_kernels_are_compiled_as_before(tmp_path: Path, stand_in: bool) -> None:
    plain = run("plain", tmp_path / "none", tmp_path / "cache", stand_in=stand_in)
    assert all(plain["fresh"])
    if not stand_in:
        assert "ptxas" in plain["started"]


READ = """
from triton.runtime import cache
from pilotlight.engine.cuda.kernels.caching import read_compiler
before = cache.triton_key.cache_info().currsize
read_compiler()
read_compiler()
print(before, cache.triton_key.cache_info().currsize, cache.triton_key.cache_info().misses)
"""


def test_the_compiler_is_read_once_before_it_is_needed(stand_in: bool) -> None:
    assert printed(READ, stand_in=stand_in) == "0 1 1"


def printed(program: str, *, stand_in: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path_of(stand_in=stand_in)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


BROKEN = """
from types import SimpleNamespace
from graph_archives import ImageMaker
from pilotlight.engine.cuda.compiled import Entry, pack
from pilotlight.engine.cuda.kernel_store import STORE
from pilotlight.engine.cuda.kernels.launching import Kernel

class Function:
    def __init__(self):
        self.device_caches, self.calls = {0: "a kernel that cannot be loaded"}, 0
    def __getitem__(self, grid):
        return self.run
    def run(self, *given, **options):
        self.calls += 1
        if self.device_caches and (STORE.restored or self.calls > 1):
            raise RuntimeError("no such kernel in the image")
        return SimpleNamespace(asm={"cubin": b""}, function=1, run=lambda *given: None, packed_metadata=())

image = ImageMaker(["kernel"]).image()
STORE.restore(pack([Entry("A" * 52, {"a.json": b"{}", "a.cubin": image})]))
function = Function()
kernel = Kernel(function)
for _ in range(3):
    kernel((1, 1), (2.0,), (), warps=1)
assert function.calls == 2, function.calls
assert STORE.broken == "RuntimeError: no such kernel in the image", STORE.broken
try:
    Kernel(failing := Function())((1, 1), (2.0,), (), warps=1)
    Kernel(failing)((1, 1), (2.0,), (), warps=1)
except RuntimeError:
    print("told")
"""


def test_a_restored_kernel_that_does_not_work_is_compiled() -> None:
    """And what triton compiled itself fails as it always did."""
    assert printed(BROKEN, stand_in=True) == "told"
