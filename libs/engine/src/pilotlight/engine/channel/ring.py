"""Room for payloads in a piece of memory that two processes see: given and given back in order.

::

    [ free .... )[ frame 7 )[ frame 8 )[ frame 9 )[ free ... )      the next one goes behind 9, or to the beginning
    [ frame 10 )[ free )[ frame 8 )[ frame 9 )[ too short    )
"""

from collections import deque
from typing import NamedTuple

ALIGNMENT = 256
"""Of what a device reads and writes fastest."""


class _Taken(NamedTuple):
    number: int
    start: int
    stop: int


class Ring:
    """Which bytes are taken, by the numbers of frames."""

    def __init__(self, num_bytes: int) -> None:
        """All of it is free.

        Args:
            num_bytes: its length.
        """
        self.num_bytes = num_bytes
        self._taken: deque[_Taken] = deque()

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``take`` would give some."""
        return self._room(_aligned(num_bytes)) is not None

    def take(self, number: int, num_bytes: int) -> int | None:
        """Room for a frame, in one piece: where it begins; None: there is none now.

        Args:
            number: of the frame; they grow.
            num_bytes: at least one.
        """
        length = _aligned(num_bytes)
        start = self._room(length)
        if start is not None:
            self._taken.append(_Taken(number, start, start + length))
        return start

    def give_back(self, number: int) -> None:
        """The frames up to this one were read."""
        while self._taken and self._taken[0].number <= number:
            self._taken.popleft()

    def _room(self, length: int) -> int | None:
        if not self._taken:
            return 0 if length <= self.num_bytes else None
        first, last = self._taken[0].start, self._taken[-1].stop
        if last <= first:  # It has gone round.
            return last if last + length <= first else None
        if last + length <= self.num_bytes:
            return last
        return 0 if length <= first else None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
