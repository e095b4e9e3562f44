"""Whose turn it is among tenants that wait: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM
1996).

Each tenant that waits has a start tag on a virtual clock, and the smallest is next. What it gets
moves its tag on by cost over weight, and the clock stands at the tag served last. So, while two
tenants wait, what they get differs from their weights by one request of each at most (theorem 1
there). One that begins to wait starts at the clock: it has no claim for the time in which it asked
for nothing, and owes nothing for what it got while nobody else waited.

A tag stays where it is while others are served, so a tenant's claim grows with its age: nobody
starves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MIN_WEIGHT = 0.01
MAX_WEIGHT = 100.0
"""Of a project. That the weights are bounded bounds how long anyone waits for others."""


@dataclass(frozen=True, slots=True)
class FairShare:
    """On whose behalf a request waits, and what that one gets beside others."""

    tenant: str = ""
    weight: float = 1.0


NO_TENANT = FairShare()


class FairTurns:
    """The tags of tenants that wait.

    No clock, no randomness: the same calls give the same turns.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._tags: dict[str, float] = {}
        self._ahead: dict[str, float] = {}
        """Tags of tenants that do not wait any more, as far as they are ahead of the clock."""

    def __len__(self) -> int:
        return len(self._tags)

    def begin(self, tenant: str) -> None:
        """It waits from now on."""
        if tenant not in self._tags:
            self._tags[tenant] = max(self._clock, self._ahead.pop(tenant, 0.0))

    def end(self, tenant: str) -> None:
        """It waits no more."""
        tag = self._tags.pop(tenant)
        if not self._tags:
            # Nobody waits: nobody has a claim.
            self._clock = 0.0
            self._ahead.clear()
        elif tag > self._clock:
            self._ahead[tenant] = tag

    def next(self) -> str:
        """Whose turn it is; of equals, who has waited longest."""
        if len(self._tags) == 1:
            return next(iter(self._tags))
        return min(self._tags, key=self._tags.__getitem__)

    def served(self, tenant: str, cost: float, weight: float) -> None:
        """One of its requests is served.

        Args:
            tenant: which waits.
            cost: what the request takes, in tokens.
            weight: the tenant's.
        """
        self._clock = max(self._clock, self._tags[tenant])
        self._tags[tenant] += cost / min(MAX_WEIGHT, max(MIN_WEIGHT, weight))
        if self._ahead:
            self._ahead = {who: tag for who, tag in self._ahead.items() if tag > self._clock}


@dataclass(frozen=True, slots=True)
class Holding:
    """What one tenant has of places that are all taken."""

    tenant: str
    places: int
    weight: float = 1.0

    @property
    def by_weight(self) -> float:
        """Places for each unit of weight."""
        return self.places / self.weight


def makes_way(holdings: Iterable[Holding], newcomer: Holding) -> str | None:
    """Which tenant gives a place up for a newcomer; None: nobody, and the newcomer gets none.

    It is the one that has most by weight, and only if it still has at least as much as the newcomer
    after that: else the two would drive each other out. A tenant alone makes way for nobody.

    Args:
        holdings: of all tenants that have places.
        newcomer: with the places that it has already.
    """
    others = [one for one in holdings if one.tenant != newcomer.tenant]
    most = max(others, key=lambda one: one.by_weight, default=None)
    if most is None or (most.places - 1) / most.weight < (newcomer.places + 1) / newcomer.weight:
        return None
    return most.tenant
