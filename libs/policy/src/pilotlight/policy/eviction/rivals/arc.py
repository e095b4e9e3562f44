"""Adaptive replacement cache (Megiddo and Modha, FAST 2003, Fig. 4), with bytes for pages."""

from collections import OrderedDict
from collections.abc import Generator

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.rivals.structured import StructuredPolicy
from pilotlight.policy.ids import ModelName


class _Queue:
    """Names with their bytes, the least recent first."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[str, int] = OrderedDict()
        self.size_bytes = 0

    def add(self, name: str, size_bytes: int) -> None:
        self.sizes[name] = size_bytes
        self.size_bytes += size_bytes

    def remove(self, name: str) -> int | None:
        size_bytes = self.sizes.pop(name, None)
        self.size_bytes -= size_bytes or 0
        return size_bytes

    def trim(self, limit_bytes: int) -> None:
        while self.sizes and self.size_bytes > limit_bytes:
            self.size_bytes -= self.sizes.popitem(last=False)[1]


class Arc(StructuredPolicy):
    """T1 holds what was asked for once lately, T2 what was asked for more often; B1 and B2 remember
    what went from them, and a miss that is remembered moves the target size p of T1.
    """

    name = "arc"

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: c."""
        super().__init__()
        self._capacity_bytes = capacity_bytes
        self._target_bytes = 0.0
        self._once, self._often = _Queue(), _Queue()
        self._once_gone, self._often_gone = _Queue(), _Queue()
        self._returning: ModelName | None = None
        """A miss that was remembered: its copy comes into T2."""
        self._from_often = False

    def resize(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._target_bytes = min(self._target_bytes, float(capacity_bytes))

    def hit(self, subject: str, access: Access) -> None:
        queue = self._once if subject in self._once.sizes else self._often
        size_bytes = queue.remove(subject) or 0
        self._often.add(subject, size_bytes)

    def missed(self, access: Access) -> None:
        self._returning, self._from_often = None, False
        once_bytes, often_bytes = self._once_gone.size_bytes, self._often_gone.size_bytes
        size_bytes = self._once_gone.remove(access.model)
        if size_bytes is not None:  # Case II
            step = max(1.0, often_bytes / max(1, once_bytes)) * size_bytes
            self._target_bytes = min(float(self._capacity_bytes), self._target_bytes + step)
            self._returning = access.model
            return
        size_bytes = self._often_gone.remove(access.model)
        if size_bytes is not None:  # Case III
            step = max(1.0, once_bytes / max(1, often_bytes)) * size_bytes
            self._target_bytes = max(0.0, self._target_bytes - step)
            self._returning, self._from_often = access.model, True

    def admit(self, candidate: EvictionCandidate) -> None:
        queue = self._often if candidate.model == self._returning else self._once
        queue.add(candidate.subject, candidate.size_bytes)
        self._returning, self._from_often = None, False

    def drop(self, candidate: EvictionCandidate) -> None:
        size_bytes = self._once.remove(candidate.subject)
        gone = self._once_gone
        if size_bytes is None:
            size_bytes = self._often.remove(candidate.subject) or 0
            gone = self._often_gone
        gone.remove(candidate.model)
        gone.add(candidate.model, size_bytes)
        self._once_gone.trim(self._capacity_bytes - self._once.size_bytes)  # Case IV
        held_bytes = self._once.size_bytes + self._often.size_bytes + self._once_gone.size_bytes
        self._often_gone.trim(2 * self._capacity_bytes - held_bytes)

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        """REPLACE, again and again."""
        once, often = list(self._once.sizes.items()), list(self._often.sizes)
        once.reverse()
        often.reverse()
        once_bytes = self._once.size_bytes
        while once or often:
            over = once_bytes > self._target_bytes or (
                self._from_often and once_bytes == self._target_bytes
            )
            if once and (over or not often):
                subject, size_bytes = once.pop()
                once_bytes -= size_bytes
                yield subject
            else:
                yield often.pop()
