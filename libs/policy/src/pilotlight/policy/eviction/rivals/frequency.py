"""Policies that count: LFU, and GreedyDual-Size-Frequency with the cost of a miss."""

from pilotlight.policy.arrivals import MAX_MODELS, Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import Priority
from pilotlight.policy.eviction.scored import ScoredPolicy
from pilotlight.policy.ids import ModelName


class _Counting(ScoredPolicy):
    """Counts accesses of each model since its copy came; what has gone begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[ModelName, int] = {}

    def note(self, access: Access) -> None:
        super().note(access)
        count = self._counts.pop(access.model, 0)
        self._counts[access.model] = count + access.count
        if len(self._counts) > MAX_MODELS:
            del self._counts[next(iter(self._counts))]

    def on_evict(self, subject: str, now_s: float) -> None:
        candidate = self._resident.get(subject)
        super().on_evict(subject, now_s)
        if candidate is not None and candidate.model not in self._by_model:
            self._counts.pop(candidate.model, None)


class Lfu(_Counting):
    """The least often used since it came goes first; ties by recency."""

    name = "lfu"

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        return float(self._counts.get(candidate.model, 0)), last_s


class Gdsf(_Counting):
    """GreedyDual-Size-Frequency (Cherkasova, 1998) with cost: H = L + F·P/S.

    L is the H of what went last: what is not used ages against what comes. FaasCache keeps
    containers by the same formula. Libraries leave the cost out as a rule (P = 1).
    """

    name = "gdsf"

    def __init__(self) -> None:
        super().__init__()
        self._floor = 0.0

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        count = max(1, self._counts.get(candidate.model, 0))
        return self._floor + count * candidate.penalty_s / max(1, candidate.size_bytes), last_s

    def reported(self, candidate: EvictionCandidate, now_s: float) -> Priority:
        """A copy that it was told of has the H of its last access: with the L of now in all of
        them, nothing would age.
        """
        held = self._resident.get(candidate.subject)
        if held is not None and held.tier is candidate.tier:
            return self._heap.priority(candidate.subject)
        return super().reported(candidate, now_s)

    def on_evict(self, subject: str, now_s: float) -> None:
        if subject in self._heap:
            self._floor = max(self._floor, self._heap.priority(subject)[0])
        super().on_evict(subject, now_s)
