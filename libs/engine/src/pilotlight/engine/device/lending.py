"""Memory of a device that another engine of the host copies from, where both can map each other's.

::

    lends                                              borrows
    what lies behind some bytes, as descriptors  -->   maps them aside, copies to its own device
    a sum over the bytes, by its device                a sum over the copy, by its own

Nothing is held for who borrows: memory that was given away meanwhile, or has other contents, is
mapped all the same, and the sums tell. All of it goes on beside what the device computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pilotlight.engine.core.extents import Extent

SUM_ROW_BYTES = 4096
"""Words are summed in rows of so many bytes. What lies in another row than it should changes the
sum; within one, words may change places."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory of another process, and which bytes of it are wanted."""

    descriptor: int
    """The caller closes it."""
    num_bytes: int
    """Of all that it is of."""
    wanted: Extent
    """Within that."""


class Sum(Protocol):
    """A sum on its way."""

    @property
    def ready(self) -> bool:
        """``value`` would not wait."""
        ...

    @property
    def value(self) -> int:
        """The sum."""
        ...


class Borrowed(Sum, Protocol):
    """A copy on its way, and the sum over it."""

    def close(self) -> None:
        """Waits until nothing is copied any more, and lets go of the other process's memory.
        Closing twice is closing once.
        """
        ...


class Lending(Protocol):
    """What a device can do of it."""

    def export(self, extent: Extent) -> list[Lent]:
        """What lies behind bytes of the arena, in order.

        Raises:
            EngineError: it cannot be given.
        """
        ...

    def sum(self, extent: Extent) -> Sum:
        """Begins to sum up bytes of the arena; whole granules.

        Raises:
            EngineError: the device cannot now.
        """
        ...

    def borrow(self, lent: Sequence[Lent], extent: Extent) -> Borrowed:
        """Begins to copy what was lent to bytes of the arena.

        Raises:
            EngineError: the device cannot reach it, or it is not as long.
        """
        ...

    def peek(self, tensors: Sequence[Tensor], num_bytes: int) -> bytes:
        """The last bytes of each tensor, or all of a shorter one. Waits for nothing else that the
        device does.

        Raises:
            EngineError: the device cannot now.
        """
        ...
