"""Blocks that hold nothing, kept as half-open runs: a request whose blocks lie side by side is
attended to without gathering them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

SPARE_ENTRIES = 64
"""So many entries of runs that are gone stay in any case."""


class Run(NamedTuple):
    """Blocks [start, stop)."""

    start: int
    stop: int

    @property
    def num_blocks(self) -> int:
        """How long it is."""
        return self.stop - self.start


class FreeRuns:
    """A set of blocks.

    ::

        blocks   0   1   2   3   4   5   6   7   8   9
                [free )[  taken ......)[free )[ t.)[free )      runs: [0, 1) [4, 5) [6, 7) ...

    An instance that has served for a while has thousands of runs, and each request that comes or
    grows asks for the longest: a heap has it, whose entries outlive their runs until they come up.
    """

    def __init__(self, num_blocks: int) -> None:
        self._starts: list[int] = []
        """Of the runs, by position; no two touch."""
        self._stops: dict[int, int] = {}
        """By start."""
        self._longest_first: list[tuple[int, int]] = []
        """Of each run how much shorter than nothing it is, and its start."""
        self._num_blocks = 0
        if num_blocks:
            self.add_run(Run(0, num_blocks))

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        return (block for start in self._starts for block in range(start, self._stops[start]))

    def take(self, num_blocks: int, after: int | None) -> list[int]:
        """Takes ``num_blocks`` blocks, or all of them if there are fewer.

        1. Those right behind ``after``, the last block of the request.
        2. From the longest run, the lowest of equals: from its head if nothing lies before that or
           most of it is wanted, otherwise from its middle, so that the request before it can grow
           as well as this one.
        """
        taken: list[int] = []
        while self._starts and len(taken) < num_blocks:
            wanted = num_blocks - len(taken)
            behind = (taken[-1] if taken else after if after is not None else -2) + 1
            run = self._around(behind)  # 1
            if run is None:
                run = self._longest()  # 2
                behind = (
                    run.start
                    if run.start == 0 or 2 * wanted > run.num_blocks
                    else run.start + run.num_blocks // 2
                )
            taken.extend(self._cut(run, behind, wanted))
        return taken

    def _around(self, block: int) -> Run | None:
        """The run that a block lies in."""
        index = bisect_right(self._starts, block) - 1
        if index < 0:
            return None
        start = self._starts[index]
        stop = self._stops[start]
        return Run(start, stop) if block < stop else None

    def _longest(self) -> Run:
        """The longest run, the lowest of equals; there is one."""
        while True:
            shorter, start = self._longest_first[0]
            if self._stops.get(start) == start - shorter:
                return Run(start, start - shorter)
            heappop(self._longest_first)

    def _cut(self, run: Run, start: int, wanted: int) -> range:
        """Takes up to ``wanted`` blocks out of one run, from ``start`` on."""
        stop = min(run.stop, start + wanted)
        self._remove(run.start)
        for rest in (Run(run.start, start), Run(stop, run.stop)):
            if rest.num_blocks:
                self._insert(rest)
        return range(start, stop)

    def _insert(self, run: Run) -> None:
        self._starts.insert(bisect_left(self._starts, run.start), run.start)
        self._stops[run.start] = run.stop
        self._num_blocks += run.num_blocks
        heappush(self._longest_first, (-run.num_blocks, run.start))
        if len(self._longest_first) > 2 * len(self._starts) + SPARE_ENTRIES:
            self._longest_first = [(start - stop, start) for start, stop in self._stops.items()]
            heapify(self._longest_first)

    def _remove(self, start: int) -> int:
        """Forgets the run that begins there; where it stops."""
        del self._starts[bisect_left(self._starts, start)]
        stop = self._stops.pop(start)
        self._num_blocks -= stop - start
        return stop

    def add(self, block: int) -> None:
        """Puts a block back."""
        self.add_run(Run(block, block + 1))

    def add_run(self, run: Run) -> None:
        """Puts blocks back that lie side by side, at least one."""
        start, stop = run
        before = self._around(start - 1)
        if before is not None:
            start = before.start
            self._remove(start)
        if stop in self._stops:
            stop = self._remove(stop)
        self._insert(Run(start, stop))

    def truncate(self, num_blocks: int) -> None:
        """Forgets all blocks from ``num_blocks`` on."""
        while self._starts and self._stops[self._starts[-1]] > num_blocks:
            start = self._starts[-1]
            self._remove(start)
            if start < num_blocks:
                self._insert(Run(start, num_blocks))
