"""Turns at something that only so many may do at once: who matters more comes first, and who matters less is asked to give way."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pilotlight.common.waiting import cancel_all

Rank = Callable[[], tuple[int, ...]]
"""How much somebody matters at this moment, the least number most; then their place among those who matter as much. It may change
while they wait."""


class Recalled(Exception):
    """A turn is wanted back for what matters more: what was being done is to be asked for again."""


async def unless_recalled(recalled: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do work that a recall ends.

    Raises:
        Recalled: the event was set first.
    """
    doing, calling = asyncio.ensure_future(work), asyncio.ensure_future(recalled.wait())
    try:
        await asyncio.wait({doing, calling}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Recalled
        doing.result()
    finally:
        await cancel_all([doing, calling])


def in_order_of_arrival() -> tuple[int, ...]:
    """The rank of those who all matter as much."""
    return (0, 0)


@dataclass(slots=True, eq=False)
class Turn:
    """Leave to do it, until it is given back."""

    rank: Rank
    recalled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when somebody who matters more waits: whoever can, breaks off."""


@dataclass(slots=True, eq=False)
class _Waiting:
    rank: Rank
    number: int
    recalled: asyncio.Event
    given: "asyncio.Future[Turn]"

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        return self.rank(), self.number


class Turns:
    """So many turns at once. For the event loop alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[Turn] = []
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    @property
    def limit(self) -> int:
        """How many may be held at once."""
        return self._limit

    @property
    def held(self) -> int:
        """How many are."""
        return len(self._held)

    @property
    def wanted(self) -> int:
        """How many are waited for."""
        return len(self._waiting)

    def resize(self, limit: int) -> None:
        """From now on so many. What is held beyond that stays until it is given back."""
        self._limit = limit
        self._serve()

    async def take(self, rank: Rank, recalled: asyncio.Event | None = None) -> Turn:
        """Wait for a turn. ``recalled`` is set when it is wanted back; by default one of its own."""
        waiting = _Waiting(rank, next(self._numbers), recalled or asyncio.Event(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._serve()
        try:
            return await waiting.given
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif waiting.given.done() and not waiting.given.cancelled():
                self.give_back(waiting.given.result())
            raise

    def give_back(self, turn: Turn) -> None:
        """Let the next one have it."""
        self._held.remove(turn)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and len(self._held) < self._limit:
            first = min(self._waiting, key=lambda waiting: waiting.order)
            self._waiting.remove(first)
            if not first.given.cancelled():
                turn = Turn(first.rank, first.recalled)
                self._held.append(turn)
                first.given.set_result(turn)
        self._recall()

    def _recall(self) -> None:
        """Ask as many back as are waited for by who matters more; the newest of those that matter least."""
        coming = sum(turn.recalled.is_set() for turn in self._held)
        for waiting in sorted(self._waiting, key=lambda waiting: waiting.order)[coming:]:
            matters = waiting.rank()[0]
            lesser = [turn for turn in self._held if not turn.recalled.is_set() and turn.rank()[0] > matters]
            if not lesser:
                return
            lesser.reverse()
            max(lesser, key=lambda turn: turn.rank()).recalled.set()
