"""Static re-reference interval prediction (Jaleel et al., ISCA 2010, section 4.2)."""

from collections.abc import Generator

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.heap import LazyHeap
from pilotlight.policy.eviction.rivals.structured import StructuredPolicy

MAX_RRPV = 3
"""Two bits: the re-reference prediction value at which a copy goes."""


class Srrip(StructuredPolicy):
    """Hit priority: a new copy has RRPV 2, a hit sets 0, and the first at 3 goes; where none is
    at 3, all of them age by one until one is. Ties by the time of the last change.

    Ages are kept as one number for all, so that aging costs nothing.
    """

    name = "srrip"

    def __init__(self) -> None:
        super().__init__()
        self._queue = LazyHeap()
        self._aged = 0
        self._changes = 0

    def hit(self, subject: str, access: Access) -> None:
        self._set(subject, 0)

    def missed(self, access: Access) -> None:
        """Nothing changes."""

    def admit(self, candidate: EvictionCandidate) -> None:
        self._set(candidate.subject, MAX_RRPV - 1)

    def drop(self, candidate: EvictionCandidate) -> None:
        rrpv = self._aged - int(self._queue.priority(candidate.subject)[0])
        self._aged += max(0, MAX_RRPV - rrpv)
        self._queue.remove(candidate.subject)

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        return self._queue.ascending()

    def _set(self, subject: str, rrpv: int) -> None:
        self._changes += 1
        self._queue.put(subject, (float(self._aged - rrpv), float(self._changes)))
