"""Room in a host pool: which ranges of it are taken. Pure bookkeeping; it touches no memory.

Ranges are half-open, counted in bytes from the start of the pool's data, and cut in units::

    0          u         2u         3u         4u         5u
    [taken .............)[free ....)[taken ...)[free ......)

What goes together is put together, right behind what came before it, and what begins anew into the
largest free range: so what is given up together leaves a large range. (Decision 13 has the
figures.)
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A contiguous range [offset, offset + size_bytes) of a pool's data."""

    offset: int
    size_bytes: int

    @property
    def stop(self) -> int:
        """The first byte past the range."""
        return self.offset + self.size_bytes


class Extents:
    """Ranges of one pool; neighbours are coalesced as soon as they are free."""

    def __init__(self, size_bytes: int, unit_bytes: int) -> None:
        if unit_bytes <= 0 or size_bytes < unit_bytes:
            raise ValueError(f"{size_bytes} bytes cannot be cut in units of {unit_bytes}")
        self.unit_bytes = unit_bytes
        self.size_bytes = size_bytes // unit_bytes * unit_bytes
        # Sorted by offset; no two touch.
        self._free: list[Extent] = [Extent(0, self.size_bytes)]
        self._taken: dict[int, Extent] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing takes."""
        return sum(extent.size_bytes for extent in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest range that nothing takes: the largest request that can be met."""
        return max((extent.size_bytes for extent in self._free), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lie outside the largest free range: 0 when one range holds
        them all, always below 1.
        """
        free_bytes = self.free_bytes
        return 1.0 - self.largest_free_bytes / free_bytes if free_bytes else 0.0

    @property
    def taken(self) -> tuple[Extent, ...]:
        """Every range that is taken, by offset."""
        return tuple(sorted(self._taken.values()))

    def rounded(self, size_bytes: int) -> int:
        """What a request of this size takes: whole units, at least one."""
        return max(1, -(-size_bytes // self.unit_bytes)) * self.unit_bytes

    def take(self, size_bytes: int, after: int | None = None) -> Extent | None:
        """The range from ``after`` on, or else the start of the largest free range, in whole units;
        None when there is no room.
        """
        needed = self.rounded(size_bytes)
        index = (
            bisect_left(self._free, after, key=lambda free: free.offset)
            if after is not None
            else len(self._free)
        )
        if (
            index == len(self._free)
            or self._free[index].offset != after
            or self._free[index].size_bytes < needed
        ):
            index = max(
                range(len(self._free)), key=lambda index: self._free[index].size_bytes, default=-1
            )
        if index < 0 or self._free[index].size_bytes < needed:
            return None
        extent = Extent(self._free[index].offset, needed)
        self._shrink(index, self._free[index], needed)
        self._taken[extent.offset] = extent
        return extent

    def fits(self, sizes_bytes: Iterable[int], after: int | None = None) -> bool:
        """Whether ranges of these sizes could be taken one after the other, each behind the one
        before where that is free.
        """
        trial = Extents(self.size_bytes, self.unit_bytes)
        trial._free = list(self._free)
        for size_bytes in sizes_bytes:
            extent = trial.take(size_bytes, after)
            if extent is None:
                return False
            after = extent.stop
        return True

    def take_at(self, offset: int, size_bytes: int) -> Extent | None:
        """This very range, as found in a pool that is adopted; None when it is not aligned, not
        free or not within the pool.
        """
        needed = self.rounded(size_bytes)
        index = bisect_left(self._free, offset + 1, key=lambda extent: extent.offset) - 1
        if (
            offset < 0
            or offset % self.unit_bytes
            or index < 0
            or self._free[index].stop < offset + needed
        ):
            return None
        free = self._free[index]
        around = [
            Extent(free.offset, offset - free.offset),
            Extent(offset + needed, free.stop - offset - needed),
        ]
        self._free[index : index + 1] = [extent for extent in around if extent.size_bytes]
        self._taken[offset] = Extent(offset, needed)
        return self._taken[offset]

    def give_back(self, extent: Extent) -> None:
        """Free a range that was taken.

        Raises:
            ValueError: it is not taken.
        """
        if self._taken.pop(extent.offset, None) != extent:
            raise ValueError(f"[{extent.offset}, {extent.stop}) is not taken")
        index = bisect_left(self._free, extent.offset, key=lambda free: free.offset)
        start, stop = extent.offset, extent.stop
        first, last = index, index
        if index > 0 and self._free[index - 1].stop == start:
            first, start = index - 1, self._free[index - 1].offset
        if index < len(self._free) and self._free[index].offset == stop:
            last, stop = index + 1, self._free[index].stop
        self._free[first:last] = [Extent(start, stop - start)]

    def _shrink(self, index: int, free: Extent, by_bytes: int) -> None:
        if free.size_bytes == by_bytes:
            del self._free[index]
        else:
            self._free[index] = Extent(free.offset + by_bytes, free.size_bytes - by_bytes)
