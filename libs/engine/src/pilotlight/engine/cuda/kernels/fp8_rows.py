"""Rows in fp8, and the kernels that quantize what stands before a projection: the norm with the
residual, the gates, or nothing.

What is computed before is rounded as ``elementwise`` does it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.parts import added_up

FP8_MAX = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-10)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows in fp8."""

    values: Tensor
    """[padded rows, width]."""
    scales: Tensor
    """[width / group, padded rows], float32: those of one group side by side, as they are read."""
    rows: int


@triton.jit
def quantize_rows(value):
    """Rows of values in fp8, and a scale of each. [n, width] -> [n, width], [n]."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), SMALLEST) / FP8_MAX
    # What is not a number stays that: it is told of at the end.
    bounded = tl.clamp(value / scale[:, None], -FP8_MAX, FP8_MAX, tl.PropagateNan.ALL)
    return bounded.to(tl.float8e4nv), scale


@triton.jit
def _quantize_groups(value, GROUP: tl.constexpr, PADDED: tl.constexpr):
    """Values by group, [groups, group] in fp8, and the groups' scales."""
    scaled, scale = quantize_rows(tl.reshape(value, [PADDED // GROUP, GROUP]))
    return tl.reshape(scaled, [PADDED]), scale


@triton.jit
def _store_quantized(
    value, values, scales, row, first, padded_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Quantizes columns [first, first + PADDED) of a row and stores them. A group of 0 is the whole
    row.
    """
    column = first + tl.arange(0, PADDED)
    if GROUP == 0:
        scaled, scale = _quantize_groups(value, PADDED, PADDED)
        tl.store(scales + row + tl.arange(0, 1), scale)
    else:
        scaled, scale = _quantize_groups(value, GROUP, PADDED)
        group = first // GROUP + tl.arange(0, PADDED // GROUP)
        tl.store(scales + group * padded_rows + row, scale, mask=group < WIDTH // GROUP)
    tl.store(values + row * WIDTH + column, scaled, mask=column < WIDTH)


@triton.jit
def _add_norm(
    residual, x, weight, values, scales, eps, padded_rows,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    PART_STRIDE: tl.constexpr,
):  # fmt: skip
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
    normed = ((wide * share).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)
    _store_quantized(normed, values, scales, row, 0, padded_rows, HIDDEN, GROUP, PADDED)


run_add_norm = Kernel(_add_norm)


@triton.jit
def _silu_mul(
    gates_ups, values, scales, padded_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PADDED
    column = first + tl.arange(0, PADDED)
    known = column < WIDTH
    gate = tl.load(gates_ups + row * 2 * WIDTH + column, mask=known, other=0.0)
    up = tl.load(gates_ups + row * 2 * WIDTH + WIDTH + column, mask=known, other=0.0).to(tl.float32)
    dtype = gate.dtype
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    opened = (opened * up).to(dtype).to(tl.float32)
    _store_quantized(opened, values, scales, row, first, padded_rows, WIDTH, GROUP, PADDED)


run_silu_mul = Kernel(_silu_mul)


@triton.jit
def _quantize(
    x, values, scales, padded_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PADDED
    column = first + tl.arange(0, PADDED)
    value = tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    _store_quantized(value, values, scales, row, first, padded_rows, WIDTH, GROUP, PADDED)


run_quantize = Kernel(_quantize)
