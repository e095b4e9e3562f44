"""Least recently used goes first."""

from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import Priority
from pilotlight.policy.eviction.scored import ScoredPolicy


class Lru(ScoredPolicy):
    """The longest unused copy goes first; ties by subject, so that equal inputs give equal plans.

    Where candidates come with the question, holders say when a copy was used last.
    """

    name = "lru"

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        return last_s, 0.0
