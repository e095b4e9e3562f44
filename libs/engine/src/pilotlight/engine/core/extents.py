"""Half-open byte ranges, and a set of them: what of an arena is backed by memory."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pilotlight.engine.errors import EngineFailed


class Extent(NamedTuple):
    """Bytes [start, stop)."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return self.stop - self.start


class ExtentSet:
    """Extents of which no two share a byte.

    ::

        bytes    0 .... 4 ....... 9 ... 12 ....... 20
                 [ held )         [ held )[ held   )        [0, 4) [9, 20)
    """

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        """Holds these from the beginning.

        Raises:
            EngineFailed: two share a byte.
        """
        self._extents: list[Extent] = []
        """By position; no two touch."""
        self.num_bytes = 0
        for extent in extents:
            self.add(extent)

    def __iter__(self) -> Iterator[Extent]:
        return iter(tuple(self._extents))

    def within(self, start: int, stop: int) -> list[Extent]:
        """What of [start, stop) is held, in order."""
        cut = (Extent(max(start, held.start), min(stop, held.stop)) for held in self._extents)
        return [extent for extent in cut if extent.start < extent.stop]

    def add(self, extent: Extent) -> None:
        """Adds bytes of which none is in the set yet.

        Raises:
            EngineFailed: some are: two owners would have them.
        """
        if not extent.num_bytes:
            return
        start, stop = extent
        index = bisect_left(self._extents, start + 1, key=lambda held: held.stop)
        if index < len(self._extents) and self._extents[index].start < stop:
            raise EngineFailed(f"bytes [{start}, {stop}) are held already, at least in part")
        if index < len(self._extents) and self._extents[index].start == stop:
            stop = self._extents.pop(index).stop
        if index and self._extents[index - 1].stop == start:
            index -= 1
            start = self._extents.pop(index).start
        self._extents.insert(index, Extent(start, stop))
        self.num_bytes += extent.num_bytes

    def remove(self, extent: Extent) -> None:
        """Removes bytes that are all in the set.

        Raises:
            EngineFailed: some are not.
        """
        if not extent.num_bytes:
            return
        index = bisect_left(self._extents, extent.stop, key=lambda held: held.stop)
        if index == len(self._extents) or self._extents[index].start > extent.start:
            raise EngineFailed(f"bytes [{extent.start}, {extent.stop}) are not all held")
        held = self._extents[index]
        rest = (Extent(held.start, extent.start), Extent(extent.stop, held.stop))
        self._extents[index : index + 1] = [part for part in rest if part.num_bytes]
        self.num_bytes -= extent.num_bytes
