"""The KV cache of a layer range, and attention over it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.errors import NoRoom
from pilotlight.policy.types import Dtype, ModelSpec, Stage


@dataclass(frozen=True, slots=True)
class _Span:
    """One segment's rows in the batch and its keys in the cache."""

    rows: slice
    stop: int
    """Keys that its last query sees."""
    side_by_side: slice | None
    """Slots of its keys, if its blocks lie side by side: a view instead of a copy."""
    blocks: Tensor | None
    """[num_blocks], otherwise."""
    mask: Tensor | None
    """[count, stop], True where a query may look; None for a single query and for a whole prompt, which is plain causal."""


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """Where a batch's rows stand: computed once, used by every layer."""

    positions: Tensor
    """[num_tokens], each within its request."""
    slots: Tensor
    """[num_tokens], where in the cache each row's key and value go."""
    logit_rows: Tensor
    """[number of segments that want logits], their last rows."""
    spans: tuple[_Span, ...]


def index_of(batch: Batch) -> BatchIndex:
    """Turns a batch's segments into tensors."""
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[_Span] = []
    for segment in batch.segments:
        first_row = len(positions)
        positions.extend(range(segment.start, segment.stop))
        slots.extend(_slot(segment, position) for position in range(segment.start, segment.stop))
        if segment.wants_logits:
            logit_rows.append(len(positions) - 1)
        spans.append(_span_of(segment, slice(first_row, len(positions))))
    return BatchIndex(torch.tensor(positions), torch.tensor(slots), torch.tensor(logit_rows, dtype=torch.long), tuple(spans))


def _slot(segment: Segment, position: int) -> int:
    return segment.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


def _span_of(segment: Segment, rows: slice) -> _Span:
    used = segment.blocks[: blocks_for(segment.stop)]
    first_slot = used[0] * BLOCK_TOKENS
    is_row = used == tuple(range(used[0], used[0] + len(used)))
    mask = None
    if segment.count > 1 and segment.start > 0:
        mask = torch.ones(segment.count, segment.stop, dtype=torch.bool).tril(diagonal=segment.start)
    return _Span(
        rows=rows,
        stop=segment.stop,
        side_by_side=slice(first_slot, first_slot + segment.stop) if is_row else None,
        blocks=None if is_row else torch.tensor(used),
        mask=mask,
    )


class KvCache:
    """Keys and values of a stage's layers. Which request has which blocks is ``core.blocks``' business.

    ::

        store  [num_layers of the stage, 2 (keys, values), num_blocks * BLOCK_TOKENS, num_kv_heads, head_dim]
    """

    def __init__(self, spec: ModelSpec, stage: Stage, dtype: Dtype, num_blocks: int) -> None:
        self._first_layer = stage.start
        shape = (stage.num_layers, 2, num_blocks * BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        try:
            # Not cleared: nothing reads a slot before its request has written it.
            self._store = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        except RuntimeError as error:  # torch has no narrower one for the CPU
            raise NoRoom(f"the device refuses {num_blocks} KV blocks: {error}") from error

    def attend(self, layer: int, index: BatchIndex, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Stores a batch's keys and values, then attends with each request's queries to that request's keys.

        Args:
            layer: the model's layer number.
            index: where the batch's rows stand.
            queries: [num_tokens, num_heads, head_dim], rotated.
            keys: [num_tokens, num_kv_heads, head_dim], rotated.
            values: [num_tokens, num_kv_heads, head_dim].

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        stored_keys, stored_values = self._store[layer - self._first_layer]
        stored_keys[index.slots] = keys
        stored_values[index.slots] = values
        attended = torch.empty_like(queries)
        for span in index.spans:
            attended[span.rows] = _attend(span, queries[span.rows], _read(stored_keys, span), _read(stored_values, span))
        return attended.flatten(1)


def _read(stored: Tensor, span: _Span) -> Tensor:
    """A request's rows of a layer's keys or values. [slots, num_kv_heads, head_dim] -> [stop, num_kv_heads, head_dim]."""
    if span.side_by_side is not None:
        return stored[span.side_by_side]
    return stored.unflatten(0, (-1, BLOCK_TOKENS))[span.blocks].flatten(0, 1)[: span.stop]


def _attend(span: _Span, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one request. [count, num_heads, head_dim] over [stop, num_kv_heads, head_dim] -> the first."""
    count, num_heads, head_dim = queries.shape
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, num_kv_heads, stop, head_dim]
    if count == 1:
        # The heads that share keys become rows of queries: no key is repeated, which is most of a decode step's time otherwise.
        grouped = queries.view(1, keys.shape[1], -1, head_dim)
        return functional.scaled_dot_product_attention(grouped, keys, values).reshape(1, num_heads, head_dim)
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys, values, attn_mask=span.mask, is_causal=span.mask is None, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
