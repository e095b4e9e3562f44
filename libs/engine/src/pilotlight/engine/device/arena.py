"""Addresses for all models of a CPU device, and memory behind those that are used.

::

    arena   [ slot 0 ............... )[ slot 1 ............... )[ slot 2 ............... )
              [ backed )   [ backed )     not backed               [ backed )

Addresses are taken once and cost nothing. Memory is put behind them and taken away again by
extents, so what a tensor lies at never changes, whatever is loaded, grows or goes beside it.
"""

import ctypes
import os
import weakref
from math import prod

import torch
from torch import Tensor

from pilotlight.engine.core.extents import Extent, ExtentSet
from pilotlight.engine.core.layout import GRANULE_BYTES
from pilotlight.engine.core.slots import SlotTable
from pilotlight.engine.device.arena_protocol import Slot
from pilotlight.engine.device.copying import HostCopier
from pilotlight.engine.errors import EngineError, EngineFailed, NoRoom
from pilotlight.policy.model import SLOTS

SLOT_BYTES = 256 << 30
NUM_SLOTS = SLOTS
"""Models (or stages) that can be resident at once."""
ARENA_ADDRESS = 0x2000_0000_0000
"""Where an engine's child has its arena: far from where Linux puts programs, heaps and libraries.
"""

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x10, 0x20, 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_UNBACKED = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CpuArena:
    """Owns the address range and knows which of its bytes are backed."""

    device = torch.device("cpu")
    copier = HostCopier()
    lending = None
    granule_bytes = GRANULE_BYTES
    pool_bytes = 0
    steps_bytes = 0
    kv_chunk_bytes = 0
    whole_granules = False

    def __init__(
        self,
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
        capacity_bytes: int | None = None,
        address: int | None = None,
    ) -> None:
        """Takes the addresses.

        Args:
            num_slots: how many models fit side by side.
            slot_bytes: addresses of each; whole pages.
            capacity_bytes: the most bytes that are backed at once; the machine's memory, if not
                given.
            address: where it begins, the same in every process; any place, if not given.

        Raises:
            NoRoom: something else is there, or the process may not have that many addresses.
        """
        size = num_slots * slot_bytes
        flags = _UNBACKED | (_MAP_FIXED_NOREPLACE if address else 0)
        start = _libc.mmap(address, size, _PROT_NONE, flags, -1, 0)
        if start == _FAILED or (address and start != address):
            raise NoRoom(f"the system refuses {size} bytes of addresses at {address}: {_reason()}")
        self.slot_bytes = slot_bytes
        self.capacity_bytes = capacity_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf(
            "SC_PHYS_PAGES"
        )
        self.address: int = start
        """Where it begins."""
        self._slots = SlotTable(num_slots)
        self._backed = ExtentSet()
        # Tensors refer to it, so the addresses stay as long as any of them: nothing else can come
        # to lie under an old tensor.
        self._bytes = (ctypes.c_char * size).from_address(start)
        weakref.finalize(self._bytes, _libc.munmap, start, size).atexit = False

    @property
    def backed_bytes(self) -> int:
        """Bytes of all slots that have memory behind them."""
        return self._backed.num_bytes

    @property
    def spare_bytes(self) -> int:
        """See ``Arena.spare_bytes``: all of the machine's memory is for stages."""
        return 0

    @property
    def free_slots(self) -> int:
        """How many more models could be opened."""
        return self._slots.free

    def open_slot(self, home: int | None = None) -> Slot:
        """See ``Arena.open_slot``."""
        return Slot(self, self._slots.take(home))

    def close_slot(self, number: int) -> None:
        """Makes a slot free again; its memory goes back to the system.

        Reading its tensors afterwards ends the process.
        """
        self.unback(*self._backed.within(number * self.slot_bytes, (number + 1) * self.slot_bytes))
        self._slots.give_back(number)

    def back(self, *extents: Extent) -> None:
        """Puts memory behind whole pages that have none: all of them, or nothing.

        It is zero, and the system gives each page when it is first used.

        Raises:
            NoRoom: they go beyond the capacity, or the system has no more.
            EngineFailed: some of them are backed already.
        """
        num_bytes = sum(extent.num_bytes for extent in extents)
        if self.backed_bytes + num_bytes > self.capacity_bytes:
            raise NoRoom(
                f"the device refuses {num_bytes} bytes: {self.backed_bytes} of {self.capacity_bytes} are in use already"
            )
        done: list[Extent] = []
        try:
            for extent in extents:
                self._back(extent)
                done.append(extent)
        except EngineError:
            self.unback(*done)
            raise

    def _back(self, extent: Extent) -> None:
        self._backed.add(extent)
        if extent.num_bytes and _libc.mprotect(
            self.address + extent.start, extent.num_bytes, _PROT_READ_WRITE
        ):
            self._backed.remove(extent)
            raise NoRoom(f"the device refuses {extent.num_bytes} bytes: {_reason()}")

    def unback(self, *extents: Extent) -> None:
        """Takes the memory behind whole pages away.

        Raises:
            EngineFailed: some of them have none.
        """
        for extent in extents:
            self._backed.remove(extent)
            if not extent.num_bytes:
                continue
            # A new mapping in place of the old: unlike madvise, it gives the promise of the memory
            # back, too.
            start = self.address + extent.start
            flags = _UNBACKED | _MAP_FIXED
            if _libc.mmap(start, extent.num_bytes, _PROT_NONE, flags, -1, 0) != start:
                raise EngineFailed(
                    f"the system does not take {extent.num_bytes} bytes back: {_reason()}"
                )

    def trim(self) -> None:
        """Nothing: torch's memory of the host is no concern of the arena."""

    def leave(self, num_bytes: int) -> None:
        """Nothing: what is not backed is the host's."""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over bytes of the arena, whatever they hold. At least one element."""
        return torch.frombuffer(self._bytes, dtype=dtype, count=prod(shape), offset=offset).view(
            shape
        )

    def scratch(self, number: int) -> None:
        """None: torch's own memory will do."""


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
