"""Attention of single rows over the paged cache: split among programs, and put together by the last
one that is done.

::

    row 0   [ split 0 ....... )[ split 1 ....... )[ split 2 )    a row's keys in KV splits, each a program for each key-value head
    row 1   [ split 3 .. )                                       one split: no partial results at all

The splits are made on the host (``cuda.attention_metadata``), so that one long row is shared among
many programs and the number of programs does not depend on lengths: the same launch serves a
captured graph. Partial results are added up in the order of the splits, whichever program comes
last: the result does not depend on that.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.cuda.attention_metadata import MAX_ROW_SPLITS, KvSplits, Place, RowMetadata
from pilotlight.engine.cuda.kernels.fp8_rows import Quantized, quantize_rows
from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.sizes import power_of_2

MANY_ROWS = 16
"""From this many on, programs are many, and each does best with large tiles."""
NARROW_DIM = 128
"""Heads up to this width fit into the registers of a single warp."""
PRECISION = tl.constexpr("tf32x3")
"""How float32 is multiplied: in three parts by tensor cores, which errs about as much as float32
itself does."""


@triton.jit
def _as(x, dtype):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _turned(
    place, bias, norm, eps, cosines, sines, head, known,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Rows of heads [n, PADDED_DIM] from ``place`` with bias, normed and turned.

    ``head`` [n, 1] counts from the queries' first.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, PADDED_DIM)[None, :]
    fits = dim < HEAD_DIM
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    dtype = place.dtype.element_ty
    x = tl.load(place + head * HEAD_DIM + dim, mask=known & fits, other=0.0).to(tl.float32)
    y = tl.load(place + head * HEAD_DIM + partner, mask=known & fits, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x = _as(
            x + tl.load(bias + head * HEAD_DIM + dim, mask=known & fits, other=0.0).to(tl.float32),
            dtype,
        )
        y = _as(
            y
            + tl.load(bias + head * HEAD_DIM + partner, mask=known & fits, other=0.0).to(
                tl.float32
            ),
            dtype,
        )
    if HAS_NORMS:
        share = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / HEAD_DIM + eps)
        x = _as(
            _as(x * share, dtype) * tl.load(norm + dim, mask=fits, other=0.0).to(tl.float32), dtype
        )
        y = _as(
            _as(y * share, dtype) * tl.load(norm + partner, mask=fits, other=0.0).to(tl.float32),
            dtype,
        )
    pair = tl.where(dim < HALF, dim, dim - HALF)
    cosine = tl.load(cosines + pair, mask=fits, other=0.0).to(tl.float32)
    sine = tl.load(sines + pair, mask=fits, other=0.0).to(tl.float32)
    return _as(_as(x * cosine, dtype) + _as(tl.where(dim < HALF, -y, y) * sine, dtype), dtype)


@triton.jit
def store_heads(heads, out, scales, row, head, dim, known, padded_rows, dtype,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Stores heads [n, PADDED_DIM] of rows, or of one row, rounded to ``dtype``; quantized, with a
    scale of its own for each.

    Args:
        heads: [n, PADDED_DIM], in float32.
        out: [num_rows, NUM_HEADS * HEAD_DIM], where they go.
        scales: [NUM_HEADS, padded_rows], where scales go if they are quantized.
        row: [n, 1], or one for all.
        head: [n, 1], or one for all.
        dim: [1, PADDED_DIM].
        known: [n, 1], which of them there are.
        padded_rows: of ``scales``.
        dtype: of what is stored, before it is quantized.
        NUM_HEADS: of a row.
        HEAD_DIM: of a head.
        QUANTIZED: to float8.
    """
    place = out + row.to(tl.int64) * NUM_HEADS * HEAD_DIM + head * HEAD_DIM + dim
    mask = known & (dim < HEAD_DIM)
    rounded = heads.to(dtype)
    if QUANTIZED:
        values, scale = quantize_rows(rounded.to(tl.float32))
        tl.store(place, values, mask=mask)
        tl.store(scales + head * padded_rows + row, scale[:, None], mask=known)
    else:
        tl.store(place, rounded, mask=mask)


@triton.jit
def _decode_attention(
    queries, bias, query_norm, key_norm, cosines, sines,
    keys, values, out, out_scales, partial, marks, arrived,
    blocks, positions, slots, first_blocks, first_splits, num_splits, split_rows, split_starts, split_stops,
    eps, scale, padded_rows,
    ROW_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, KEYS_AT_ONCE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    MAX_ROW_SPLITS: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(split_rows + split)
    if row < 0:
        return
    start = tl.load(split_starts + split)
    stop = tl.load(split_stops + split)
    position = tl.load(positions + row)
    first_block = tl.load(first_blocks + row)
    splits = tl.load(num_splits + row)
    dtype = keys.dtype.element_ty
    dim = tl.arange(0, PADDED_DIM)[None, :]
    fits = dim < HEAD_DIM
    member = tl.arange(0, PADDED_GROUP)[:, None]
    known = member < GROUP
    head = kv_head * GROUP + member
    row_place = queries + row.to(tl.int64) * ROW_STRIDE
    top = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    mixed = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    HALF: tl.constexpr = HEAD_DIM // 2
    if RAW:
        query = _turned(
            row_place, bias, query_norm, eps, cosines + row * HALF, sines + row * HALF, head, known,
            HEAD_DIM, PADDED_DIM, HAS_BIAS, HAS_NORMS,
        )  # fmt: skip
        if stop > position:
            # This split has the new token: its key and value come from the projection, and this
            # program alone stores them.
            stop = position
            one = tl.full([1, 1], NUM_HEADS, tl.int32) + kv_head
            key = _turned(
                row_place, bias, key_norm, eps, cosines + row * HALF, sines + row * HALF, one, one >= 0,
                HEAD_DIM, PADDED_DIM, HAS_BIAS, HAS_NORMS,
            )  # fmt: skip
            value_place = (one + NUM_KV_HEADS) * HEAD_DIM + dim
            value = tl.load(row_place + value_place, mask=fits, other=0.0).to(tl.float32)
            if HAS_BIAS:
                value = _as(
                    value + tl.load(bias + value_place, mask=fits, other=0.0).to(tl.float32), dtype
                )
            slot = tl.load(slots + row).to(tl.int64)
            stored = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim
            tl.store(keys + stored, key.to(dtype), mask=fits & (slot >= 0))
            tl.store(values + stored, value.to(dtype), mask=fits & (slot >= 0))
            top = tl.sum(query * key, axis=1) * scale
            total += 1.0
            mixed += value
    else:
        query = tl.load(row_place + head * HEAD_DIM + dim, mask=known & fits, other=0.0).to(
            tl.float32
        )
    narrow = query.to(dtype)
    offset = tl.arange(0, KEYS_AT_ONCE)
    for at in range(start, stop, KEYS_AT_ONCE):
        seen = at + offset
        there = seen < stop
        block = tl.load(blocks + first_block + seen // BLOCK_TOKENS, mask=there, other=0).to(
            tl.int64
        )
        base = ((block * BLOCK_TOKENS + seen % BLOCK_TOKENS) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        mask = there[:, None] & fits
        key_tile = tl.load(keys + base[:, None] + dim, mask=mask, other=0.0)
        value_tile = tl.load(values + base[:, None] + dim, mask=mask, other=0.0)
        if PADDED_GROUP == 1:
            scores = tl.sum(key_tile.to(tl.float32) * query, axis=1)[None, :] * scale
        else:
            scores = tl.dot(narrow, tl.trans(key_tile), input_precision=PRECISION) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(top - highest)
        total = total * fade + tl.sum(weights, axis=1)
        if PADDED_GROUP == 1:
            mixed = (
                mixed * fade[:, None]
                + tl.sum(tl.trans(weights) * value_tile.to(tl.float32), axis=0)[None, :]
            )
        else:
            mixed = mixed * fade[:, None] + tl.dot(
                weights.to(dtype), value_tile, input_precision=PRECISION
            )
        top = highest
    if splits == 1:
        store_heads(
            mixed / total[:, None], out, out_scales, row, head, dim, known, padded_rows, dtype,
            NUM_HEADS, HEAD_DIM, QUANTIZED,
        )  # fmt: skip
    else:
        head_row = kv_head * GROUP + tl.arange(0, PADDED_GROUP)
        in_group = tl.arange(0, PADDED_GROUP) < GROUP
        tl.store(partial + (split * NUM_HEADS + head) * HEAD_DIM + dim, mixed, mask=known & fits)
        tl.store(marks + (split * NUM_HEADS + head_row) * 2, top, mask=in_group)
        tl.store(marks + (split * NUM_HEADS + head_row) * 2 + 1, total, mask=in_group)
        first_split = tl.load(first_splits + row)
        tl.debug_barrier()
        before = tl.atomic_add(
            arrived + first_split * NUM_KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu"
        )
        if before == splits - 1:
            tl.store(arrived + first_split * NUM_KV_HEADS + kv_head, 0)
            each = tl.arange(0, MAX_ROW_SPLITS)[:, None]
            place = ((first_split + each) * NUM_HEADS + head_row[None, :]) * 2
            counts = (each < splits) & in_group[None, :]
            tops = tl.load(marks + place, mask=counts, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(marks + place + 1, mask=counts, other=0.0, cache_modifier=".cg")
            highest = tl.max(tops, axis=0)
            highest = tl.where(in_group, highest, 0.0)
            total = tl.sum(tl.exp2(tops - highest[None, :]) * totals, axis=0)
            mixed = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
            for number in range(splits):
                there = (first_split + number) * NUM_HEADS
                fade = tl.exp2(
                    tl.load(
                        marks + (there + head_row) * 2,
                        mask=in_group,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    - highest
                )
                mixed += fade[:, None] * tl.load(
                    partial + (there + head) * HEAD_DIM + dim,
                    mask=known & fits,
                    other=0.0,
                    cache_modifier=".cg",
                )
            store_heads(
                mixed / total[:, None], out, out_scales, row, head, dim, known, padded_rows, dtype,
                NUM_HEADS, HEAD_DIM, QUANTIZED,
            )  # fmt: skip


_run_decode_attention = Kernel(_decode_attention)
LOG2_E = 1.4426950408889634


class DecodeScratch:
    """Partial results of one launch at a time."""

    def __init__(
        self, max_splits: int, num_heads: int, num_kv_heads: int, head_dim: int, place: Place
    ) -> None:
        """Takes the memory.

        Args:
            max_splits: the most KV splits that a launch may have.
            num_heads: of the queries.
            num_kv_heads: of the keys and values.
            head_dim: width of a head.
            place: gives the memory, zeros.
        """
        self.max_splits = max_splits
        self.partial = place((max_splits, num_heads, head_dim), torch.float32)
        self.marks = place((max_splits, num_heads, 2), torch.float32)
        self.arrived = place((max_splits, num_kv_heads), torch.int32)
        """Programs that are done with the row whose first split it is; 0 between launches."""


def decode_attention(
    queries: Tensor,
    stored: tuple[Tensor, Tensor],
    rows: RowMetadata,
    splits: KvSplits,
    scratch: DecodeScratch,
    scale: float,
    out: Tensor | Quantized,
    raw: "RawHeads | None" = None,
) -> None:
    """Attends with rows of the batch, those that splits name, to their requests' keys.

    Args:
        queries: [num_tokens, ...], each row of heads contiguous, rotated; with ``raw``, the whole
            projection of queries, keys and values, of which nothing is turned or stored yet.
        stored: the layer's keys and values, [slots, num_kv_heads, head_dim].
        rows: where the batch's rows stand.
        splits: what is seen by them.
        scratch: of the stage.
        scale: of the scores.
        out: [num_tokens, num_heads * head_dim], written in the rows that splits name; quantized,
            a head has one scale.
        raw: what is to be done to the projection. The new keys and values are stored then, too.
    """
    keys, values = stored
    num_kv_heads, head_dim = keys.shape[1:]
    target, scales = (out.values, out.scales) if isinstance(out, Quantized) else (out, out)
    num_heads = target.shape[1] // head_dim
    group = num_heads // num_kv_heads
    padded_dim = max(16, power_of_2(head_dim))
    tile = _tile(group, splits.firsts.shape[0], padded_dim)
    norms = raw.norms if raw and raw.norms else (queries, queries)
    bias = queries if raw is None or raw.bias is None else raw.bias
    _run_decode_attention(
        (num_kv_heads, splits.rows.shape[0]),
        (
            queries, bias, *norms, *(raw.turns if raw else (queries, queries)),
            keys, values, target, scales, scratch.partial, scratch.marks, scratch.arrived,
            rows.blocks, rows.positions, rows.slots, rows.first_blocks,
            splits.firsts, splits.counts, splits.rows, splits.starts, splits.stops,
            raw.eps if raw else 0.0, scale * LOG2_E, scales.shape[1],
        ),
        (
            queries.stride(0), num_heads, num_kv_heads, head_dim, padded_dim, group, tile.padded_group,
            tile.keys, BLOCK_TOKENS, MAX_ROW_SPLITS, raw is not None, bias is not queries, norms[0] is not queries,
            isinstance(out, Quantized),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip


class _Tile(NamedTuple):
    """How a program goes through its split."""

    padded_group: int
    """1: without tensor cores."""
    keys: int
    """At once."""
    warps: int
    stages: int


def _tile(group: int, num_rows: int, padded_dim: int) -> _Tile:
    """Measured on an H200 up to ``NARROW_DIM``, with rows of 161 to 8,192 keys:
    docs/benchmarks.md.
    """
    padded_group = max(16, power_of_2(group))
    if padded_dim > NARROW_DIM:
        # Not measured: half as many keys are as many bytes as 64 of 128, and four warps hold a tile
        # in their registers.
        return _Tile(1 if num_rows < MANY_ROWS and group == 1 else padded_group, 32, 4, 2)
    if num_rows < MANY_ROWS and group == 1:
        return _Tile(1, 64, 2, 3)
    if num_rows < MANY_ROWS:
        return _Tile(padded_group, 32, 1, 2)
    return _Tile(padded_group, 64, 4, 2)


class RawHeads:
    """What is to be done to a projection of queries, keys and values before they are used."""

    __slots__ = ("bias", "eps", "norms", "turns")

    def __init__(
        self,
        bias: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        turns: tuple[Tensor, Tensor],
    ) -> None:
        self.bias = bias
        """Of the projection."""
        self.norms = norms
        """Weights of the queries' and of the keys' norm."""
        self.eps = eps
        self.turns = turns
        """Cosines and sines of each row."""
