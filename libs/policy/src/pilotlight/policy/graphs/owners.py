"""Whose an address was last, at each moment of a trace.

Segments do not overlap and are sorted. A new allocation cuts what lay there before; one that is
freed keeps its segment until another takes it: that is what matching backwards finds.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.policy.graphs.trace import Allocation


@dataclass(frozen=True, slots=True)
class _Segment:
    """[start, end) was last allocation ``number``'s."""

    start: int
    end: int
    number: int


class Owners:
    """Goes through the allocations once, forwards; it is asked of moments that never fall."""

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        """Knows of none yet."""
        self._allocations = allocations
        self._next = 0
        self._starts: list[int] = []
        self._segments: list[_Segment] = []
        self._ends: dict[int, list[int]] = defaultdict(list)
        """Allocations by the first address behind them."""

    def advance(self, at: int) -> None:
        """All allocations before a moment are known from now on."""
        while self._next < len(self._allocations) and self._allocations[self._next].at < at:
            self._add(self._next)
            self._next += 1

    def last(self, address: int) -> int | None:
        """The last allocation that had the address, alive or freed."""
        place = bisect_right(self._starts, address) - 1
        if place < 0 or self._segments[place].end <= address:
            return None
        return self._segments[place].number

    def ending(self, address: int, at: int) -> list[int]:
        """Allocations alive at a moment that end just before the address."""
        known = self._ends.get(address, ())
        return [number for number in known if self._allocations[number].lives(at)]

    def _add(self, number: int) -> None:
        one = self._allocations[number]
        first = max(0, bisect_right(self._starts, one.address) - 1)
        last = first
        left: list[_Segment] = []
        while last < len(self._segments) and self._segments[last].start < one.end:
            old = self._segments[last]
            if old.start < one.address:
                left.append(_Segment(old.start, min(old.end, one.address), old.number))
            if old.end > one.end:
                left.append(_Segment(max(old.start, one.end), old.end, old.number))
            last += 1
        left.append(_Segment(one.address, one.end, number))
        left.sort(key=lambda segment: segment.start)
        self._segments[first:last] = left
        self._starts[first:last] = [segment.start for segment in left]
        if one.num_bytes:
            self._ends[one.end].append(number)
