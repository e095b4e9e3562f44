"""Importance by what copies say of themselves: for whoever expects evictions and decides none."""

from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import Priority
from pilotlight.policy.eviction.iam import utility
from pilotlight.policy.eviction.scored import ScoredPolicy


class Stated(ScoredPolicy):
    """As ``iam``, with the rate that each candidate comes with; ties by recency.

    It is told of nothing and has no memory: who asks again, or from a log, gets the same answer.
    """

    name = "stated"

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        rate_per_s, idle_s = candidate.arrivals_per_s, now_s - last_s
        if idle_s > 0.0:
            rate_per_s = min(rate_per_s, 1.0 / idle_s)
        return utility(candidate, rate_per_s), last_s
