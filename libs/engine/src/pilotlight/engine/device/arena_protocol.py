"""What every device's arena does, and one model's share of it."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.device.copying import PartCopier
from pilotlight.engine.device.lending import Lending
from pilotlight.engine.errors import NoRoom


class TorchMemory(Protocol):
    """Memory of a device that torch's allocator takes for itself.

    The same calls give the same addresses in every process.
    """

    @property
    def id(self) -> tuple[int, int]:
        """What a capture takes as its pool, within ``selected``."""
        ...

    @property
    def sequence(self) -> tuple[int, int]:
        """How many segments torch took so far, and a hash over their lengths and places."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes of its addresses that have memory."""
        ...

    def selected(self) -> AbstractContextManager[None]:
        """Within it, segments that torch takes for this pool come from here. One pool at a time."""
        ...

    def use(self) -> AbstractContextManager[None]:
        """Within it, what this thread allocates with torch comes from here."""
        ...

    def trim(self) -> None:
        """Gives back what torch keeps of it though nothing lies there.

        Not within ``use``: the next one begins anew.
        """
        ...

    def close(self) -> None:
        """Gives it back; nothing lies in it any more."""
        ...


@dataclass(frozen=True, slots=True)
class Scratch:
    """What torch takes while a model runs."""

    eager: TorchMemory
    """For steps that are not captured. All models use the same."""
    graphs: TorchMemory
    """For captured steps, at the end of the model's slot. Its memory is shared with other models':
    nothing in it outlasts a step. Its owner closes it."""


class Arena(Protocol):
    """Addresses for all models of a device, and memory behind those that are used.

    Offsets are counted from its beginning.
    """

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        ...

    @property
    def copier(self) -> PartCopier:
        """What brings parameters there."""
        ...

    @property
    def lending(self) -> Lending | None:
        """How other engines of the host copy from it, and it from theirs; None: they cannot."""
        ...

    @property
    def address(self) -> int:
        """Where it begins."""
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
        """As many of them, the last ones, are for the graph pool of the slot's model; 0 where there
        are no graphs.
        """
        ...

    @property
    def steps_bytes(self) -> int:
        """As many, before those, are for what the model's captured steps read and write; 0 where
        there are no graphs.
        """
        ...

    @property
    def whole_granules(self) -> bool:
        """A stage's bytes are counted in whole granules.

        Where they are small, what is left of each is not counted.
        """
        ...

    @property
    def kv_chunk_bytes(self) -> int:
        """Longest piece of a layer's keys that is backed at once; 0 where pieces cost nothing, and
        any part of one can be taken away.
        """
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
    def spare_bytes(self) -> int:
        """Of the device's memory, what is free now and never for stages; less than 0 where they may
        take more than there is.
        """
        ...

    @property
    def free_slots(self) -> int:
        """How many more models could be opened."""
        ...

    def open_slot(self, home: int | None = None) -> "Slot":
        """A free slot, without any memory: ``home`` where that is free, see ``SlotTable.take``.

        Raises:
            NoRoom: all are taken.
        """
        ...

    def close_slot(self, number: int) -> None:
        """Makes a slot free again, and gives all of its memory back.

        Nothing may use its tensors any more.
        """
        ...

    def back(self, *extents: Extent) -> None:
        """Puts memory behind whole granules that have none: all of them, or nothing. Each in as few
        pieces as the device lets, and no piece lies in two of them.

        What it holds is anything.

        Raises:
            NoRoom: they go beyond the capacity, or the device has no more.
            EngineFailed: some of them are backed already.
        """
        ...

    def unback(self, *extents: Extent) -> None:
        """Takes the memory behind whole granules away. What lies beside them stays.

        Where part of what was backed at once is taken away, a device has to copy the rest.

        Raises:
            EngineFailed: some of them have none, or the device refuses. The books say what has
                memory then, which is mostly all that had.
        """
        ...

    def trim(self) -> None:
        """Gives back to the device what torch keeps for itself though nothing lies there."""
        ...

    def leave(self, num_bytes: int) -> None:
        """Leaves so much of the device to another process from now on; 0: nothing.

        What is backed stays.

        Raises:
            EngineFailed: the device does not take back what is idle.
        """
        ...

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over bytes of the arena, whatever they hold. At least one element."""
        ...

    def scratch(self, number: int) -> Scratch | None:
        """What torch takes while the model of a slot runs; None where torch's own memory does."""
        ...


class Slot:
    """One model's addresses. Offsets are counted from its beginning."""

    def __init__(self, arena: Arena, number: int) -> None:
        self._arena = arena
        self._first = number * arena.slot_bytes
        self.number = number

    def placed(self, extent: Extent) -> Extent:
        """The same bytes, counted from the arena's beginning."""
        return Extent(self._first + extent.start, self._first + extent.stop)

    def back(self, *extents: Extent) -> None:
        """See ``Arena.back``; the extents lie in the slot.

        Raises:
            NoRoom: they do not, or there is no such memory.
        """
        for extent in extents:
            if extent.stop > self._arena.slot_bytes:
                raise NoRoom(
                    f"a slot has {self._arena.slot_bytes} bytes, so none at [{extent.start}, {extent.stop})"
                )
        self._arena.back(*map(self.placed, extents))

    def unback(self, *extents: Extent) -> None:
        """See ``Arena.unback``."""
        self._arena.unback(*map(self.placed, extents))

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``Arena.tensor``."""
        return self._arena.tensor(self._first + offset, shape, dtype)

    def scratch(self) -> Scratch | None:
        """See ``Arena.scratch``."""
        return self._arena.scratch(self.number)

    def close(self) -> None:
        """See ``Arena.close_slot``."""
        self._arena.close_slot(self.number)
