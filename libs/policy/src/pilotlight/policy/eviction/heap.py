"""A heap whose entries change their priority, with stale entries left in it until they surface."""

import heapq
from collections.abc import Callable, Generator

Priority = tuple[float, float]
"""A score, and what decides among equals; the least comes first."""
_SLACK = 64
"""Stale entries that a small heap may have before it is rebuilt."""


class LazyHeap:
    """Subjects by priority. ``put`` and ``remove`` cost O(log n), amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, str]] = []
        self._current: dict[str, Priority] = {}

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, subject: str) -> bool:
        return subject in self._current

    def priority(self, subject: str) -> Priority:
        """What it was put with last. KeyError where it is not there."""
        return self._current[subject]

    def put(self, subject: str, priority: Priority) -> None:
        """Add a subject, or change its priority."""
        if self._current.get(subject) == priority:
            return
        self._current[subject] = priority
        heapq.heappush(self._heap, (priority, subject))
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [(each, one) for one, each in self._current.items()]
            heapq.heapify(self._heap)

    def remove(self, subject: str) -> None:
        """Take a subject out, if it is there."""
        self._current.pop(subject, None)

    def least(self) -> Priority | None:
        """The least priority; None where the heap is empty."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def ascending(
        self, renew: Callable[[str], Priority] | None = None
    ) -> Generator[str, None, None]:
        """Subjects by ascending priority, each O(log n).

        All of them are in the heap again once the generator is closed.

        Args:
            renew: The priority of now. An entry that reaches the top is given only if it is still
                the least by its priority of now; else it sinks.
        """
        given: dict[str, None] = {}
        try:
            while True:
                self._drop_stale()
                if not self._heap:
                    return
                before, subject = heapq.heappop(self._heap)
                if subject in given:  # It had this priority before, too: an entry of then.
                    continue
                now = before if renew is None else renew(subject)
                self._current[subject] = now
                if now > before:
                    heapq.heappush(self._heap, (now, subject))
                else:
                    given[subject] = None
                    yield subject
        finally:
            for subject in given:
                if subject in self._current:
                    heapq.heappush(self._heap, (self._current[subject], subject))

    def _drop_stale(self) -> None:
        while self._heap and self._current.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
