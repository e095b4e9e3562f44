"""The line of requests that wait for one model: by deadline among a tenant's own, fair by weight
between tenants (``policy.fairness``).

With one tenant alone it is a list in the order of deadlines.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Generic, Protocol, TypeVar

from pilotlight.gateway.pacing import Pacing
from pilotlight.policy.fairness import FairTurns, Holding
from pilotlight.policy.pace import Standing, line_room


class Waits(Protocol):
    """What the line must know of a place in it."""

    @property
    def order(self) -> tuple[float, int]:
        """Its place among its tenant's own: deadline, and number."""
        ...

    @property
    def tenant(self) -> str:
        """Whose it is."""
        ...

    @property
    def weight(self) -> float:
        """Its tenant's."""
        ...

    @property
    def cost(self) -> float:
        """What serving it takes, in tokens."""
        ...

    @property
    def since_s(self) -> float:
        """Since when it waits."""
        ...


W = TypeVar("W", bound=Waits)


class Line(Generic[W]):
    """One model's."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Nobody waits yet.

        Args:
            now_s: the monotonic time.
        """
        self._now_s = now_s
        self._places: dict[str, list[W]] = {}
        """By tenant, none of them empty."""
        self._turns = FairTurns()
        self._pacing: Pacing | None = None
        """Since somebody waits; None: nobody does."""
        self._served = Pacing(now_s())
        """All that got an instance, whether or not they waited."""
        self._standing = Standing()
        self.conditional = False
        """Some of them may not wait for a start, or were there and are not any more."""
        self.handed: set[W] = set()
        """Assigned to instances that are loading, from then until those are ready, or the attempt
        has ended."""

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def __bool__(self) -> bool:
        return bool(self._places)

    def __iter__(self) -> Iterator[W]:
        for places in self._places.values():
            yield from places

    def add(self, place: W) -> None:
        """It waits."""
        if self._pacing is None:
            self._pacing = Pacing(self._now_s())
        places = self._places.get(place.tenant)
        if places is None:
            places = self._places[place.tenant] = []
            self._turns.begin(place.tenant)
        insort(places, place, key=_order)

    def first(self) -> W:
        """Whose turn it is; the line is not empty."""
        return self._places[self._turns.next()][0]

    def serve(self, place: W) -> None:
        """Its turn has come: it leaves."""
        self._turns.served(place.tenant, place.cost, place.weight)
        if self._pacing is not None:
            self._pacing.turn(self._now_s())
        self.served()
        self.remove(place)

    def served(self) -> None:
        """One has got its instance, whether or not it waited."""
        self._served.turn(self._now_s())

    def room(self, waiting: int, at_least: int) -> int:
        """How many may wait, so many being there or about to be (``policy.pace.line_room``).

        To be asked for each that comes: so it is known whether the line stands.
        """
        now_s = self._now_s()
        room = line_room(self._served.pace(now_s), waiting, at_least, self._standing, now_s)
        self._standing = room.standing
        return room.places

    def remove(self, place: W) -> bool:
        """It leaves, if it is there."""
        places = self._places.get(place.tenant, [])
        index = bisect_left(places, place.order, key=_order)
        if index >= len(places) or places[index] is not place:
            return False
        del places[index]
        self._forget_empty()
        return True

    def drop(self, goes: Callable[[W], bool]) -> list[W]:
        """All of which this is true leave."""
        gone = [place for place in self if goes(place)]
        for tenant, places in self._places.items():
            self._places[tenant] = [place for place in places if not goes(place)]
        self._forget_empty()
        return gone

    def last_of(self, tenant: str) -> W:
        """The one of a tenant that would wait longest."""
        return self._places[tenant][-1]

    def waits_since_s(self, otherwise_s: float) -> float:
        """Since when those wait that are first of their tenants', at the longest."""
        firsts = (places[0].since_s for places in self._places.values())
        return min(firsts, default=otherwise_s)

    def places_of(self, tenant: str) -> int:
        """How many a tenant has."""
        return len(self._places.get(tenant, ()))

    def holdings(self) -> list[Holding]:
        """Who has how many places."""
        return [
            Holding(tenant, len(places), places[0].weight)
            for tenant, places in self._places.items()
        ]

    def ahead(self, place: W) -> int:
        """How many go before it: of its tenant's own, and as many of others as the weights say."""
        own = bisect_left(self._places.get(place.tenant, []), place.order, key=_order)
        return self._ahead(own, place.tenant, place.weight)

    def ahead_of_new(self, tenant: str, weight: float) -> int:
        """How many would go before one more of a tenant's, behind its own."""
        return self._ahead(self.places_of(tenant), tenant, weight)

    def wait_s(self, tenant: str, weight: float) -> float:
        """How long one more of a tenant's would wait, in seconds, as far as the line's pace is
        known.
        """
        if self._pacing is None:
            return 0.0
        pace = self._pacing.pace(self._now_s())
        return pace.wait_s(self.ahead_of_new(tenant, weight)) or 0.0

    def _ahead(self, own: int, tenant: str, weight: float) -> int:
        if len(self._places) == 1 and own:
            return own
        each = (own + 1) / weight
        return own + sum(
            min(len(places), math.floor(each * places[0].weight))
            for other, places in self._places.items()
            if other != tenant
        )

    def _forget_empty(self) -> None:
        for tenant in [tenant for tenant, places in self._places.items() if not places]:
            del self._places[tenant]
            self._turns.end(tenant)
        if not self._places:
            self._pacing = None
            if not self._standing.kept_short:
                self._standing = Standing()


def all_holdings(lines: Iterable[Line[W]]) -> dict[str, Holding]:
    """Who has how many places in some lines together, by tenant."""
    held: dict[str, Holding] = {}
    for one in chain.from_iterable(line.holdings() for line in lines):
        before = held.get(one.tenant)
        held[one.tenant] = (
            one if before is None else replace(one, places=one.places + before.places)
        )
    return held


def _order(place: Waits) -> tuple[float, int]:
    return place.order
