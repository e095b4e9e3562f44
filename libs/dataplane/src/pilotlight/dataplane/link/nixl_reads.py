"""Reads of other nodes' memory, and the slots that they land in: which memory may be written to,
and when it may be used again.

Pure.

::

    slot    free -> reading -> landed -> free          its bytes were taken over
                       |
                       +-> late ------> free           too slow, so that it was given up; and then it was done all the same
                       +-> lost                        it broke off: something may still be written

A one-sided read cannot be taken back. So the slot of one that is not wanted any more stays as it is
until the read is done, and a slot whose read broke off is never used again. Where half of them are
late or lost, all of it is to be replaced (``is_spent``).
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pilotlight.checkpoint.digests import UNIT_BYTES


@dataclass(slots=True, eq=False)
class UnitRead:
    """One read of at most a unit."""

    peer: int
    address: int
    size_bytes: int
    deadline_s: float
    """From when it is begun."""
    on_end: Callable[["UnitRead"], None]
    """Called once, when ``view`` or ``error`` is there; not at all after ``Reads.release``."""
    view: memoryview | None = None
    """The bytes; good until ``Reads.release``."""
    error: str | None = None
    slot: int = -1
    is_wanted: bool = True
    is_late: bool = False

    def end(self, error: str | None = None) -> None:
        """Tell the request, unless it has left."""
        if self.is_wanted:
            self.error = error
            self.is_wanted = error is None
            self.on_end(self)


@dataclass(slots=True)
class Reads:
    """The reads of one process, whose landing memory holds ``slots`` units."""

    landing: memoryview
    slots: int
    out_of_use: int = 0
    """Slots that are late or lost."""
    _free: list[int] = field(init=False)
    _queue: deque[UnitRead] = field(default_factory=deque[UnitRead])
    _reading: dict[int, UnitRead] = field(default_factory=dict[int, UnitRead])
    _landed: set[UnitRead] = field(default_factory=set[UnitRead])
    _numbers: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    def __post_init__(self) -> None:
        self._free = list(range(self.slots))

    @property
    def is_spent(self) -> bool:
        """Too few slots are left: the process has to be replaced."""
        return self.out_of_use * 2 >= self.slots

    @property
    def free(self) -> int:
        """Slots that a read may land in."""
        return len(self._free)

    def add(self, read: UnitRead) -> None:
        """Another read is wanted."""
        self._queue.append(read)

    def next(self) -> tuple[int, UnitRead] | None:
        """The next read to begin, with its number and its slot; None: there is no slot, or nothing
        to do.
        """
        while self._queue and self._free:
            read = self._queue.popleft()
            if read.is_wanted:
                number = self._numbers()
                read.slot = self._free.pop()
                self._reading[number] = read
                return number, read
        return None

    def done(self, number: int, error: str = "") -> None:
        """A read has ended."""
        read = self._reading.pop(number)
        if error:
            self.out_of_use += not read.is_late
            read.end(error)
            return
        self.out_of_use -= read.is_late
        if not read.is_wanted:
            self._free.append(read.slot)
            return
        start = read.slot * UNIT_BYTES
        read.view = self.landing[start : start + read.size_bytes]
        self._landed.add(read)
        read.end()

    def late(self, number: int) -> None:
        """A read takes too long. It is given up, and goes on."""
        read = self._reading.get(number)
        if read is not None and not read.is_late:
            read.is_late = True
            self.out_of_use += 1
            read.end(f"a read was not done within {read.deadline_s:g} s")

    def release(self, read: UnitRead) -> None:
        """The request has its bytes, or wants them no more."""
        read.is_wanted = False
        if read in self._landed:
            self._landed.discard(read)
            if read.view is not None:
                read.view.release()
                read.view = None
            self._free.append(read.slot)

    def end(self, why: str) -> None:
        """The process has ended, and with it every read."""
        reads = (*self._queue, *self._reading.values())
        self._queue.clear()
        self._reading.clear()
        for read in reads:
            read.end(why)
