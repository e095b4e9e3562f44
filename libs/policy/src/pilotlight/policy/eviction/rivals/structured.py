"""What policies have in common that keep copies in queues rather than give them a score."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.ids import ModelName


class StructuredPolicy(ABC):
    """Residents by model; the order of copies that come with a question follows the queues."""

    name: str

    def __init__(self) -> None:
        self._resident: dict[str, EvictionCandidate] = {}
        self._by_model: dict[ModelName, dict[str, None]] = {}

    @abstractmethod
    def hit(self, subject: str, access: Access) -> None:
        """A resident copy's model was asked for."""

    @abstractmethod
    def missed(self, access: Access) -> None:
        """A model without a resident copy was asked for."""

    @abstractmethod
    def admit(self, candidate: EvictionCandidate) -> None:
        """A copy is new."""

    @abstractmethod
    def drop(self, candidate: EvictionCandidate) -> None:
        """A copy has gone."""

    @abstractmethod
    def ranked(self, now_s: float) -> Generator[str, None, None]:
        """As the protocol has it."""

    def on_access(self, access: Access) -> None:
        copies = self._by_model.get(access.model)
        if copies is None:
            self.missed(access)
            return
        for subject in copies:
            self.hit(subject, access)

    def on_insert(self, candidate: EvictionCandidate, now_s: float) -> None:
        known = self._resident.get(candidate.subject)
        if known is not None and known.size_bytes != candidate.size_bytes:
            self.on_evict(candidate.subject, now_s)
            known = None
        self._resident[candidate.subject] = candidate
        self._by_model.setdefault(candidate.model, {})[candidate.subject] = None
        if known is None:
            self.admit(candidate)

    def on_evict(self, subject: str, now_s: float) -> None:
        candidate = self._resident.pop(subject, None)
        if candidate is None:
            return
        copies = self._by_model[candidate.model]
        del copies[subject]
        if not copies:
            del self._by_model[candidate.model]
        self.drop(candidate)

    def ordered(
        self, candidates: Sequence[EvictionCandidate], now_s: float
    ) -> Sequence[EvictionCandidate]:
        """Those that the queues do not know go first, the longest unused before others."""
        places = {subject: place for place, subject in enumerate(self.ranked(now_s))}

        def key(one: EvictionCandidate) -> tuple[int, float, str]:
            return places.get(one.subject, -1), one.last_used_s, one.subject

        return sorted(candidates, key=key)

    def expired(self, now_s: float) -> Sequence[str]:
        return ()
