"""Importance-aware eviction (IAM) of mCache, section 4, as design.md 6.6 has it.

What differs from the paper: the heap is keyed by utility, which orders as the rank does when both
are of the same moment, and entries are renewed lazily; a model that was not asked for lately has a
prior; the expected time to the next request is never below the time since the last one; what comes
back again and again has a margin (``hysteresis``).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import Priority
from pilotlight.policy.eviction.hysteresis import Hysteresis
from pilotlight.policy.eviction.rates import DecayedRates, Rates
from pilotlight.policy.eviction.scored import ScoredPolicy

RANK_BIAS = 1.0
"""b_0 of mCache, eq. (2): the least model has importance 0."""


def utility(candidate: EvictionCandidate, arrivals_per_s: float) -> float:
    """What it costs to be without a copy, for each byte that it takes: mCache, eq. (1).

    Args:
        candidate: Its penalty P and its size S.
        arrivals_per_s: 1/T: how often it is expected to be asked for.
    """
    return candidate.penalty_s * arrivals_per_s / max(1, candidate.size_bytes)


def importance(utilities: Sequence[float], one: float) -> float:
    """The rank of a utility among others, on a logarithmic scale: mCache, eq. (2).

    Args:
        utilities: Of all models in the cache, ascending.
        one: The utility that is ranked; it may be among them.
    """
    return math.log(bisect_left(utilities, one) + RANK_BIAS)


def worth(
    candidate: EvictionCandidate,
    arrivals_per_s: float,
    last_s: float,
    now_s: float,
    hysteresis: Hysteresis | None,
) -> Priority:
    """A copy's utility, with what it counts for more by having stayed; ties by recency.

    Args:
        candidate: The copy.
        arrivals_per_s: Of its model, as estimated; it counts for no more than the idle time allows.
        last_s: When its model was asked for last.
        now_s: On the same clock.
        hysteresis: Knows what came back in vain.
    """
    idle_s = now_s - last_s
    if idle_s > 0.0:
        arrivals_per_s = min(arrivals_per_s, 1.0 / idle_s)
    stays = 1.0
    if hysteresis is not None:
        stays = hysteresis.factor(candidate.model, candidate.resident_since_s, now_s)
    return utility(candidate, arrivals_per_s) * stays, last_s


class Iam(ScoredPolicy):
    """The least utility goes first; ties by recency."""

    renewed_per_access = 2

    def __init__(
        self,
        rates: Rates | None = None,
        name: str = "iam",
        hysteresis: Hysteresis | None = None,
    ) -> None:
        """Without copies.

        Args:
            rates: How 1/T is estimated; decayed counts with a prior by default.
            name: As settings call it.
            hysteresis: What a copy counts for more by having stayed.
        """
        super().__init__(Hysteresis() if hysteresis is None else hysteresis)
        self.name = name
        self._rates = DecayedRates() if rates is None else rates

    def note(self, access: Access) -> None:
        super().note(access)
        self._rates.on_access(access)

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        rate_per_s = self._rates.rate_per_s(candidate.model, now_s)
        return worth(candidate, rate_per_s, last_s, now_s, self._hysteresis)
