"""Whose turn a link is: of several fetches the one that has had the least of it. Pure.

Start-time fair queueing: a newcomer begins where the one is that has had the least, so it neither
waits behind what others had before nor catches up with it::

    A  ████████████ 12      B comes: it begins at 12, and from then on both get the same
    B              ░ 12
"""

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Turn:
    """What one fetch has had of a link."""

    had_bytes: int = 0
    """The least of all fetches on the link is the next one."""
    reads: int = 0
    """Of the fetch, that run or wait."""

    def took(self, size_bytes: int) -> None:
        """It has had so much more."""
        self.had_bytes += size_bytes


class FairTurns:
    """The fetches on one link."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, Turn] = {}

    @contextmanager
    def of(self, fetch: Hashable) -> Generator[Turn]:
        """The turn of a fetch, for one of its reads. It is forgotten after the last one."""
        turn = self._turns.get(fetch)
        if turn is None:
            least = min((one.had_bytes for one in self._turns.values()), default=0)
            turn = self._turns[fetch] = Turn(least)
        turn.reads += 1
        try:
            yield turn
        finally:
            turn.reads -= 1
            if not turn.reads:
                del self._turns[fetch]
