"""The words of steps that run one short prompt alone, always in the same places, padded to a few
lengths.

::

    rows   [ prompt ................ )[ unused .... )      positions, slots, token ids: as many as the length
    tiles  [ tile 0 )[ tile 1 )[ unused  )

A step of this kind runs padded whether it is captured or not: both give the same bits. Unused rows
are stored nowhere and no other row sees them; their results are anything.
"""

from bisect import bisect_left

import numpy as np
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.cuda.attention_metadata import (
    QUERIES_AT_ONCE,
    AttentionMetadata,
    Place,
    Words,
    fields_of,
    metadata_of,
)
from pilotlight.engine.cuda.static_words import StaticWords

LENGTHS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Rows of such steps."""
MAX_BLOCKS = 1 << 14
"""Entries of its block table; beyond, a prompt runs as any other batch."""
_CHUNK = ("chunk_rows", "chunk_starts", "chunk_counts", "chunk_first_blocks")


def prompt_length(batch: Batch) -> int | None:
    """The least length that holds a batch of one short segment whose logits are wanted; None for
    any other batch.
    """
    first, *others = batch.segments
    if others or not first.wants_logits or not 1 < first.count <= LENGTHS[-1]:
        return None
    return LENGTHS[bisect_left(LENGTHS, first.count)]


class StaticPrompt:
    """The words of one prompt at a time."""

    def __init__(self, place: Place, *, pinned: bool) -> None:
        """Takes the memory; see ``StaticWords``."""
        capacities: dict[str, int] = dict.fromkeys(
            ("positions", "slots", "first_blocks", "token_ids"), LENGTHS[-1]
        )
        capacities |= dict.fromkeys((*_CHUNK, "logit_rows"), 1)
        capacities |= dict.fromkeys(("tile_segments", "tile_rows"), _tiles(LENGTHS[-1]))
        capacities["blocks"] = MAX_BLOCKS
        self.static = StaticWords(capacities, place, pinned=pinned)

    def fill(self, batch: Batch, token_ids: Words | None) -> bool:
        """Sends a step's words. False, and nothing, if its block table is too long."""
        # No whole prompt, however long: one kernel for all lengths.
        fields = fields_of(batch, 0, None)
        count = len(fields["tile_rows"])
        beyond = np.arange(count, _tiles(LENGTHS[-1]), dtype=np.int32) * QUERIES_AT_ONCE
        # Tiles that begin behind the segment's rows end at once.
        fields["tile_rows"] = np.concatenate((fields["tile_rows"], beyond))
        if token_ids is not None:
            fields["token_ids"] = token_ids
        return self.static.send(fields, ("slots",))

    def view(self, length: int) -> tuple[AttentionMetadata, Tensor]:
        """A step of ``length`` rows, padding included, and its token ids [length] int32."""
        lengths: dict[str, int] = dict.fromkeys(
            ("positions", "slots", "first_blocks", "token_ids"), length
        )
        lengths |= dict.fromkeys((*_CHUNK, "logit_rows"), 1)
        lengths |= dict.fromkeys(("tile_segments", "tile_rows"), _tiles(length))
        lengths["blocks"] = MAX_BLOCKS
        views = self.static.views(lengths)
        return metadata_of(views), views["token_ids"]


def _tiles(rows: int) -> int:
    return -(-rows // QUERIES_AT_ONCE)
