"""Least recently used goes first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionPlan,
    EvictionRules,
    Kept,
    RoomRequest,
    plan_in_order,
    why_kept,
)


@dataclass(frozen=True, slots=True)
class Lru:
    """The longest unused copy goes first; ties by subject, so that equal inputs give equal plans.

    What holders report says when a copy was used last, so it keeps no state.
    """

    name: str = "lru"

    def observe(self, accesses: Sequence[Access]) -> "Lru":
        """Nothing changes."""
        return self

    def plan(
        self, request: RoomRequest, candidates: Iterable[EvictionCandidate], rules: EvictionRules
    ) -> EvictionPlan:
        """Evict by recency.

        1. leave out what no policy may evict, with the reason
        2. order the rest by last use
        3. take them in order until the room is there
        """
        kept: list[Kept] = []
        free_to_go: list[EvictionCandidate] = []
        for candidate in candidates:  # 1
            reason = why_kept(candidate, request, rules)
            if reason is None:
                free_to_go.append(candidate)
            else:
                kept.append(Kept(subject=candidate.subject, reason=reason))
        free_to_go.sort(key=lambda one: (one.last_used_s, one.subject))  # 2
        return plan_in_order(request, free_to_go, kept, self.name)  # 3
