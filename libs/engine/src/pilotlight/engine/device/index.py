"""Where a batch's rows stand in the KV cache: computed once, used by every layer."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for

SPAN_STEP = 32
"""Rows of a span, and its keys, are made up to a multiple of this where they are bfloat16: on a CPU
with AMX torch compiles kernels for every number of rows and of keys that it meets, and keeps them
for good."""
LONG_TOKENS = 1024
"""A single row that sees more than this, in blocks side by side, is attended to in place: a copy of
its keys would cost more than a call of its own."""


@dataclass(frozen=True, slots=True)
class Span:
    """One segment's rows in the batch, and those of its keys in the cache that some row of it sees.

    ::

        positions   0 ....... first ....... start ....... stop
                              [ keys ..................... )
                                            [ rows ....... )
    """

    rows: slice
    slots: slice | Tensor
    """Of its keys: a slice, if its blocks lie side by side; else [stop - first]."""
    mask: Tensor | None
    """[count + more_rows, stop - first + more_keys], True where a row may look; None for a single
    row and for a whole prompt, which is plain causal."""
    more_rows: int = 0
    """What is added to the rows, and left out of what comes of them (``SPAN_STEP``)."""
    more_keys: int = 0
    """What is added to the keys. No row looks at it."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Single rows of different requests that see about as many keys, padded to ``width``, which
    depends on no other row.

    A row's padding is its own first key again, masked: what other requests or earlier owners left
    in the cache, which need not be a number, is never touched.
    """

    rows: Tensor
    """[num_rows], in the batch."""
    width: int
    slots: Tensor
    """[num_rows * width], of their keys."""
    mask: Tensor
    """[num_rows, 1, 1, width], added to the scores: 0 where the row may look, -inf elsewhere."""


@dataclass(frozen=True, slots=True)
class View:
    """How the layers of one kind see the cache: each row of the batch is in one span or among one
    group of peers.
    """

    spans: tuple[Span, ...]
    peers: tuple[Peers, ...]


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """What every layer needs."""

    positions: Tensor
    """[num_tokens], each within its request."""
    slots: Tensor
    """[num_tokens], where in the cache each row's key and value go."""
    logit_rows: Tensor
    """[number of segments that want logits], their last rows."""
    full: View
    sliding: View
    """For layers with a sliding window."""


def index_of(batch: Batch, window_tokens: int | None, dtype: torch.dtype) -> BatchIndex:
    """Turns a batch's segments into tensors.

    Args:
        batch: what runs.
        window_tokens: that of the model's sliding layers, None if it has none.
        dtype: of its queries.
    """
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for segment in batch.segments:
        positions.extend(range(segment.start, segment.stop))
        slots.extend(_slot(segment, position) for position in range(segment.start, segment.stop))
        if segment.wants_logits:
            logit_rows.append(len(positions) - 1)
    full = _view_of(batch, None, dtype)
    narrow = window_tokens is not None and any(
        segment.stop > window_tokens for segment in batch.segments
    )
    return BatchIndex(
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        logit_rows=torch.tensor(logit_rows, dtype=torch.long),
        full=full,
        sliding=_view_of(batch, window_tokens, dtype) if narrow else full,
    )


def slots_of(blocks: Sequence[int], start: int, stop: int) -> Tensor:
    """Where positions [start, stop) of a request with these blocks lie. [stop - start]."""
    positions = torch.arange(start, stop)
    return torch.tensor(blocks)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS


def _slot(segment: Segment, position: int) -> int:
    return segment.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


def _view_of(batch: Batch, window_tokens: int | None, dtype: torch.dtype) -> View:
    spans: list[Span] = []
    peers: defaultdict[int, list[tuple[int, Segment, int]]] = defaultdict(list)
    row = 0
    for segment in batch.segments:
        first = max(0, segment.start + 1 - (window_tokens or segment.stop))
        seen = segment.stop - first
        if segment.count == 1 and (seen <= LONG_TOKENS or not _side_by_side(segment, first)):
            peers[_width_of(seen)].append((row, segment, first))
        else:
            spans.append(
                _span_of(
                    segment,
                    slice(row, row + segment.count),
                    first,
                    window_tokens or segment.stop,
                    dtype,
                )
            )
        row += segment.count
    return View(
        tuple(spans), tuple(_peers_of(width, group, dtype) for width, group in peers.items())
    )


def _width_of(seen: int) -> int:
    """Keys of a row, padded to the next power of two of blocks."""
    return BLOCK_TOKENS << (blocks_for(seen) - 1).bit_length()


def _side_by_side(segment: Segment, first: int) -> bool:
    used = segment.blocks[first // BLOCK_TOKENS : blocks_for(segment.stop)]
    return used == tuple(range(used[0], used[0] + len(used)))


def _span_of(
    segment: Segment, rows: slice, first: int, window_tokens: int, dtype: torch.dtype
) -> Span:
    keys = segment.stop - first
    step = SPAN_STEP if dtype is torch.bfloat16 and segment.count > 1 else 1
    more_rows, more_keys = -segment.count % step, -keys % step
    mask = None
    if segment.count > 1 and (segment.start > 0 or segment.stop > window_tokens):
        seen = torch.ones(segment.count, keys, dtype=torch.bool).tril(
            diagonal=segment.start - first
        )
        seen = seen.triu(diagonal=segment.start - first + 1 - window_tokens)
        mask = functional.pad(seen, (0, more_keys, 0, more_rows))
        mask[segment.count :, 0] = True
    first_slot = _slot(segment, first)
    in_place = _side_by_side(segment, first)
    slots = (
        slice(first_slot, first_slot + keys)
        if in_place
        else slots_of(segment.blocks, first, segment.stop)
    )
    return Span(rows=rows, slots=slots, mask=mask, more_rows=more_rows, more_keys=more_keys)


def _peers_of(width: int, group: list[tuple[int, Segment, int]], dtype: torch.dtype) -> Peers:
    slots = torch.empty(len(group), width, dtype=torch.long)
    mask = torch.full((len(group), 1, 1, width), float("-inf"), dtype=dtype)
    for number, (_, segment, first) in enumerate(group):
        seen = segment.stop - first
        slots[number, :seen] = slots_of(segment.blocks, first, segment.stop)
        slots[number, seen:] = slots[number, 0]
        mask[number, ..., :seen] = 0
    return Peers(
        rows=torch.tensor([row for row, _, _ in group]),
        width=width,
        slots=slots.flatten(),
        mask=mask,
    )
