"""A stand-in for NIXL, in the place of its package: it opens the file that the other process has
mapped.

``STAND_IN_NIXL`` says what it does:

reads            everything works, and reads end in another order than they began in
missing          it cannot be imported
unlearnable      no other node's memory can be read
breaks:N         so do the first N reads; the next one breaks off
refuses:N        ... the next one cannot be begun
hangs:N          ... all others never end
lies:N           ... all others bring other bytes
dies:N           ... the process dies
waits:N:FILE     ... all others end, and only then write, once there is such a file
"""

import ctypes
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_what, *_rest = os.environ.get("STAND_IN_NIXL", "reads").split(":")
if _what == "missing":
    raise ImportError("as the test wants it")


@dataclass
class nixl_agent_config:  # noqa: N801 - NIXL's name
    enable_prog_thread: bool
    backends: list[str]


class nixl_agent:  # noqa: N801 - NIXL's name
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        assert name
        assert not config.enable_prog_thread
        self.backends = dict.fromkeys(config.backends)
        self._memory: list[tuple[int, int]] = []
        self._left = int(_rest[0]) if _rest else sys.maxsize
        self._file = Path(_rest[1]) if len(_rest) > 1 else None
        self._rng = random.Random(7)

    def register_memory(self, descriptors: list[tuple[int, int, int, str]], kind: str) -> None:
        assert kind == "DRAM"
        self._memory += [(address, size_bytes) for address, size_bytes, _, _ in descriptors]

    def get_agent_metadata(self) -> bytes:
        return str(os.getpid()).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if _what == "unlearnable":
            raise RuntimeError("as the test wants it")
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        assert name

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], kind: str) -> tuple[int, int]:
        assert kind == "DRAM"
        address, size_bytes, _ = descriptors[0]
        return address, size_bytes

    def initialize_xfer(
        self, operation: str, ours: tuple[int, int], theirs: tuple[int, int], name: str
    ) -> Any:
        assert operation == "READ"
        assert ours[1] == theirs[1]
        assert any(
            start <= ours[0] and sum(ours) <= start + size_bytes
            for start, size_bytes in self._memory
        )
        self._left -= 1
        return name, theirs[0], ours[0], ours[1], self._left < 0

    def transfer(self, read: Any) -> str:
        if read[4] and _what == "dies":
            os._exit(3)
        return "ERR" if read[4] and _what == "refuses" else "PROC"

    def check_xfer_state(self, read: Any) -> str:
        name, theirs, ours, size_bytes, is_beyond = read
        if is_beyond and _what == "breaks":
            return "ERR"
        if is_beyond and (_what == "hangs" or (self._file is not None and not self._file.exists())):
            return "PROC"
        if self._rng.random() < 0.5:
            return "PROC"
        data = bytearray(_read(name, theirs, size_bytes))
        if is_beyond and _what == "lies":
            data[len(data) // 2] ^= 0x20
        ctypes.memmove(ours, bytes(data), size_bytes)
        return "DONE"

    def release_xfer_handle(self, read: Any) -> None:
        assert read

    def get_new_notifs(self) -> None:
        return


def _read(pid: str, address: int, size_bytes: int) -> bytes:
    """Bytes at an address of another process, out of the file that is mapped there."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in addresses.split("-"))
        if start <= address < stop and path:
            with open(path[0], "rb") as file:
                return os.pread(file.fileno(), size_bytes, int(offset, 16) + address - start)
    raise RuntimeError("nothing lies there")
