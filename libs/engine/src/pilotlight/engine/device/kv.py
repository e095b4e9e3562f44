"""The KV cache of a layer range, and attention over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.device.memory import StageMemory
from pilotlight.policy.types import Stage


@dataclass(frozen=True, slots=True)
class _Span:
    """One segment's rows in the batch, and those of its keys in the cache that some row of it sees.

    ::

        positions   0 ....... first ....... start ....... stop
                              [ keys ..................... )
                                            [ rows ....... )
    """

    rows: slice
    first: int
    stop: int
    side_by_side: slice | None
    """Slots of its keys, if its blocks lie side by side: a view instead of a copy."""
    blocks: Tensor | None
    """[num_blocks], otherwise."""
    mask: Tensor | None
    """[count, stop - first], True where a row may look; None for a single row and for a whole prompt, which is plain causal."""


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
    sliding_spans: tuple[_Span, ...]
    """For layers with a sliding window."""


def index_of(batch: Batch, window_tokens: int | None) -> BatchIndex:
    """Turns a batch's segments into tensors. ``window_tokens`` is that of the model's sliding layers, None if it has none."""
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[_Span] = []
    sliding_spans: list[_Span] = []
    for segment in batch.segments:
        first_row = len(positions)
        positions.extend(range(segment.start, segment.stop))
        slots.extend(_slot(segment, position) for position in range(segment.start, segment.stop))
        if segment.wants_logits:
            logit_rows.append(len(positions) - 1)
        rows = slice(first_row, len(positions))
        spans.append(_span_of(segment, rows, segment.stop))
        if window_tokens is not None:
            inside = segment.stop <= window_tokens
            sliding_spans.append(spans[-1] if inside else _span_of(segment, rows, window_tokens))
    rows_of_logits = torch.tensor(logit_rows, dtype=torch.long)
    return BatchIndex(torch.tensor(positions), torch.tensor(slots), rows_of_logits, tuple(spans), tuple(sliding_spans))


def _slot(segment: Segment, position: int) -> int:
    return segment.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


def _span_of(segment: Segment, rows: slice, window_tokens: int) -> _Span:
    first = max(0, segment.start + 1 - window_tokens)
    used = segment.blocks[first // BLOCK_TOKENS : blocks_for(segment.stop)]
    first_slot = _slot(segment, first)
    is_row = used == tuple(range(used[0], used[0] + len(used)))
    mask = None
    if segment.count > 1 and (segment.start > 0 or segment.stop > window_tokens):
        seen = torch.ones(segment.count, segment.stop - first, dtype=torch.bool).tril(diagonal=segment.start - first)
        mask = seen.triu(diagonal=segment.start - first + 1 - window_tokens)
    return _Span(
        rows=rows,
        first=first,
        stop=segment.stop,
        side_by_side=slice(first_slot, first_slot + segment.stop - first) if is_row else None,
        blocks=None if is_row else torch.tensor(used),
        mask=mask,
    )


class KvCache:
    """Keys and values of a stage's layers. Which request has which blocks is ``core.blocks``' business.

    ::

        each layer  keys    [num_blocks * BLOCK_TOKENS, num_kv_heads, head_dim]
                    values  the same

    Layers with a sliding window keep what they see no longer, too: all layers of a request have the same blocks.
    """

    def __init__(self, memory: StageMemory, num_blocks: int) -> None:
        """Takes memory for so many blocks.

        Raises:
            NoRoom: the device has no such memory.
        """
        spec = memory.decoder.spec
        self._memory = memory
        self._sliding_layers = frozenset(spec.sliding_layers)
        self._scale = spec.attention_scale
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of each layer. Not cleared: nothing reads a slot before its request has written it."""
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Grows or shrinks to so many blocks, in place: what lies in those that stay is as it was.

        Raises:
            NoRoom: the device has no such memory; nothing has changed then.
        """
        self._memory.resize(num_blocks)
        stage = self._memory.stage
        self._rows = {layer: self._memory.keys_and_values(layer) for layer in range(stage.start, stage.stop)}

    def move(self, moves: Mapping[int, int]) -> None:
        """Copies blocks to others, in all layers. None is both a source and a target."""
        sources, targets = torch.tensor(list(moves.keys())), torch.tensor(list(moves.values()))
        for rows in self._rows.values():
            for half in rows:
                blocks = half.unflatten(0, (-1, BLOCK_TOKENS))
                blocks[targets] = blocks[sources]

    def read(self, layers: Stage, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """A copy of one request's keys and values of positions [start, stop): [num_layers, 2, stop - start, num_kv_heads, head_dim]."""
        slots = _slots(blocks, start, stop)
        layer_rows = [torch.stack([half[slots] for half in self._rows[layer]]) for layer in range(layers.start, layers.stop)]
        return torch.stack(layer_rows)

    def write(self, layers: Stage, blocks: Sequence[int], start: int, keys_and_values: Tensor) -> None:
        """Stores what ``read`` gave of the same layers, for the positions from ``start`` on."""
        slots = _slots(blocks, start, start + keys_and_values.shape[2])
        for layer, rows in zip(range(layers.start, layers.stop), keys_and_values, strict=True):
            for half, new in zip(self._rows[layer], rows, strict=True):
                half[slots] = new

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
        stored_keys, stored_values = self._rows[layer]
        stored_keys[index.slots] = keys
        stored_values[index.slots] = values
        attended = torch.empty_like(queries)
        for span in index.sliding_spans if layer in self._sliding_layers else index.spans:
            seen_keys, seen_values = _read(stored_keys, span), _read(stored_values, span)
            attended[span.rows] = _attend(span, queries[span.rows], seen_keys, seen_values, self._scale)
        return attended.flatten(1)


def _slots(blocks: Sequence[int], start: int, stop: int) -> Tensor:
    """Where positions [start, stop) of a request with these blocks lie."""
    positions = torch.arange(start, stop)
    return torch.tensor(blocks)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS


def _read(stored: Tensor, span: _Span) -> Tensor:
    """A span's rows of a layer's keys or values. [slots, num_kv_heads, head_dim] -> [stop - first, num_kv_heads, head_dim]."""
    if span.side_by_side is not None:
        return stored[span.side_by_side]
    gathered = stored.unflatten(0, (-1, BLOCK_TOKENS))[span.blocks].flatten(0, 1)
    skipped = span.first % BLOCK_TOKENS
    return gathered[skipped : skipped + span.stop - span.first]


def _attend(span: _Span, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Attention of one request. [count, num_heads, head_dim] over [stop - first, num_kv_heads, head_dim] -> the first."""
    count, num_heads, head_dim = queries.shape
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, num_kv_heads, stop - first, head_dim]
    if count == 1:
        # The heads that share keys become rows of queries: no key is repeated, which is most of a decode step's time otherwise.
        grouped = queries.view(1, keys.shape[1], -1, head_dim)
        attended = functional.scaled_dot_product_attention(grouped, keys, values, scale=scale)
        return attended.reshape(1, num_heads, head_dim)
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=span.mask,
        is_causal=span.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
