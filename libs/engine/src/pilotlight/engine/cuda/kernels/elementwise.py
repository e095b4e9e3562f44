"""Kernels over rows: rows taken from a table, rotary tables, norms with the residual, heads turned
and stored, gated activation.

Intermediate results are rounded to the tensors' dtype where transformers rounds them, though they
stay in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.parts import Parts, added_up, parts_of
from pilotlight.engine.cuda.kernels.sizes import pieces_of, power_of_2


@triton.jit
def _rows_at(table, places, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = column < WIDTH
    place = tl.load(places + row).to(tl.int64)
    tl.store(
        out + row * WIDTH + column,
        tl.load(table + place * WIDTH + column, mask=known),
        mask=known,
    )


_run_rows_at = Kernel(_rows_at)


def rows_at(places: Tensor, table: Tensor) -> Tensor:
    """Rows of a table, [rows, width]: what ``torch.nn.functional.embedding`` gives.

    Torch's kernel takes structures of 25 dimensions by value, and what lies behind those in use is
    another in every process: graphs with it cannot be told from graphs that hold an address
    encoded (``policy.graphs.settling``).

    Args:
        places: [rows] int32, each within the table: nothing checks it here.
        table: [all rows, width].
    """
    rows, width = places.shape[0], table.shape[1]
    out = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    block = min(1024, power_of_2(width))
    _run_rows_at((rows, pieces_of(width, block)), (table, places, out), (width, block), warps=4)
    return out


@triton.jit
def _rotations(
    cosines, positions, frequencies, sines, factor, HALF: tl.constexpr, PADDED: tl.constexpr
):
    row = tl.program_id(0)
    pair = tl.arange(0, PADDED)
    known = pair < HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(
        frequencies + pair, mask=known, other=0.0
    )
    dtype = cosines.dtype.element_ty
    tl.store(cosines + row * HALF + pair, (tl.cos(angle) * factor).to(dtype), mask=known)
    tl.store(sines + row * HALF + pair, (tl.sin(angle) * factor).to(dtype), mask=known)


_run_rotations = Kernel(_rotations)


def rotations(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each row's angles, [num_tokens, head_dim / 2] each.

    Args:
        positions: [num_tokens] int32.
        frequencies: [head_dim / 2] float32.
        factor: what both are multiplied with.
        dtype: of the result; angles are float32 whatever it is.
    """
    rows, half = positions.shape[0], frequencies.shape[0]
    cosines = torch.empty(rows, half, dtype=dtype, device=positions.device)
    sines = torch.empty_like(cosines)
    _run_rotations(
        (rows, 1),
        (cosines, positions, frequencies, sines, factor),
        (half, power_of_2(half)),
        warps=1,
    )
    return cosines, sines


@triton.jit
def _add_norm(
    residual,
    x,
    weight,
    normed,
    eps,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PART_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    known = column < HIDDEN
    value = tl.load(residual + row * HIDDEN + column, mask=known, other=0.0)
    dtype = value.dtype
    wide = value.to(tl.float32)
    if PARTS > 0:
        added = added_up(x, row * HIDDEN + column, known, PARTS, PART_STRIDE)
        wide = (wide + added.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(residual + row * HIDDEN + column, wide.to(dtype), mask=known)
    share = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    factor = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    tl.store(
        normed + row * HIDDEN + column,
        ((wide * share).to(dtype).to(tl.float32) * factor).to(dtype),
        mask=known,
    )


_run_add_norm = Kernel(_add_norm)


def add_norm(residual: Tensor, x: Tensor | Parts | None, weight: Tensor, eps: float) -> Tensor:
    """Adds to the residual, and gives the RMS norm of the sum, [num_tokens, hidden].

    Args:
        residual: [num_tokens, hidden], changed in place.
        x: what is added, [num_tokens, hidden], all parts of no more rows; None: nothing.
        weight: of the norm, [hidden].
        eps: of the norm.
    """
    rows, hidden = residual.shape
    normed = torch.empty_like(residual)
    padded = power_of_2(hidden)
    warps = min(16, max(4, padded // 512))
    added, parts, stride = parts_of(x, residual)
    _run_add_norm(
        (rows, 1),
        (residual, added, weight, normed, eps),
        (hidden, padded, parts, stride),
        warps=warps,
        variant=(added.dtype,),
    )
    return normed


@triton.jit
def _silu_mul(gates_ups, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = column < WIDTH
    gate = tl.load(gates_ups + row * 2 * WIDTH + column, mask=known, other=0.0)
    up = tl.load(gates_ups + row * 2 * WIDTH + WIDTH + column, mask=known, other=0.0).to(tl.float32)
    dtype = gate.dtype
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (opened * up).to(dtype), mask=known)


_run_silu_mul = Kernel(_silu_mul)


def silu_mul(gates_ups: Tensor) -> Tensor:
    """silu(gates) * ups: [num_tokens, 2 * width] -> [num_tokens, width]."""
    rows, width = gates_ups.shape[0], gates_ups.shape[1] // 2
    out = torch.empty(rows, width, dtype=gates_ups.dtype, device=gates_ups.device)
    block = min(1024, power_of_2(width))
    _run_silu_mul((rows, pieces_of(width, block)), (gates_ups, out), (width, block), warps=4)
    return out


@triton.jit
def _as(x, dtype):
    """Rounded to ``dtype`` and wide again."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _turn_and_store(
    qkv, bias, query_norm, key_norm, cosines, sines, slots, keys, values, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HALF: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    # A thread has both halves of its dimensions: what another one has to read is never overwritten.
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    pair = tl.arange(0, PADDED_HALF)[None, :]
    known = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (pair < HALF)
    dtype = qkv.dtype.element_ty
    place = qkv + row * WIDTH + head * HEAD_DIM + pair
    first = tl.load(place, mask=known, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=known, other=0.0).to(tl.float32)
    if HAS_BIAS:
        first = _as(
            first + tl.load(bias + head * HEAD_DIM + pair, mask=known, other=0.0).to(tl.float32),
            dtype,
        )
        second = _as(
            second
            + tl.load(bias + head * HEAD_DIM + HALF + pair, mask=known, other=0.0).to(tl.float32),
            dtype,
        )
    turns = head < NUM_HEADS + NUM_KV_HEADS
    x = first
    y = second
    if HAS_NORMS:
        share = tl.rsqrt(
            (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1))[:, None] / HEAD_DIM
            + eps
        )
        is_query = head < NUM_HEADS
        fits = pair < HALF
        query_first = tl.load(query_norm + pair, mask=fits, other=0.0).to(tl.float32)
        query_second = tl.load(query_norm + HALF + pair, mask=fits, other=0.0).to(tl.float32)
        key_first = tl.load(key_norm + pair, mask=fits, other=0.0).to(tl.float32)
        key_second = tl.load(key_norm + HALF + pair, mask=fits, other=0.0).to(tl.float32)
        x = _as(_as(first * share, dtype) * tl.where(is_query, query_first, key_first), dtype)
        y = _as(_as(second * share, dtype) * tl.where(is_query, query_second, key_second), dtype)
    cosine = tl.load(cosines + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    turned_first = _as(x * cosine, dtype) + _as(-y * sine, dtype)
    turned_second = _as(y * cosine, dtype) + _as(x * sine, dtype)
    first = tl.where(turns, turned_first, first).to(dtype)
    second = tl.where(turns, turned_second, second).to(dtype)
    tl.store(place, first, mask=known)
    tl.store(place + HALF, second, mask=known)
    slot = tl.load(slots + row).to(tl.int64)
    stored = slot * NUM_KV_HEADS * HEAD_DIM + pair
    is_key = known & (head >= NUM_HEADS) & turns & (slot >= 0)
    key_place = keys + stored + (head - NUM_HEADS) * HEAD_DIM
    tl.store(key_place, first, mask=is_key)
    tl.store(key_place + HALF, second, mask=is_key)
    is_value = known & (head >= NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
    value_place = values + stored + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    tl.store(value_place, first, mask=is_value)
    tl.store(value_place + HALF, second, mask=is_value)


_run_turn_and_store = Kernel(_turn_and_store)


def turn_and_store(
    qkv: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turns: tuple[Tensor, Tensor],
    slots: Tensor,
    stored: tuple[Tensor, Tensor],
    num_heads: int,
) -> None:
    """Adds the bias, norms queries and keys, turns them, in place, and stores keys and values in
    the cache.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], changed in place.
        bias: of the projection, [as wide].
        norms: weights of the queries' and of the keys' norm, [head_dim] each.
        eps: of the norms.
        turns: cosines and sines, see ``rotations``.
        slots: [num_tokens] int32, where keys and values go; negative: nowhere.
        stored: the layer's keys and values, [slots, num_kv_heads, head_dim].
        num_heads: of the queries.
    """
    keys, values = stored
    num_kv_heads, head_dim = keys.shape[1:]
    heads = num_heads + 2 * num_kv_heads
    at_once = min(8, power_of_2(heads))
    query_norm, key_norm = norms or (qkv, qkv)
    half = power_of_2(head_dim // 2)
    _run_turn_and_store(
        (qkv.shape[0], pieces_of(heads, at_once)),
        (
            qkv,
            qkv if bias is None else bias,
            query_norm,
            key_norm,
            *turns,
            slots,
            keys,
            values,
            eps,
        ),
        (num_heads, num_kv_heads, head_dim, half, at_once, bias is not None, norms is not None),
        warps=4,
    )


@triton.jit
def _store(
    new_keys, new_values, slots, keys, values,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    column = tl.arange(0, PADDED)
    known = (column < WIDTH) & (slot >= 0)
    tl.store(
        keys + slot * WIDTH + column,
        tl.load(new_keys + row * KEY_STRIDE + column, mask=known),
        mask=known,
    )
    tl.store(
        values + slot * WIDTH + column,
        tl.load(new_values + row * VALUE_STRIDE + column, mask=known),
        mask=known,
    )


_run_store = Kernel(_store)


def store(
    new_keys: Tensor, new_values: Tensor, slots: Tensor, stored: tuple[Tensor, Tensor]
) -> None:
    """Stores rows of keys and values at their slots.

    Args:
        new_keys: [num_tokens, num_kv_heads, head_dim], each row contiguous.
        new_values: [num_tokens, num_kv_heads, head_dim], each row contiguous.
        slots: [num_tokens] int32, where they go; negative: nowhere.
        stored: the layer's keys and values, [slots, num_kv_heads, head_dim].
    """
    keys, values = stored
    width = keys.shape[1] * keys.shape[2]
    padded = power_of_2(width)
    constants = (new_keys.stride(0), new_values.stride(0), width, padded)
    _run_store((slots.shape[0], 1), (new_keys, new_values, slots, keys, values), constants, warps=4)
