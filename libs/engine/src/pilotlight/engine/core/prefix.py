"""Names of block contents.

The keys and values of a position follow from the model and from all tokens up to it. So the content
of a full block is named by a hash over the name of the block before it and its own tokens::

    tokens   [ 0 ........ 16 )[ 16 ....... 32 )[ 32 ...... 40 )
    names    root ──> hash 0 ──────> hash 1      (not full: no name)

Names do not depend on the stage, the worker or the block's place: the same content has the same
name everywhere.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockHash

_HASH_BYTES = 32
"""256 bits: no client can make two prompts that share a name, not even on purpose."""
_TOKENS = Struct(f"<{BLOCK_TOKENS}q")


def root_hash(namespace: str) -> BlockHash:
    """Where all chains of one model begin; what is computed with other weights or another dtype
    needs another namespace.
    """
    return BlockHash(
        blake2b(namespace.encode(), digest_size=_HASH_BYTES, person=b"pilotlight-kv").digest()
    )


def extend_hashes(root: BlockHash, hashes: list[BlockHash], token_ids: Sequence[int]) -> None:
    """Appends the names of the full blocks of ``token_ids`` that ``hashes`` does not have yet."""
    for index in range(len(hashes), len(token_ids) // BLOCK_TOKENS):
        parent = hashes[-1] if hashes else root
        tokens = _TOKENS.pack(*token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])
        hashes.append(BlockHash(blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()))
