"""The process that reads other nodes' memory, with a stand-in for NIXL: it opens the file that the other one has mapped.

``python fake_reader.py WHAT DESCRIPTOR``; WHAT is one of

    reads            everything works, and reads end in another order than they began in
    missing          NIXL is not installed
    unlearnable      no other node's memory can be read
    breaks:N         so do the first N reads; the next one breaks off
    hangs:N          ... all others never end
    lies:N           ... all others bring other bytes
    dies:N           ... the process dies
    waits:N:FILE     ... all others end, and only then write, once there is such a file
"""

import ctypes
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pilotlight.dataplane.link.nixl_agent import NotInstalled, ReadFailed
from pilotlight.dataplane.link.nixl_reader import main


class FakeAgent:
    """``Agent`` between processes of one host."""

    def __init__(self, what: str) -> None:
        self._what, *rest = what.split(":")
        self._left = int(rest[0]) if rest else sys.maxsize
        self._file = Path(rest[1]) if len(rest) > 1 else None
        self._rng = random.Random(7)
        if self._what == "missing":
            raise NotInstalled("NIXL is not installed")

    def register(self, memory: memoryview) -> int:
        return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)

    def offer(self) -> bytes:
        return str(os.getpid()).encode()

    def learn(self, agent: bytes) -> str:
        if self._what == "unlearnable":
            raise ValueError("no way there")
        return agent.decode()

    def forget(self, name: str) -> None:
        assert name

    def read(self, name: str, theirs: int, ours: int, size_bytes: int) -> Any:
        self._left -= 1
        if self._left < 0 and self._what == "breaks":
            raise ReadFailed("as the test wants it")
        if self._left < 0 and self._what == "dies":
            os._exit(3)
        return name, theirs, ours, size_bytes, self._left < 0

    def is_done(self, read: Any) -> bool:
        name, theirs, ours, size_bytes, is_beyond = read
        if is_beyond and (self._what == "hangs" or (self._file is not None and not self._file.exists())):
            return False
        if self._rng.random() < 0.5:
            return False
        data = bytearray(_read(name, theirs, size_bytes))
        if is_beyond and self._what == "lies":
            data[len(data) // 2] ^= 0x20
        ctypes.memmove(ours, bytes(data), size_bytes)
        return True

    def progress(self) -> None:
        return


def _read(pid: str, address: int, size_bytes: int) -> bytes:
    """Bytes at an address of another process, out of the file that is mapped there."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in addresses.split("-"))
        if start <= address < stop and path:
            with open(path[0], "rb") as file:
                return os.pread(file.fileno(), size_bytes, int(offset, 16) + address - start)
    raise ReadFailed("nothing lies there")


if __name__ == "__main__":
    what = sys.argv[1]
    main(int(sys.argv[2]), lambda _: FakeAgent(what))
