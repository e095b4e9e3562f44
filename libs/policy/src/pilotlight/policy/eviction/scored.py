"""What policies have in common that give each copy a score: residents in a heap, and when each
model was asked for last.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence

from pilotlight.policy.arrivals import MAX_MODELS, Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import LazyHeap, Priority
from pilotlight.policy.eviction.hysteresis import Hysteresis
from pilotlight.policy.ids import ModelName


class ScoredPolicy(ABC):
    """The least score goes first.

    A score may change while nothing happens. Scores in the heap are renewed

    1. when the copy's model is asked for
    2. in turn, ``renewed_per_access`` copies with each access
    3. when a copy reaches the top: it goes only if its score of now is still the least

    so a score is never older than residents / ``renewed_per_access`` accesses.
    """

    name: str
    renewed_per_access = 0

    def __init__(self, hysteresis: Hysteresis | None = None) -> None:
        """Without copies. ``hysteresis``: told of models that come and go, where scores use it."""
        self._hysteresis = hysteresis
        self._heap = LazyHeap()
        self._resident: dict[str, EvictionCandidate] = {}
        self._by_model: dict[ModelName, dict[str, None]] = {}
        self._last_s: dict[ModelName, float] = {}
        self._turns: deque[str] = deque()
        self._in_turn: set[str] = set()

    @abstractmethod
    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        """What a copy is worth, and what decides among equals.

        Args:
            candidate: The copy.
            last_s: When it was used, or its model asked for, last.
            now_s: On the same clock.
        """

    def note(self, access: Access) -> None:
        """Take an access into what scores are made from, before residents are scored anew."""
        self._last_s.pop(access.model, None)
        self._last_s[access.model] = access.at_s
        if len(self._last_s) > MAX_MODELS:
            del self._last_s[next(iter(self._last_s))]

    def on_access(self, access: Access) -> None:
        self.note(access)
        for subject in self._by_model.get(access.model, ()):  # 1
            self._renew(subject, access.at_s)
        for _ in range(min(self.renewed_per_access, len(self._turns))):  # 2
            subject = self._turns.popleft()
            if subject in self._resident:
                self._turns.append(subject)
                self._renew(subject, access.at_s)
            else:
                self._in_turn.discard(subject)

    def on_insert(self, candidate: EvictionCandidate, now_s: float) -> None:
        if self._hysteresis is not None and candidate.subject not in self._resident:
            self._hysteresis.came(candidate.model, now_s)
        if self.renewed_per_access and candidate.subject not in self._in_turn:
            self._in_turn.add(candidate.subject)
            self._turns.append(candidate.subject)
        self._resident[candidate.subject] = candidate
        self._by_model.setdefault(candidate.model, {})[candidate.subject] = None
        self._renew(candidate.subject, now_s)

    def on_evict(self, subject: str, now_s: float) -> None:
        candidate = self._resident.pop(subject, None)
        if candidate is None:
            return
        self._heap.remove(subject)
        copies = self._by_model[candidate.model]
        del copies[subject]
        if copies:
            return
        del self._by_model[candidate.model]
        if self._hysteresis is not None:
            used = self.last_s(candidate) > candidate.resident_since_s
            self._hysteresis.gone(candidate.model, now_s, used=used)

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        def renew(subject: str) -> Priority:
            candidate = self._resident[subject]
            return self.score(candidate, self.last_s(candidate), now_s)

        return self._heap.ascending(renew if self.renewed_per_access else None)  # 3

    def ordered(
        self, candidates: Sequence[EvictionCandidate], now_s: float
    ) -> Sequence[EvictionCandidate]:
        def key(one: EvictionCandidate) -> tuple[Priority, str]:
            return self.reported(one, now_s), one.subject

        return sorted(candidates, key=key)

    def stated(self, candidate: EvictionCandidate, now_s: float) -> float:
        return self.reported(candidate, now_s)[0]

    def reported(self, candidate: EvictionCandidate, now_s: float) -> Priority:
        """What a copy that comes with a question is worth."""
        return self.score(candidate, candidate.last_used_s, now_s)

    def expired(self, now_s: float) -> Sequence[str]:
        return ()

    def last_s(self, candidate: EvictionCandidate) -> float:
        """When a resident copy's model was asked for last, or when it came."""
        return self._last_s.get(candidate.model, candidate.resident_since_s)

    def _renew(self, subject: str, now_s: float) -> None:
        candidate = self._resident[subject]
        self._heap.put(subject, self.score(candidate, self.last_s(candidate), now_s))
