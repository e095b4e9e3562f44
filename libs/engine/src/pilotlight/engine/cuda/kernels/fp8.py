"""Products of several rows with fp8 weights: rows are quantized by the kernel that stands before,
tensor cores multiply fp8 with fp8, scales are applied in float32.

::

    residual, x ─ add_norm ─────┐                          ┌─> rows
    gates, ups ── silu_mul ─────┼─> Quantized ─ product ───┤
    rows ──────── quantize ─────┘                          └─> Parts, of a sum that is cut up ─> add_norm

Sums are promoted to float32 after every ``SCALE_BLOCK`` columns: tensor cores keep fewer bits of a
sum of fp8 products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from pilotlight.engine.cuda.kernels.fp8_rows import (
    Quantized,
    run_add_norm,
    run_quantize,
    run_silu_mul,
)
from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.parts import Parts, parts_of
from pilotlight.engine.cuda.kernels.sizes import pieces_of, power_of_2
from pilotlight.policy.model import SCALE_BLOCK

HOPPER = 9
FEW_TOKENS, FEW_TOKENS_OF_PARTS = 64, 192
"""Beyond, cuBLAS multiplies where it can, but for shapes that have a measured tiling: a product
that may be cut into parts of its width is slower there for longer."""
TOKENS = (16, 32, 64)
"""Rows are made up to one of these, or to a multiple of the last; what stands there means
nothing."""


class GemmTiling(NamedTuple):
    """How a product is cut up: rows of the weight in a program, parts of its width, warps, loads
    under way, tokens in a program.
    """

    rows: int
    splits: int
    warps: int
    stages: int
    tokens: int = TOKENS[-1]
    """No more than there are."""


Tilings = Mapping[tuple[int, int, int], GemmTiling]
"""Measured ones, by rows of the weight, width, and tokens with those that make them up."""


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def padded_tokens(rows: int) -> int:
    """How many tokens there are with those that make them up."""
    return next((size for size in TOKENS if rows <= size), pieces_of(rows, TOKENS[-1]) * TOKENS[-1])


@triton.jit
def _product(
    weight, x, weight_scales, x_scales, out,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_BLOCK: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, TOKENS_AT_ONCE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # The tokens of one tile of the weight follow each other: it is read once from memory.
    tokens = tl.num_programs(0) * TOKENS_AT_ONCE
    token = (tl.program_id(0) * TOKENS_AT_ONCE + tl.arange(0, TOKENS_AT_ONCE)).to(tl.int64)
    tile = tl.program_id(1) // SPLITS
    split = tl.program_id(1) % SPLITS
    row = tile * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    known_row = row < ROWS
    column = tl.arange(0, BLOCK)
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    sums = tl.zeros([ROWS_AT_ONCE, TOKENS_AT_ONCE], tl.float32)
    first = split * EACH
    stop = min(first + EACH, STEPS)
    weight_scales_at = weight_scales + tile * ROWS_AT_ONCE // BLOCK * STEPS
    x_scale = tl.zeros([TOKENS_AT_ONCE], tl.float32)
    weight_scale = 0.0
    if BY_BLOCK:
        x_scale = tl.load(x_scales + first * tokens + token)
        weight_scale = tl.load(weight_scales_at + first)
    for step in range(first, stop):
        at = step * BLOCK + column
        weights_at = weight + row[:, None] * WIDTH + at[None, :]
        x_at = x + token[None, :] * WIDTH + at[:, None]
        if WIDTH % BLOCK == 0 and ROWS % ROWS_AT_ONCE == 0:
            weights = tl.load(weights_at)
            columns = tl.load(x_at)
        else:
            known = at < WIDTH
            weights = tl.load(weights_at, mask=known_row[:, None] & known[None, :], other=0.0)
            columns = tl.load(x_at, mask=known[:, None], other=0.0)
        if BY_BLOCK:
            # The next step's scales are on their way while this one's are used.
            scale = x_scale * weight_scale
            following = min(step + 1, STEPS - 1)
            x_scale = tl.load(x_scales + following * tokens + token)
            weight_scale = tl.load(weight_scales_at + following)
            sums += tl.dot(weights, columns) * scale[None, :]
        else:
            sums += tl.dot(weights, columns)
    if not BY_BLOCK:
        by_row = tl.load(weight_scales + row, mask=known_row, other=0.0)
        sums = sums * by_row[:, None] * tl.load(x_scales + token)[None, :]
    place = out + split * tokens * ROWS + token[None, :] * ROWS + row[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=known_row[:, None])


_run_product = Kernel(_product)


@dataclass(frozen=True, slots=True)
class Fp8Kernels:
    """Kernels for one kind of scales: by block, or by row of the weight and by token."""

    by_block: bool
    tilings: Tilings

    def add_norm(
        self, residual: Tensor, x: Tensor | Parts | None, weight: Tensor, eps: float
    ) -> Quantized:
        """As ``elementwise.add_norm``, quantized.

        Args:
            residual: [num_tokens, hidden], changed in place.
            x: what is added, [num_tokens, hidden]; None: nothing.
            weight: of the norm, [hidden].
            eps: of the norm.
        """
        rows, hidden = residual.shape
        made, padded = self._made(residual, hidden), power_of_2(hidden)
        added, count, stride = parts_of(x, residual)
        run_add_norm(
            (rows, 1),
            (
                residual,
                added,
                weight,
                made.values,
                made.scales,
                eps,
                made.values.shape[0],
            ),
            (hidden, padded, self._group, count, stride),
            warps=min(16, max(4, padded // 512)),
        )
        return made

    def silu_mul(self, gates_ups: Tensor) -> Quantized:
        """As ``elementwise.silu_mul``, quantized.

        [num_tokens, 2 * width] -> [num_tokens, width].
        """
        width = gates_ups.shape[1] // 2
        made = self._made(gates_ups, width)
        self._by_row(run_silu_mul, gates_ups, made, width)
        return made

    def quantize(self, x: Tensor) -> Quantized:
        """Rows as they are, quantized: [num_tokens, width] -> the same."""
        made = self._made(x, x.shape[1])
        self._by_row(run_quantize, x, made, x.shape[1])
        return made

    def product(
        self, x: Quantized, weight: Tensor, scales: Tensor, dtype: torch.dtype, *, divisible: bool
    ) -> Tensor | Parts:
        """Multiplies.

        Args:
            x: rows, as wide as the weight.
            weight: [rows, width] in fp8.
            scales: of the weight, by block or by row, float32.
            dtype: of the result.
            divisible: the result may come as parts.

        Returns:
            [num_tokens, rows].
        """
        padded, (rows, width) = x.values.shape[0], weight.shape
        tiling = self.tilings.get((rows, width, padded))
        if tiling is None:
            few = FEW_TOKENS_OF_PARTS if divisible else FEW_TOKENS
            if padded > few and self._in_library(weight, dtype):
                return self._library_product(x, weight, scales, dtype)
            tiling = usual_tiling(rows, width, padded)
        splits = tiling.splits if divisible else 1
        tokens = min(tiling.tokens, padded)
        out = torch.empty(
            splits, padded, rows, dtype=torch.float32 if splits > 1 else dtype, device=weight.device
        )
        _run_product(
            (padded // tokens, pieces_of(rows, tiling.rows) * splits),
            (weight, x.values, scales, x.scales, out),
            (rows, width, SCALE_BLOCK, self.by_block, tiling.rows, tokens, splits),
            warps=tiling.warps,
            stages=tiling.stages,
            variant=(out.dtype,),
        )
        return Parts(out, x.rows) if splits > 1 else out[0, : x.rows]

    def _in_library(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether cuBLAS has the product, on this device and for this shape."""
        rows, width = weight.shape
        step = 4 * SCALE_BLOCK if self.by_block else 16
        fits = rows % 16 == 0 and width % step == 0 and dtype is torch.bfloat16
        return fits and _is_hopper(weight.device)

    def _library_product(
        self, x: Quantized, weight: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        by_token, by_weight = (
            (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
            if self.by_block
            else (ScalingType.RowWise, ScalingType.RowWise)
        )
        product = scaled_mm(
            x.values,
            weight.t(),
            x.scales.t(),
            by_token,
            scales.t(),
            by_weight,
            output_dtype=dtype,
        )
        return product[: x.rows]

    @property
    def _group(self) -> int:
        return SCALE_BLOCK if self.by_block else 0

    def room_for_heads(self, like: Tensor, width: int, head_dim: int) -> Tensor | Quantized:
        """What attention writes its heads to: quantized, where a head has scales of its own.

        Args:
            like: [num_tokens, ...].
            width: of all heads.
            head_dim: of one.
        """
        if self.by_block and head_dim == SCALE_BLOCK:
            return self._made(like, width)
        return like.new_empty(like.shape[0], width)

    def _made(self, like: Tensor, width: int) -> Quantized:
        rows = like.shape[0]
        padded = padded_tokens(rows)
        return Quantized(
            torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=like.device),
            torch.empty(
                width // SCALE_BLOCK if self.by_block else 1,
                padded,
                dtype=torch.float32,
                device=like.device,
            ),
            rows,
        )

    def _by_row(self, kernel: Kernel, x: Tensor, made: Quantized, width: int) -> None:
        padded = power_of_2(width)
        if self.by_block:
            padded = min(1024, padded)
        kernel(
            (made.rows, pieces_of(width, padded)),
            (x, made.values, made.scales, made.values.shape[0]),
            (width, padded, self._group),
            warps=min(16, max(4, padded // 512)),
        )


def usual_tiling(rows: int, width: int, tokens: int) -> GemmTiling:
    """What does well for most shapes: parts until there are two programs for each multiprocessor,
    more loads under way where there are fewer.
    """
    splits, tiles = 1, pieces_of(rows, 64) * pieces_of(tokens, TOKENS[-1])
    while tiles * splits < PROGRAMS and width // splits > SPLIT_COLUMNS:
        splits *= 2
    return GemmTiling(64, splits, 4, 5 if tiles * 2 < PROGRAMS else 4)


PROGRAMS = 256
"""About twice the multiprocessors of a large device."""
SPLIT_COLUMNS = 1024
"""A program has as many at least."""
