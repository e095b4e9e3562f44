"""Compiles the fake libcuda that lies beside this file, in three parts, and talks to it: for tests
on machines without a GPU.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from pilotlight.native.building import compiler

SOURCES = tuple(
    Path(__file__).with_name(f"fake_cuda{part}.cpp") for part in ("", "_graphs", "_launches")
)
MIB = 1 << 20


class FakeCuda:
    """What tests tell the fake, and what they ask it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._fake = ctypes.CDLL(self.path)
        for name in ("used", "mappings", "reserved", "registered", "calls"):
            getattr(self._fake, f"fake_{name}").restype = ctypes.c_uint64
        self._fake.fake_calls.argtypes = [ctypes.c_char_p]
        self._fake.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
        self._fake.fake_set_memory.argtypes = [ctypes.c_uint64]

    def reset(self) -> None:
        """As much memory as in the beginning, and no failures."""
        self._fake.fake_set_memory(4096 * MIB)
        self._fake.fake_forgive()
        self.capture(on=False)
        self.hold_events(on=False)

    def set_memory(self, num_bytes: int) -> None:
        self._fake.fake_set_memory(num_bytes)

    def fail(self, function: str, code: int, in_calls: int = 1) -> None:
        """Has the call after next (2), or the next (1), of a function of the driver answer with an
        error, once.
        """
        self._fake.fake_fail(function.encode(), in_calls, code)

    def calls(self, function: str) -> int:
        return int(self._fake.fake_calls(function.encode()))

    def capture(self, *, on: bool) -> None:
        """From now on a stream is captured: a wait for the device spoils it."""
        self._fake.fake_capture(int(on))

    @property
    def capture_spoilt(self) -> bool:
        """The device was waited for since the capture began."""
        return bool(self._fake.fake_capture_spoilt())

    def hold_events(self, *, on: bool) -> None:
        """A wait for an event goes on until this is taken back: the device is busy."""
        self._fake.fake_hold_events(int(on))

    @property
    def used_bytes(self) -> int:
        return int(self._fake.fake_used())

    @property
    def mappings(self) -> int:
        return int(self._fake.fake_mappings())

    @property
    def reserved(self) -> int:
        return int(self._fake.fake_reserved())

    @property
    def registered(self) -> int:
        return int(self._fake.fake_registered())


@cache
def fake_cuda() -> FakeCuda:
    """The fake of this process: a process opens one driver, once."""
    made = Path(tempfile.mkdtemp(prefix="fake-cuda-")) / "libcuda.so.1"
    found = compiler()
    assert found is not None, "tests need a C++ compiler (apt-get install g++)"
    command = [found, "-std=c++17", "-O1", "-fPIC", "-shared", *map(str, SOURCES), "-o", str(made)]
    subprocess.run(command, check=True, timeout=120)
    return FakeCuda(made)
