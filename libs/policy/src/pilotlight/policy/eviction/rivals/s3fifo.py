"""S3-FIFO (Yang et al., SOSP 2023, Algorithm 1), with bytes for objects."""

from collections import OrderedDict, deque
from collections.abc import Generator

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.rivals.structured import StructuredPolicy
from pilotlight.policy.ids import ModelName

SMALL_SHARE = 0.1
"""Of the capacity: the queue that new copies come into."""
MAX_COUNT = 3
PROMOTED_AT = 2
"""Hits in the small queue that bring a copy into the main one."""


class S3Fifo(StructuredPolicy):
    """New copies come into a small queue and go from there unless they were used; a ghost queue
    brings what returns soon into the main queue, where a copy that was used gets another turn.

    Looking for victims changes nothing: copies that the algorithm moves while it looks are moved
    when the victim that it found goes.
    """

    name = "s3-fifo"

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: of which the small queue has a tenth."""
        super().__init__()
        self.resize(capacity_bytes)
        self._small: OrderedDict[str, int] = OrderedDict()
        """Subjects and their sizes."""
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghost: OrderedDict[ModelName, int] = OrderedDict()
        self._ghost_bytes = 0
        self._counts: dict[str, int] = {}

    def resize(self, capacity_bytes: int) -> None:
        self._small_limit_bytes = SMALL_SHARE * capacity_bytes
        self._ghost_limit_bytes = capacity_bytes - self._small_limit_bytes

    def hit(self, subject: str, access: Access) -> None:
        self._counts[subject] = min(MAX_COUNT, self._counts[subject] + 1)

    def missed(self, access: Access) -> None:
        """Nothing changes."""

    def admit(self, candidate: EvictionCandidate) -> None:
        remembered = self._ghost.pop(candidate.model, None)
        self._ghost_bytes -= remembered or 0
        queue = self._small if remembered is None else self._main
        queue[candidate.subject] = candidate.size_bytes
        self._counts[candidate.subject] = 0

    def drop(self, candidate: EvictionCandidate) -> None:
        subject = candidate.subject
        self._promote_before(subject)
        if subject in self._main:
            self._turn_to(subject)
            del self._main[subject], self._counts[subject]
            return
        del self._counts[subject]
        size_bytes = self._small.pop(subject)
        self._ghost[candidate.model] = size_bytes
        self._ghost_bytes += size_bytes
        while self._ghost and self._ghost_bytes > self._ghost_limit_bytes:
            self._ghost_bytes -= self._ghost.popitem(last=False)[1]

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        small = deque(self._small.items())
        small_bytes = sum(self._small.values())
        promoted: list[str] = []
        while small and (small_bytes > self._small_limit_bytes or not (self._main or promoted)):
            subject, size_bytes = small.popleft()
            small_bytes -= size_bytes
            if self._counts[subject] >= PROMOTED_AT:
                promoted.append(subject)
            else:
                yield subject
        main = [(self._counts[subject], subject) for subject in self._main]
        main += [(0, subject) for subject in promoted]
        yield from (subject for _, subject in sorted(main, key=lambda one: one[0]))
        late: list[str] = []
        for subject, _ in small:
            if self._counts[subject] >= PROMOTED_AT:
                late.append(subject)
            else:
                yield subject
        yield from late

    def _promote_before(self, victim: str) -> None:
        """Move what was used and was met in the small queue before a victim was found: one of that
        queue at its place, one of the main queue when the small one was small enough.
        """
        of_small = victim in self._small and self._counts[victim] < PROMOTED_AT
        small_bytes = sum(self._small.values())
        for subject, size_bytes in list(self._small.items()):
            enough = small_bytes <= self._small_limit_bytes and self._main
            if subject == victim if of_small else enough:
                return
            small_bytes -= size_bytes
            if self._counts[subject] >= PROMOTED_AT:
                self._promote(subject)

    def _promote(self, subject: str) -> None:
        self._main[subject] = self._small.pop(subject)
        self._counts[subject] = 0

    def _turn_to(self, victim: str) -> None:
        """Turn the main queue until the victim is its head without a hit left: each hit is another
        turn.
        """
        while True:
            head = next(iter(self._main))
            if head == victim and self._counts[head] == 0:
                return
            self._counts[head] = max(0, self._counts[head] - 1)
            self._main.move_to_end(head)
