"""Attention metadata: what a step's kernels read of the batch.

32-bit words, made on the host and sent in one copy.

::

    words   [ positions )[ slots )[ first blocks )[ ... )[ KV splits ... )[ chunks ... )[ block tables one after the other )
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.core.blocks import BLOCK_TOKENS

MAX_ROW_SPLITS = 64
"""Splits of one row at most."""
KEYS_OF_SPLIT = 64
"""Keys of a split are a multiple of this."""
EVEN_KEYS = 512
"""Rows are not cut into less than this only to be as long as others."""
QUERIES_AT_ONCE = 128
"""Rows of a tile of a chunk."""
NOWHERE = -1
ALIGN_WORDS = 4
"""A field begins at a multiple of 16 bytes, which kernels are compiled for."""

Words = npt.NDArray[np.int32]

Place = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Gives memory for a tensor of a shape, zeros."""


def zeros_on(device: torch.device) -> Place:
    """Gives memory of torch's own."""
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """Where a batch's rows are in their requests and in the cache, on the device. All int32."""

    positions: Tensor
    """[rows]: position of each within its request."""
    slots: Tensor
    """[rows]: where in the cache its key and value go; negative: nowhere."""
    first_blocks: Tensor
    """[rows]: where in ``blocks`` its request's block table begins."""
    blocks: Tensor
    """[...]: block tables one after the other."""


@dataclass(frozen=True, slots=True)
class KvSplits:
    """Which keys the single rows of a batch see, split among programs; on the device, all int32."""

    firsts: Tensor
    """[rows]: a row's first split."""
    counts: Tensor
    """[rows]: how many it has."""
    rows: Tensor
    """[splits]: the row of each; negative where a split is not used."""
    starts: Tensor
    """[splits]: position of the first key."""
    stops: Tensor
    """[splits]: the position behind the last one."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Segments of more than one row, and their tiles, on the device. All int32."""

    rows: Tensor
    """[segments]: first row of each in the batch."""
    starts: Tensor
    """[segments]: position of that row."""
    counts: Tensor
    """[segments]: how many rows."""
    first_blocks: Tensor
    """[segments]: where in ``blocks`` the block table begins."""
    tile_segments: Tensor
    """[tiles]: the segment of each."""
    tile_rows: Tensor
    """[tiles]: its first row within the segment."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A batch as the attention kernels see it."""

    rows: RowMetadata
    splits: KvSplits | None
    """Of the single rows, in layers that see everything; None without single rows."""
    sliding_splits: KvSplits | None
    """The same in layers with a window."""
    chunks: Chunks | None
    whole: slice | None
    """The batch's last rows, if they are a whole prompt, from its first token on, that is long
    enough for a kernel that knows nothing of blocks."""
    logit_rows: Tensor | None
    """[segments that want logits] int32, their last rows; None: every row is one."""

    @property
    def plain(self) -> bool:
        """Single rows only."""
        return self.chunks is None and self.whole is None


def max_splits(num_rows: int, spare: int) -> int:
    """The most splits that rows are cut into, see ``split_keys``."""
    return num_rows + max(spare, num_rows)


class RowSplits(NamedTuple):
    """Rows' keys, cut into splits. The splits of a row follow each other."""

    counts: Words
    """Splits of each row."""
    firsts: Words
    """The first split of each row."""
    rows: Words
    """The row of each split."""
    starts: Words
    """Position of each split's first key."""
    stops: Words
    """The position behind its last one."""


def split_keys(starts: Words, stops: Words, spare: int) -> RowSplits:
    """Cuts rows' keys into splits: enough of them to keep a device busy, and none much longer than
    the rows are on average.

    A program's time follows its split's length. The longest rows' splits come first, so that the
    last programs to start are short ones.

    Args:
        starts: position of each row's first key.
        stops: the position behind its last one; every row has a key.
        spare: splits that there may be beyond one for each row, only to keep the device busy.
    """
    lengths = stops - starts
    longest, together = int(lengths.max()), int(lengths.sum())
    busy, even = -(-together // max(spare, 1)), max(-(-together // len(lengths)), EVEN_KEYS)
    size = max(min(busy, even), -(-longest // MAX_ROW_SPLITS))
    size = -(-size // KEYS_OF_SPLIT) * KEYS_OF_SPLIT
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    counts = -(-lengths // size)
    ordered = counts[order]
    ends = np.cumsum(ordered, dtype=np.int32)
    firsts = np.empty_like(counts)
    firsts[order] = ends - ordered
    rows = np.repeat(order, ordered)
    numbers = np.arange(len(rows), dtype=np.int32) - firsts[rows]
    split_starts = starts[rows] + numbers * size
    return RowSplits(
        counts, firsts, rows, split_starts, np.minimum(split_starts + size, stops[rows])
    )


def fields_of(
    batch: Batch, spare: int, window_tokens: int | None, whole_from: int | None = None
) -> dict[str, Words]:
    """Every field of a batch's words, by name; those of splits and chunks only where there are any.

    Args:
        batch: what runs.
        spare: see ``split_keys``.
        window_tokens: of the model's sliding layers; None if it has none.
        whole_from: a whole prompt of at least this many tokens is no chunk; see ``whole_prompt``.
    """
    segments = batch.segments
    tables = [segment.blocks for segment in segments]
    counts = np.fromiter((segment.count for segment in segments), np.int32, len(segments))
    starts = np.fromiter((segment.start for segment in segments), np.int32, len(segments))
    lengths = np.fromiter(map(len, tables), np.int32, len(tables))
    blocks = np.fromiter(chain.from_iterable(tables), np.int32, int(lengths.sum()))
    segment_blocks = np.cumsum(lengths, dtype=np.int32) - lengths
    segment_rows = np.cumsum(counts, dtype=np.int32) - counts
    owners = np.repeat(np.arange(len(segments), dtype=np.int32), counts)
    positions = starts[owners] + np.arange(len(owners), dtype=np.int32) - segment_rows[owners]
    first_blocks = segment_blocks[owners]
    wanting = np.fromiter((segment.wants_logits for segment in segments), np.bool_, len(segments))
    fields = {
        "positions": positions,
        "slots": blocks[first_blocks + positions // BLOCK_TOKENS] * BLOCK_TOKENS
        + positions % BLOCK_TOKENS,
        "first_blocks": first_blocks,
        "logit_rows": (segment_rows + counts - 1)[wanting],
        "blocks": blocks,
    }
    chunked = len(segments) - (whole_prompt(batch, whole_from) is not None)
    single, many = np.flatnonzero(counts == 1), np.flatnonzero(counts[:chunked] > 1)
    if len(single):
        rows, stops = segment_rows[single], starts[single] + 1
        fields |= _splits("full", rows, np.zeros_like(stops), stops, len(owners), spare)
        if window_tokens is not None:
            fields |= _splits(
                "sliding", rows, np.maximum(stops - window_tokens, 0), stops, len(owners), spare
            )
    if len(many):
        tiles = -(-counts[many] // QUERIES_AT_ONCE)
        tile_segments = np.repeat(np.arange(len(many), dtype=np.int32), tiles)
        tile_rows = (
            np.arange(len(tile_segments), dtype=np.int32)
            - np.repeat(np.cumsum(tiles) - tiles, tiles)
        ) * QUERIES_AT_ONCE
        # The tiles that see most go first: the last programs to start are then short ones.
        order = np.argsort(-(starts[many][tile_segments] + tile_rows), kind="stable")
        fields |= {
            "chunk_rows": segment_rows[many],
            "chunk_starts": starts[many],
            "chunk_counts": counts[many],
            "chunk_first_blocks": segment_blocks[many],
            "tile_segments": tile_segments[order],
            "tile_rows": tile_rows[order].astype(np.int32),
        }
    return fields


def whole_prompt(batch: Batch, whole_from: int | None) -> slice | None:
    """Rows of the batch's last segment, if it begins its request and has at least ``whole_from``
    rows.
    """
    last = batch.segments[-1]
    if whole_from is None or last.start > 0 or last.count < whole_from:
        return None
    return slice(batch.num_tokens - last.count, batch.num_tokens)


def _splits(
    kind: str, rows: Words, starts: Words, stops: Words, num_rows: int, spare: int
) -> dict[str, Words]:
    counts, firsts, numbers, split_starts, split_stops = split_keys(starts, stops, spare)
    firsts_of_rows, counts_of_rows = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    firsts_of_rows[rows], counts_of_rows[rows] = firsts, counts
    return {
        f"{kind}_firsts": firsts_of_rows,
        f"{kind}_counts": counts_of_rows,
        f"{kind}_rows": rows[numbers],
        f"{kind}_starts": split_starts,
        f"{kind}_stops": split_stops,
    }


def send(
    fields: Mapping[str, Words], device: torch.device, whole: slice | None = None
) -> AttentionMetadata:
    """Copies a batch's fields to a device, in memory of their own, without waiting for it."""
    sizes = [len(field) for field in fields.values()]
    aligned = [-(-size // ALIGN_WORDS) * ALIGN_WORDS for size in sizes]
    words = torch.empty(sum(aligned), dtype=torch.int32, pin_memory=device.type == "cuda")
    places = words.numpy()
    offset = 0
    for field, size in zip(fields.values(), aligned, strict=True):
        places[offset : offset + len(field)] = field
        offset += size
    there = words.to(device, non_blocking=True).split(aligned)
    return metadata_of(
        {name: place[:size] for name, place, size in zip(fields, there, sizes, strict=True)}, whole
    )


def metadata_of(views: Mapping[str, Tensor], whole: slice | None = None) -> AttentionMetadata:
    """The kernels' view of fields by their names."""
    rows = RowMetadata(views["positions"], views["slots"], views["first_blocks"], views["blocks"])
    splits = _splits_of(views, "full")
    chunks = None
    if "tile_rows" in views:
        names = (
            "chunk_rows",
            "chunk_starts",
            "chunk_counts",
            "chunk_first_blocks",
            "tile_segments",
            "tile_rows",
        )
        chunks = Chunks(*(views[name] for name in names))
    return AttentionMetadata(
        rows, splits, _splits_of(views, "sliding") or splits, chunks, whole, views.get("logit_rows")
    )


def _splits_of(views: Mapping[str, Tensor], kind: str) -> KvSplits | None:
    if f"{kind}_rows" not in views:
        return None
    return KvSplits(
        *(views[f"{kind}_{name}"] for name in ("firsts", "counts", "rows", "starts", "stops"))
    )
