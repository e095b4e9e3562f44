"""Attention of chunks of prompts over the paged cache, many requests in one launch, without padding
between them.

A program has a tile of one request's queries and one head. Keys that all rows of the tile see need
no mask; those on the diagonal, and all of them where a window slides, do. The host cuts segments
into tiles of ``QUERIES_AT_ONCE`` rows; a program may have a part of one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.cuda.attention_metadata import QUERIES_AT_ONCE, Chunks, RowMetadata
from pilotlight.engine.cuda.kernels.decode_attention import LOG2_E, PRECISION, store_heads
from pilotlight.engine.cuda.kernels.fp8_rows import Quantized
from pilotlight.engine.cuda.kernels.launching import Kernel, shared_bytes
from pilotlight.engine.cuda.kernels.sizes import power_of_2

MANY_ROWS = 1024
"""From this many on, fewer warps for each tile do better; and of one prompt, larger tiles."""
LONG_TILE_BYTES = 164_864
"""Of shared memory, what a tile of 128 queries by 128 keys of 128 holds, with three stages."""
NARROW_DIM = 128
"""Wider heads need smaller tiles: what a program holds grows with them."""


@triton.jit
def _some_keys(
    query, top, total, mixed, at, until, seen_from, seen_to,
    keys, values, blocks, kv_head, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS_AT_ONCE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Goes on with keys [at, until).

    With MASKED, row i sees those in [seen_from[i], seen_to[i]); without, all are seen by all.
    """
    dim = tl.arange(0, PADDED_DIM)
    fits = dim < HEAD_DIM
    offset = tl.arange(0, KEYS_AT_ONCE)
    for first in range(at, until, KEYS_AT_ONCE):
        position = first + offset
        if MASKED:
            there = position < until
            block = tl.load(blocks + position // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)
        else:
            block = tl.load(blocks + position // BLOCK_TOKENS).to(tl.int64)
        base = (
            (block * BLOCK_TOKENS + position % BLOCK_TOKENS) * NUM_KV_HEADS + kv_head
        ) * HEAD_DIM
        if MASKED:
            key = tl.load(
                keys + base[None, :] + dim[:, None], mask=there[None, :] & fits[:, None], other=0.0
            )
        elif HEAD_DIM == PADDED_DIM:
            key = tl.load(keys + base[None, :] + dim[:, None])
        else:
            key = tl.load(keys + base[None, :] + dim[:, None], mask=fits[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION)
        if MASKED:
            visible = (position[None, :] >= seen_from[:, None]) & (
                position[None, :] < seen_to[:, None]
            )
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1) * scale)
        # A row may see none of these keys.
        ground = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
        weights = tl.exp2(scores * scale - ground[:, None])
        fade = tl.exp2(top - ground)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None]
        if MASKED:
            value = tl.load(
                values + base[:, None] + dim[None, :],
                mask=there[:, None] & fits[None, :],
                other=0.0,
            )
        elif HEAD_DIM == PADDED_DIM:
            value = tl.load(values + base[:, None] + dim[None, :])
        else:
            value = tl.load(values + base[:, None] + dim[None, :], mask=fits[None, :], other=0.0)
        mixed = tl.dot(weights.to(value.dtype), value, mixed, input_precision=PRECISION)
        top = highest
    return top, total, mixed


@triton.jit
def _prefill_attention(
    queries, keys, values, out, out_scales,
    rows, starts, counts, first_blocks, tile_segments, tile_rows, blocks, scale, padded_rows,
    ROW_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr, QUERIES_AT_ONCE: tl.constexpr, KEYS_AT_ONCE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1) // PARTS
    segment = tl.load(tile_segments + tile)
    first = tl.load(tile_rows + tile) + tl.program_id(1) % PARTS * QUERIES_AT_ONCE
    row = tl.load(rows + segment)
    start = tl.load(starts + segment)
    count = tl.load(counts + segment)
    if first >= count:
        return  # a tile of a padded step, or a part of the segment's last tile
    own_blocks = blocks + tl.load(first_blocks + segment)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    inner = first + tl.arange(0, QUERIES_AT_ONCE)
    dim = tl.arange(0, PADDED_DIM)
    mask = (inner < count)[:, None] & (dim < HEAD_DIM)[None, :]
    place = (row + inner).to(tl.int64)[:, None]
    query = tl.load(
        queries + place * ROW_STRIDE + head * HEAD_DIM + dim[None, :], mask=mask, other=0.0
    )
    position = start + inner
    stop = start + tl.minimum(first + QUERIES_AT_ONCE, count)
    seen_to = position + 1
    top = tl.full([QUERIES_AT_ONCE], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES_AT_ONCE], tl.float32)
    mixed = tl.zeros([QUERIES_AT_ONCE, PADDED_DIM], tl.float32)
    if WINDOW > 0:
        seen_from = tl.maximum(position - WINDOW + 1, 0)
        at = tl.maximum(start + first - WINDOW + 1, 0) // KEYS_AT_ONCE * KEYS_AT_ONCE
    else:
        seen_from = tl.zeros([QUERIES_AT_ONCE], tl.int32)
        at = (start + first + 1) // KEYS_AT_ONCE * KEYS_AT_ONCE
        top, total, mixed = _some_keys(
            query, top, total, mixed, 0, at, seen_from, seen_to, keys, values, own_blocks, kv_head, scale,
            NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS_AT_ONCE, BLOCK_TOKENS, False,
        )  # fmt: skip
    top, total, mixed = _some_keys(
        query, top, total, mixed, at, stop, seen_from, seen_to, keys, values, own_blocks, kv_head, scale,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS_AT_ONCE, BLOCK_TOKENS, True,
    )  # fmt: skip
    store_heads(
        mixed / total[:, None], out, out_scales, place, head, dim[None, :], (inner < count)[:, None],
        padded_rows, queries.dtype.element_ty, NUM_HEADS, HEAD_DIM, QUANTIZED,
    )  # fmt: skip


PREFILL = Kernel(_prefill_attention)


class PrefillTile(NamedTuple):
    """How a program goes through its keys."""

    queries: int
    """At once; ``QUERIES_AT_ONCE`` is a multiple of it."""
    keys: int
    """At once; a power of two, 32 at least: with 16, 8 warps and float32, triton 3.6 makes code
    that reads beyond its memory."""
    warps: int
    stages: int


def prefill_tile(
    padded_dim: int, dtype: torch.dtype, num_rows: int, num_segments: int = 1
) -> PrefillTile:
    """What does best for a batch.

    Measured on an H200. Beyond ``NARROW_DIM``, 8 warps: a thread has 255 registers, of which a tile
    of 128 rows of 256 takes 128 for its sums with 8 warps, and all with 4, which spills (0.30 ms
    for a prompt that takes 0.12 with 8). float32 is kept twice, for it is multiplied in parts: a
    tile of 128 rows has no place in the 227 KiB of shared memory. For heads of 128, long pieces do
    best with as many keys at once as there is room for (1,360 behind 1,360: 0.156 ms for 0.175),
    short prompts with tiles that they nearly fill (64 of 161: 0.169 ms for 0.250).

    Args:
        padded_dim: of its heads.
        dtype: of queries, keys and values.
        num_rows: all of its rows.
        num_segments: prompts, or pieces of them, that they are of.
    """
    wide = dtype == torch.float32
    if padded_dim > NARROW_DIM:
        return PrefillTile(64, 32, 8, 1) if wide else PrefillTile(128, 64, 8, 3)
    if wide:
        return PrefillTile(QUERIES_AT_ONCE, 32, 8, 1)
    if padded_dim == NARROW_DIM:
        long = num_rows >= MANY_ROWS * num_segments
        if not long:
            return PrefillTile(64, 32, 4, 2)
        if shared_bytes() >= LONG_TILE_BYTES:
            return PrefillTile(QUERIES_AT_ONCE, 128, 8, 3)
    return PrefillTile(QUERIES_AT_ONCE, 64, 4 if num_rows >= MANY_ROWS else 8, 3)


def prefill_attention(
    queries: Tensor,
    stored: tuple[Tensor, Tensor],
    rows: RowMetadata,
    chunks: Chunks,
    scale: float,
    out: Tensor | Quantized,
    window: int | None = None,
    tile: PrefillTile | None = None,
) -> None:
    """Attends with the rows of segments to their requests' keys, the new ones among them, which are
    in the cache already.

    Args:
        queries: [num_tokens, ...], each row of heads contiguous, rotated.
        stored: the layer's keys and values, [slots, num_kv_heads, head_dim].
        rows: where the batch's rows stand.
        chunks: the segments.
        scale: of the scores.
        out: [num_tokens, num_heads * head_dim], written in the segments' rows; quantized, a head
            has one scale.
        window: tokens that a row sees, its own among them; None: all before it.
        tile: another than ``prefill_tile`` chooses.
    """
    keys, values = stored
    num_kv_heads, head_dim = keys.shape[1:]
    target, scales = (out.values, out.scales) if isinstance(out, Quantized) else (out, out)
    num_heads = target.shape[1] // head_dim
    padded_dim = max(16, power_of_2(head_dim))
    tile = tile or prefill_tile(padded_dim, queries.dtype, queries.shape[0], chunks.rows.shape[0])
    parts = QUERIES_AT_ONCE // tile.queries
    PREFILL(
        (num_heads, chunks.tile_rows.shape[0] * parts),
        (
            queries, keys, values, target, scales,
            chunks.rows, chunks.starts, chunks.counts, chunks.first_blocks, chunks.tile_segments, chunks.tile_rows, rows.blocks,
            scale * LOG2_E, scales.shape[1],
        ),
        (
            queries.stride(0), window or 0, num_heads, num_kv_heads, head_dim, padded_dim,
            parts, tile.queries, tile.keys, BLOCK_TOKENS, isinstance(out, Quantized),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip
