"""The words of steps that run one short prompt alone, always in the same places, padded to a few
lengths.

::

    rows   [ prompt ................ )[ unused .... )      positions, slots, token ids: as many as the length
    tiles  [ tile 0 )[ tile 1 )[ unused  )

A step of this kind runs padded whether it is captured or not: both give the same bits. Unused rows
are stored nowhere and no other row sees them; their results are anything.
"""

from bisect import bisect_left
from collections.abc import Generator
from contextlib import contextmanager

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
from pilotlight.engine.cuda.trials import prompt_trial_fields

LENGTHS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Rows of such steps."""
MAX_BLOCKS = 1 << 14
"""Entries of its block table; beyond, a prompt runs as any other batch."""
_CHUNK = ("chunk_rows", "chunk_starts", "chunk_counts", "chunk_first_blocks")


def length_for(rows: int) -> int | None:
    """The least length that holds a prompt of so many rows; None: it is none of these steps."""
    return LENGTHS[bisect_left(LENGTHS, rows)] if 1 < rows <= LENGTHS[-1] else None


def prompt_length(batch: Batch) -> int | None:
    """The least length that holds a batch of one short segment whose logits are wanted; None for
    any other batch.
    """
    first, *others = batch.segments
    return None if others or not first.wants_logits else length_for(first.count)


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
        fields["tile_rows"] = np.concatenate(
            (fields["tile_rows"], _TILE_ROWS[len(fields["tile_rows"]) :])
        )
        if token_ids is not None:
            fields["token_ids"] = token_ids
        return self.static.send(fields, ("slots",))

    @contextmanager
    def trial(self, rows: int, vocab_size: int) -> Generator[None]:
        """Within it, the words are those of a trial; afterwards they are what they were.

        The trial writes the cache's first block.
        """
        before = self.static.words.clone()
        fields = prompt_trial_fields(rows, vocab_size)
        self.static.send({**fields, "tile_rows": _TILE_ROWS}, ("slots",))
        try:
            yield
        finally:
            self.static.words.copy_(before)

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


_TILE_ROWS = np.arange(_tiles(LENGTHS[-1]), dtype=np.int32) * QUERIES_AT_ONCE
"""Of the longest step. Tiles that begin behind the segment's rows end at once."""
