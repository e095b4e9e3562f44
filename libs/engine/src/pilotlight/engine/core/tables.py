"""Which blocks hold which request's keys and values.

A request has a block table while it runs. The table is the only owner of its blocks' references.
There is one, also in a pipeline: a request's blocks have the same numbers in every stage. What is a
function of the tokens alone, the names of full blocks, belongs to the request::

    positions   0 ........ 16 ....... 32 ....... 48 ..... 56 ...... 64
    blocks      [ sealed   )[ sealed   )[ private  )[ private         )
    KV          [ in place ..................................)[ to come
"""

from collections.abc import Iterable, Sequence

from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockHash, BlockPool, blocks_for
from pilotlight.engine.core.prefix import extend_hashes, root_hash
from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import EngineFailed
from pilotlight.policy.request import RequestKey


class BlockTable:
    """One request's blocks in order of its positions."""

    __slots__ = ("blocks", "sealed_blocks")

    def __init__(self, blocks: tuple[int, ...], sealed_blocks: int) -> None:
        self.blocks = list(blocks)
        self.sealed_blocks = sealed_blocks
        """The first blocks: how many are full and not written any more, whether their names could
        be entered or not."""


class BlockTables:
    """Owns the block tables of one instance, on its only stage or on the one that leads."""

    def __init__(self, pool: BlockPool, namespace: str, *, prefix_cache: bool = True) -> None:
        """``namespace`` names the model of the blocks' content; see ``root_hash``.

        Without ``prefix_cache`` nothing is ever shared.
        """
        self.pool = pool
        self._root = root_hash(namespace)
        self._prefix_cache = prefix_cache
        self._tables: dict[RequestKey, BlockTable] = {}

    def blocks(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """The blocks of a request's first ``num_tokens`` positions."""
        return tuple(self._tables[request.key].blocks[: blocks_for(num_tokens)])

    def open(self, request: Request, spare_blocks: int) -> int | None:
        """Gives a request blocks for all of its tokens, if ``spare_blocks`` are left then.

        The last token is never found in place, even when its block is cached: what comes after it
        has to be computed, and that must not write into a shared block.

        Returns:
            Tokens whose keys and values are in place already; None if there is too little room.
        """
        if request.key in self._tables:
            raise EngineFailed(f"request {request.key} has a block table already")
        shared = self._shared(request)
        wanted = self._wanted(request, shared, spare_blocks)
        if wanted is None:
            return None
        self.pool.share(shared)
        self._tables[request.key] = BlockTable(shared, len(shared))
        self._extend(self._tables[request.key], wanted)
        return len(shared) * BLOCK_TOKENS

    def could_open(self, request: Request, spare_blocks: int) -> bool:
        """``open`` would find room now."""
        return self._wanted(request, self._shared(request), spare_blocks) is not None

    def _wanted(self, request: Request, shared: Sequence[int], spare_blocks: int) -> int | None:
        """Blocks that a request lacks besides those that it shares; None if they are not there."""
        wanted = blocks_for(len(request.token_ids)) - len(shared)
        return None if wanted + spare_blocks > self.pool.free_beside(shared) else wanted

    def worth_waiting(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether one of those that run is about to seal at least half of what the request would
        run otherwise.

        That is in the step in which that one's last chunk runs: before, its chunks leave no token
        of a step for others.
        """
        if not self._prefix_cache or request.reads_prompt:
            return False
        found = len(self._shared(request))
        half = found + -(-(len(request.token_ids) - found * BLOCK_TOKENS) // (2 * BLOCK_TOKENS)) - 1
        if half >= (len(request.token_ids) - 1) // BLOCK_TOKENS:
            return False
        # A block's name is that of all before it, too.
        name = request.block_hashes[half]
        return any(
            other.block_hashes[half : half + 1] == [name]
            and self._tables[other.key].sealed_blocks <= half
            and not (other.control is not None and other.control.late)
            for other in running
        )

    def _shared(self, request: Request) -> tuple[int, ...]:
        """Cached blocks of its prefix; none of one all of whose prompt has to run."""
        if not self._prefix_cache or request.reads_prompt:
            return ()
        extend_hashes(self._root, request.block_hashes, request.token_ids)
        return self.pool.find(request.block_hashes[: (len(request.token_ids) - 1) // BLOCK_TOKENS])

    def find(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The full blocks in place of the longest prefix of these tokens, whoever computed them.

        Changes nothing: they may be gone with the next request that is taken up.
        """
        if not self._prefix_cache:
            return ()
        names: list[BlockHash] = []
        extend_hashes(self._root, names, token_ids)
        return self.pool.find(names)

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Gives a request the blocks that its tokens, and ``ahead`` more, lack; False, and nothing,
        if too few are free.
        """
        table = self._tables[request.key]
        return self._extend(table, blocks_for(len(request.token_ids) + ahead) - len(table.blocks))

    def _extend(self, table: BlockTable, num_blocks: int) -> bool:
        if num_blocks <= 0:
            return True
        taken = self.pool.take(num_blocks, table.blocks[-1] if table.blocks else None)
        table.blocks.extend(taken or ())
        return taken is not None

    def segment(self, request: Request, count: int) -> Segment:
        """A request's next ``count`` tokens, and where they go."""
        blocks = self.blocks(request, request.computed + count)
        return Segment(request.computed, count, blocks, wants_logits=count == request.wanted)

    def seal(self, request: Request) -> None:
        """Lets others share the blocks that are full now: those below ``request.computed``."""
        table, full = self._tables[request.key], request.computed // BLOCK_TOKENS
        if not self._prefix_cache or full == table.sealed_blocks:
            return
        extend_hashes(self._root, request.block_hashes, request.token_ids)
        for index in range(table.sealed_blocks, full):
            self.pool.seal(table.blocks[index], request.block_hashes[index])
        table.sealed_blocks = full

    def close(self, request: Request) -> None:
        """Gives up a request's blocks; nothing, if it has none."""
        table = self._tables.pop(request.key, None)
        if table is not None:
            self.pool.release(table.blocks)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Has ``num_blocks`` blocks from now on; see ``BlockPool.resize``.

        What is left to do is to copy the content that moved.
        """
        moves = self.pool.resize(num_blocks)
        for table in self._tables.values():
            table.blocks = [moves.get(block, block) for block in table.blocks]
        return moves

    def check(self) -> None:
        """Raises ``EngineFailed`` when books and tables disagree; see ``BlockPool.check``."""
        self.pool.check(table.blocks for table in self._tables.values())
