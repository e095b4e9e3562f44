"""What every device's arena does, and one model's share of it."""

from typing import Protocol

import torch
from torch import Tensor

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.device.copying import PartCopier
from pilotlight.engine.errors import NoRoom


class Arena(Protocol):
    """Addresses for all models of a device, and memory behind those that are used. Offsets are counted from its beginning."""

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        ...

    @property
    def copier(self) -> PartCopier:
        """What brings parameters there."""
        ...

    @property
    def granule_bytes(self) -> int:
        """Memory comes and goes in whole granules."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Addresses of one slot."""
        ...

    @property
    def pool_bytes(self) -> int:
        """As many of them, the last ones, are for the graph pool of the slot's model; 0 where there are no graphs."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that are backed at once."""
        ...

    @property
    def backed_bytes(self) -> int:
        """Bytes of all slots that have memory behind them."""
        ...

    @property
    def free_slots(self) -> int:
        """How many more models could be opened."""
        ...

    def open_slot(self) -> "Slot":
        """The lowest free slot, without any memory.

        Raises:
            NoRoom: all are taken.
        """
        ...

    def close_slot(self, number: int) -> None:
        """Makes a slot free again, and gives all of its memory back. Nothing may use its tensors any more."""
        ...

    def back(self, extent: Extent, *, divisible: bool = False) -> None:
        """Puts memory behind whole granules that have none. What it holds is anything.

        Args:
            extent: within one slot.
            divisible: parts of it may be taken away later on; otherwise it goes as it came, which lets a device give fewer, larger
                pieces. Taking a part away works all the same.

        Raises:
            NoRoom: they go beyond the capacity, or the device has no more.
            EngineFailed: some of them are backed already.
        """
        ...

    def unback(self, extent: Extent) -> None:
        """Takes the memory behind whole granules away. What lies beside them stays.

        Raises:
            EngineFailed: some of them have none.
        """
        ...

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over bytes of the arena, whatever they hold. At least one element."""
        ...


class Slot:
    """One model's addresses. Offsets are counted from its beginning."""

    def __init__(self, arena: Arena, number: int) -> None:
        self._arena = arena
        self._first = number * arena.slot_bytes
        self.number = number

    def back(self, extent: Extent, *, divisible: bool = False) -> None:
        """See ``Arena.back``; the extent lies in the slot.

        Raises:
            NoRoom: it does not, or there is no such memory.
        """
        if extent.stop > self._arena.slot_bytes:
            raise NoRoom(f"a slot has {self._arena.slot_bytes} bytes, so none at [{extent.start}, {extent.stop})")
        self._arena.back(self._placed(extent), divisible=divisible)

    def unback(self, extent: Extent) -> None:
        """See ``Arena.unback``."""
        self._arena.unback(self._placed(extent))

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``Arena.tensor``."""
        return self._arena.tensor(self._first + offset, shape, dtype)

    def close(self) -> None:
        """See ``Arena.close_slot``."""
        self._arena.close_slot(self.number)

    def _placed(self, extent: Extent) -> Extent:
        return Extent(self._first + extent.start, self._first + extent.stop)
