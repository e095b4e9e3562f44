"""A semaphore with ranks: a bounded number of permits, the highest rank first; the holders of lower
ranks are asked to give way.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pilotlight.common.waiting import cancel_all

Rank = Callable[[], tuple[int, ...]]
"""The rank of a holder or waiter at this moment: the least number is the highest rank; then its
place among equals. It may change while it waits."""


class Recalled(Exception):
    """A permit is wanted back for a higher rank: what was being done is to be asked for again."""


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
    """The rank where all are equal."""
    return (0, 0)


@dataclass(slots=True, eq=False)
class Permit:
    """One of the permits, until it is given back."""

    rank: Rank
    recalled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a higher rank waits: a holder that can, breaks off."""


@dataclass(slots=True, eq=False)
class _Waiting:
    rank: Rank
    number: int
    recalled: asyncio.Event
    given: "asyncio.Future[Permit]"

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        return self.rank(), self.number


class PrioritySemaphore:
    """Gives out at most ``limit`` permits at once. For the event loop alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[Permit] = []
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
        """Change the limit. Permits that are held beyond it stay until they are given back."""
        self._limit = limit
        self._serve()

    async def take(
        self, rank: Rank, recalled: asyncio.Event | None = None, *, after: Permit | None = None
    ) -> Permit:
        """Wait for a permit. ``recalled`` is set when it is wanted back; by default one of its own.

        ``after`` is a permit of the same work, which is given back: the work is in the queue at
        that moment, so nothing that matters less comes between the two.
        """
        waiting = _Waiting(
            rank,
            next(self._numbers),
            recalled or asyncio.Event(),
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(waiting)
        if after is not None:
            self._held.remove(after)
        self._serve()
        try:
            return await waiting.given
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif waiting.given.done() and not waiting.given.cancelled():
                self.give_back(waiting.given.result())
            raise

    def give_back(self, permit: Permit) -> None:
        """Let the next one have it."""
        self._held.remove(permit)
        self._serve()

    def take_now(self, rank: Rank, recalled: asyncio.Event | None = None) -> Permit | None:
        """As ``take``, without waiting; None where it would."""
        if self._waiting or len(self._held) >= self._limit:
            return None
        permit = Permit(rank, recalled or asyncio.Event())
        self._held.append(permit)
        return permit

    def _serve(self) -> None:
        if not self._waiting:
            return
        # A rank may be dear to ask for: each is asked once.
        ordered = sorted(
            ((waiting.order, waiting) for waiting in self._waiting), key=lambda found: found[0]
        )
        while ordered and len(self._held) < self._limit:
            _, first = ordered.pop(0)
            self._waiting.remove(first)
            if not first.given.cancelled():
                permit = Permit(first.rank, first.recalled)
                self._held.append(permit)
                first.given.set_result(permit)
        self._recall([order[0][0] for order, _ in ordered])

    def _recall(self, waiting: list[int]) -> None:
        """Ask as many back as higher ranks wait for; of those that are held, the newest of the
        lowest rank.
        """
        coming = sum(permit.recalled.is_set() for permit in self._held)
        if len(waiting) <= coming:
            return
        # The newest first. A rank may be dear to ask for: each is asked once.
        staying = [
            (permit.rank(), permit)
            for permit in reversed(self._held)
            if not permit.recalled.is_set()
        ]
        for matters in waiting[coming:]:
            lesser = [held for held in staying if held[0][0] > matters]
            if not lesser:
                return
            last = max(lesser, key=lambda held: held[0])
            staying.remove(last)
            last[1].recalled.set()
