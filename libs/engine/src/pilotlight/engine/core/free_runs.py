"""Blocks that hold nothing, kept as half-open runs: a request whose blocks lie side by side is
attended to without gathering them.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple


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
    """

    def __init__(self, num_blocks: int) -> None:
        self._runs = [Run(0, num_blocks)] if num_blocks else []
        """By position; no two touch."""
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        return (block for run in self._runs for block in range(run.start, run.stop))

    def take(self, num_blocks: int, after: int | None) -> list[int]:
        """Takes ``num_blocks`` blocks, or all of them if there are fewer.

        1. Those right behind ``after``, the last block of the request.
        2. From the longest run, the lowest of equals: from its head if nothing lies before that or
           most of it is wanted, otherwise from its middle, so that the request before it can grow
           as well as this one.
        """
        taken: list[int] = []
        while self._runs and len(taken) < num_blocks:
            wanted = num_blocks - len(taken)
            behind = (taken[-1] if taken else after if after is not None else -2) + 1
            index = bisect_left(self._runs, behind, key=lambda run: run.stop - 1)
            if not (index < len(self._runs) and self._runs[index].start <= behind):  # otherwise 1
                index = max(
                    range(len(self._runs)),
                    key=lambda candidate: (self._runs[candidate].num_blocks, -candidate),
                )  # 2
                run = self._runs[index]
                behind = (
                    run.start
                    if run.start == 0 or 2 * wanted > run.num_blocks
                    else run.start + run.num_blocks // 2
                )
            taken.extend(self._cut(index, behind, wanted))
        return taken

    def _cut(self, index: int, start: int, wanted: int) -> range:
        """Takes up to ``wanted`` blocks out of one run, from ``start`` on."""
        run = self._runs[index]
        stop = min(run.stop, start + wanted)
        self._runs[index : index + 1] = [
            rest for rest in (Run(run.start, start), Run(stop, run.stop)) if rest.num_blocks
        ]
        self._num_blocks -= stop - start
        return range(start, stop)

    def add(self, block: int) -> None:
        """Puts a block back."""
        self.add_run(Run(block, block + 1))

    def add_run(self, run: Run) -> None:
        """Puts blocks back that lie side by side, at least one."""
        start, stop = run
        index = bisect_left(self._runs, Run(start, start))
        if index < len(self._runs) and self._runs[index].start == stop:
            stop = self._runs.pop(index).stop
        if index and self._runs[index - 1].stop == start:
            index -= 1
            start = self._runs.pop(index).start
        self._runs.insert(index, Run(start, stop))
        self._num_blocks += run.num_blocks

    def truncate(self, num_blocks: int) -> None:
        """Forgets all blocks from ``num_blocks`` on."""
        while self._runs and self._runs[-1].stop > num_blocks:
            start, stop = self._runs.pop()
            kept = Run(start, max(start, num_blocks))
            self._num_blocks -= stop - kept.stop
            if kept.num_blocks:
                self._runs.append(kept)
