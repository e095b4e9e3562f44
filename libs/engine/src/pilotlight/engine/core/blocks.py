"""The books of one stage's KV blocks.

A block is ``BLOCK_TOKENS`` consecutive positions of one request, in all layers of the stage. The
pool counts how many block tables a block stands in; the tables themselves are the requests'
(``core.tables``). A block is in one of four states:

========  ======  =====  ==================================================================================
state     owners  named  meaning
========  ======  =====  ==================================================================================
clean          0  no     holds nothing
private        1  no     its owner writes into it
sealed       >=1  yes    full, found by the hash of its content, never written again, shared by its owners
cached         0  yes    as sealed, kept until a request needs room: the one that was released first goes first
========  ======  =====  ==================================================================================

::

    clean ── take ──> private ── seal ──> sealed ── release ──> cached ── share ──> sealed
      ^                  │                   ^                     │
      └──── release ─────┘                   └── share             └── take (as private, its content forgotten)
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NewType

from pilotlight.engine.core.free_runs import FreeRuns, Run
from pilotlight.engine.errors import EngineFailed

BLOCK_TOKENS = 16

BlockHash = NewType("BlockHash", bytes)
"""The name of a full block's content; see ``core.prefix``."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """Keeps for every block of a stage how many requests own it, and what it holds.

    The only writer of both.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._clean = FreeRuns(num_blocks)
        self._owners = [0] * num_blocks
        self._names: dict[int, BlockHash] = {}
        self._named: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Released first comes first."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken: clean and cached ones."""
        return len(self._clean) + len(self._cached)

    @property
    def cached_blocks(self) -> int:
        """Blocks without an owner whose content can still be shared."""
        return len(self._cached)

    def find(self, hashes: Sequence[BlockHash]) -> tuple[int, ...]:
        """The blocks that hold the longest prefix of a chain of contents. Changes nothing."""
        return tuple(self._named[name] for name in takewhile(self._named.__contains__, hashes))

    def free_beside(self, shared: Sequence[int]) -> int:
        """Blocks that could still be taken if these, which ``find`` gave, were shared first."""
        return self.free_blocks - sum(self._owners[block] == 0 for block in shared)

    def share(self, blocks: Sequence[int]) -> None:
        """Makes the caller one more owner of blocks that ``find`` gave."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._cached[block]
            self._owners[block] += 1

    def take(self, num_blocks: int, after: int | None = None) -> tuple[int, ...] | None:
        """Blocks that are the caller's alone, or None while too few are free.

        1. Clean ones, side by side where that can be: behind ``after``, the last block that the
           caller has.
        2. Then the cached ones that were released first; their content is forgotten.
        """
        if num_blocks > self.free_blocks:
            return None
        taken = self._clean.take(num_blocks, after)  # 1
        taken += sorted(self._forget_oldest() for _ in range(num_blocks - len(taken)))  # 2
        for block in taken:
            self._owners[block] = 1
        return tuple(taken)

    def _forget_oldest(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._named[self._names.pop(block)]
        return block

    def forget_cached(self) -> None:
        """Makes all cached blocks clean."""
        while self._cached:
            self._clean.add(self._forget_oldest())

    def seal(self, block: int, name: BlockHash) -> None:
        """Says what a full private block holds; it must not be written from now on.

        When another block holds the same, which two requests computed at a time, this one stays
        private and nameless.
        """
        if self._owners[block] != 1 or block in self._names:
            raise EngineFailed(f"block {block} is sealed, but it is not private")
        if name not in self._named:
            self._named[name] = block
            self._names[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one owner from each block of a table, in the table's order.

        The last ones count as released first: a chain is of use only from its beginning on.
        """
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._names:
                self._cached[block] = None
            else:
                self._clean.add(block)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Has ``num_blocks`` blocks from now on.

        Those beyond go; what owners have in them moves to others.

        Returns:
            The moves, old block to new: the content has to be copied and the tables changed before
                anything else happens.

        Raises:
            EngineFailed: more blocks than that have owners.
        """
        if self.num_blocks - self.free_blocks > num_blocks:
            raise EngineFailed(
                f"{num_blocks} KV blocks do not hold what {self.num_blocks - self.free_blocks} hold"
            )
        if num_blocks > self.num_blocks:
            self._clean.add_run(Run(self.num_blocks, num_blocks))
            self._owners.extend([0] * (num_blocks - self.num_blocks))
        self._clean.truncate(num_blocks)
        for block in [block for block in self._cached if block >= num_blocks]:
            del self._cached[block]
            del self._named[self._names.pop(block)]
        moves: dict[int, int] = {}
        for block in range(num_blocks, self.num_blocks):
            if self._owners[block]:
                moves[block] = self._move(block)
        del self._owners[num_blocks:]
        self.num_blocks = num_blocks
        return moves

    def _move(self, block: int) -> int:
        """Gives a block's owners and its name to a free one."""
        new = self._clean.take(1, None)[0] if len(self._clean) else self._forget_oldest()
        self._owners[new] = self._owners[block]
        if block in self._names:
            self._names[new] = self._names.pop(block)
            self._named[self._names[new]] = new
        return new

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the books with the block tables of all requests.

        Raises:
            EngineFailed: a block leaked, has owners that are not counted, is shared without being
                full, or is found by a wrong name.
        """
        owners = [0] * self.num_blocks
        for table in tables:
            for block in table:
                owners[block] += 1
        if owners != self._owners:
            wrong = [
                block for block in range(self.num_blocks) if owners[block] != self._owners[block]
            ]
            raise EngineFailed(f"the owners of KV blocks {wrong[:8]} are miscounted")
        free = sorted([*self._clean, *self._cached])
        if free != [block for block in range(self.num_blocks) if not owners[block]]:
            raise EngineFailed(
                f"KV blocks leaked: {len(free)} are free, {owners.count(0)} have no owner"
            )
        if any(count > 1 and block not in self._names for block, count in enumerate(owners)):
            raise EngineFailed("a KV block that is not full is shared")
        unnamed = [block for block in self._cached if block not in self._names]
        if unnamed or self._named != {name: block for block, name in self._names.items()}:
            raise EngineFailed("the names of KV blocks do not fit their blocks")
