"""IAM as mCache publishes it: Algorithm 1 with the shadow queue of section 4.3.3."""

from bisect import bisect_left, insort
from collections.abc import Generator, Sequence

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import LazyHeap, Priority
from pilotlight.policy.eviction.iam import importance, utility
from pilotlight.policy.eviction.rates import Rates, WindowRates

REFRESH_S = 60.0
"""Between two rebuilds of the importance queue; the paper names no period."""
REBUILT_PER_EVENT = 4
"""Entries of the shadow queue that are made with each access: no access waits for all of them."""


class IamPaper:
    """The least importance goes first. A copy's importance is its rank when it was inserted
    (Algorithm 1, lines 3, 9 and 18), or when the queue was rebuilt last: a hit does not change it.

    1. rank(i) by eq. (2) is among the copies that are in the cache at that moment
    2. every ``REFRESH_S`` the queue is rebuilt aside: ranks of one moment go into the shadow queue,
       a few with each access; the queue in use only loses what is evicted meanwhile
    3. what is inserted during a rebuild goes into both; when the shadow is whole it takes over

    The rates are those of a sliding window (section 4.3.2).
    """

    name = "iam-paper"

    def __init__(self, rates: Rates | None = None) -> None:
        """``rates``: how 1/T is estimated."""
        self._rates: Rates = WindowRates() if rates is None else rates
        self._resident: dict[str, EvictionCandidate] = {}
        self._queue = LazyHeap()
        self._utilities: list[float] = []
        """Of residents, ascending, as of each one's last ranking."""
        self._utility: dict[str, float] = {}
        self._shadow: LazyHeap | None = None
        self._to_rebuild: list[str] = []
        self._refreshed_s: float | None = None

    def on_access(self, access: Access) -> None:
        self._rates.on_access(access)
        if self._refreshed_s is None:
            self._refreshed_s = access.at_s
        if self._shadow is None and access.at_s - self._refreshed_s >= REFRESH_S:  # 2
            self._refreshed_s = access.at_s
            self._shadow = LazyHeap()
            self._to_rebuild = list(self._resident)
        self._rebuild(access.at_s)

    def on_insert(self, candidate: EvictionCandidate, now_s: float) -> None:
        self._resident[candidate.subject] = candidate
        rank = self._rank(candidate, now_s)  # 1
        self._queue.put(candidate.subject, (rank, now_s))
        if self._shadow is not None:  # 3
            self._shadow.put(candidate.subject, (rank, now_s))

    def on_evict(self, subject: str, now_s: float) -> None:
        if self._resident.pop(subject, None) is None:
            return
        self._queue.remove(subject)
        self._forget(subject)
        if self._shadow is not None:
            self._shadow.remove(subject)

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        return self._queue.ascending()

    def ordered(
        self, candidates: Sequence[EvictionCandidate], now_s: float
    ) -> Sequence[EvictionCandidate]:
        """Copies that it was told of have the rank that it keeps for them. Others are ranked now,
        among those and each other.
        """
        others = {
            one.subject: utility(one, self._rates.rate_per_s(one.model, now_s))
            for one in candidates
            if not self._knows(one)
        }
        utilities = sorted([*self._utilities, *others.values()])

        def key(one: EvictionCandidate) -> tuple[Priority, str]:
            value = others.get(one.subject)
            if value is None:
                return self._queue.priority(one.subject), one.subject
            return (importance(utilities, value), one.last_used_s), one.subject

        return sorted(candidates, key=key)

    def stated(self, candidate: EvictionCandidate, now_s: float) -> float:
        """Its rank; of one that it was not told of, among those that it was."""
        if self._knows(candidate):
            return self._queue.priority(candidate.subject)[0]
        value = utility(candidate, self._rates.rate_per_s(candidate.model, now_s))
        return importance(self._utilities, value)

    def expired(self, now_s: float) -> Sequence[str]:
        return ()

    def _knows(self, candidate: EvictionCandidate) -> bool:
        """Whether it was told of this copy, and not of one with its name in another tier."""
        held = self._resident.get(candidate.subject)
        return held is not None and held.tier is candidate.tier

    def _rank(self, candidate: EvictionCandidate, now_s: float) -> float:
        self._forget(candidate.subject)
        value = utility(candidate, self._rates.rate_per_s(candidate.model, now_s))
        insort(self._utilities, value)
        self._utility[candidate.subject] = value
        return importance(self._utilities, value)

    def _forget(self, subject: str) -> None:
        value = self._utility.pop(subject, None)
        if value is not None:
            del self._utilities[bisect_left(self._utilities, value)]

    def _rebuild(self, now_s: float) -> None:
        if self._shadow is None:
            return
        for _ in range(REBUILT_PER_EVENT):
            if not self._to_rebuild:  # 3
                self._queue, self._shadow = self._shadow, None
                return
            candidate = self._resident.get(self._to_rebuild.pop())
            if candidate is not None:
                self._shadow.put(candidate.subject, (self._rank(candidate, now_s), now_s))
