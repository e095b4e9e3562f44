"""The books of one stage's KV blocks: which are free, and which request owns the others.

A block is ``BLOCK_TOKENS`` consecutive positions of one request, in all layers of the stage. The free ones are kept as half-open
runs, because a request whose blocks lie side by side can be attended to without gathering them first::

    blocks   0   1   2   3   4   5   6   7   8   9
            [free )[  request A  )[free )[  B  )[free )      runs: [0, 1) [4, 5) [8, 10)
"""

from bisect import bisect_left
from typing import NamedTuple

from pilotlight.engine.core.request import RequestKey
from pilotlight.engine.errors import EngineFailed

BLOCK_TOKENS = 16


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class Run(NamedTuple):
    """Free blocks [start, stop)."""

    start: int
    stop: int


class BlockPool:
    """Owns every block of a stage. Nobody else changes who has which."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [Run(0, num_blocks)] if num_blocks else []
        """By position; no two touch."""
        self._free_blocks = num_blocks
        self._owned: dict[RequestKey, tuple[int, ...]] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return self._free_blocks

    def take(self, owner: RequestKey, num_blocks: int) -> tuple[int, ...] | None:
        """Blocks for a request in order of its positions, or None while too few are free.

        1. The lowest run that is long enough gives its head.
        2. Without one, runs are taken from the lowest up.
        """
        if owner in self._owned:
            raise EngineFailed(f"request {owner} owns blocks already")
        if num_blocks > self._free_blocks:
            return None
        whole = next((index for index, run in enumerate(self._free) if run.stop - run.start >= num_blocks), None)  # 1
        taken = self._cut(0 if whole is None else whole, num_blocks)  # 2
        self._free_blocks -= num_blocks
        self._owned[owner] = taken
        return taken

    def _cut(self, index: int, num_blocks: int) -> tuple[int, ...]:
        """Takes blocks out of the runs from ``index`` on, which hold enough."""
        taken: list[int] = []
        while len(taken) < num_blocks:
            run = self._free[index]
            stop = min(run.stop, run.start + num_blocks - len(taken))
            taken.extend(range(run.start, stop))
            self._free[index : index + 1] = [Run(stop, run.stop)] if stop < run.stop else []
        return tuple(taken)

    def release(self, owner: RequestKey) -> None:
        """Frees what a request owns; nothing, if it owns none."""
        for block in self._owned.pop(owner, ()):
            self._free_one(block)

    def _free_one(self, block: int) -> None:
        index = bisect_left(self._free, Run(block, block))
        start, stop = block, block + 1
        if index < len(self._free) and self._free[index].start == stop:
            stop = self._free.pop(index).stop
        if index and self._free[index - 1].stop == start:
            index -= 1
            start = self._free.pop(index).start
        self._free.insert(index, Run(start, stop))
        self._free_blocks += 1

    def check(self) -> None:
        """Finds blocks that leaked or are shared.

        Raises:
            EngineFailed: free runs and owners do not partition the blocks.
        """
        free = [block for run in self._free for block in range(*run)]
        owned = [block for blocks in self._owned.values() for block in blocks]
        if len(free) != self._free_blocks or sorted(free + owned) != list(range(self.num_blocks)):
            raise EngineFailed(f"KV blocks leaked or shared: {len(free)} free, {len(owned)} owned of {self.num_blocks}")
