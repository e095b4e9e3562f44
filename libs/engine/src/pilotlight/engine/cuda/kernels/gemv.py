"""GEMV, the projections of one row: as fast as the weights can be read, with what stands before and
behind them in the same kernel.

A product is summed in float32 in one order per shape, rounded once. What follows (bias, gate,
residual) is rounded as if it were a kernel of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.fp8_gemv import run_fp8_gemv
from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.sizes import pieces_of, power_of_2
from pilotlight.policy.model import SCALE_BLOCK


@triton.jit
def _gemv(
    weight, x, norm, bias, residual, out, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)).to(tl.int64)
    known_row = row < ROWS
    dtype = weight.dtype.element_ty
    share = 1.0
    if NORMED:
        whole = tl.arange(0, PADDED_WIDTH)
        all_x = tl.load(x + whole, mask=whole < WIDTH, other=0.0).to(tl.float32)
        share = tl.rsqrt(tl.sum(all_x * all_x, axis=0) / WIDTH + eps)
    column = tl.arange(0, COLUMNS_AT_ONCE)
    sums = tl.zeros([ROWS_AT_ONCE, COLUMNS_AT_ONCE], tl.float32)
    up_sums = tl.zeros([ROWS_AT_ONCE, COLUMNS_AT_ONCE], tl.float32)
    for first in range(0, WIDTH, COLUMNS_AT_ONCE):
        at = first + column
        known = at < WIDTH
        mask = known_row[:, None] & known[None, :]
        tile = tl.load(
            weight + row[:, None] * WIDTH + at[None, :],
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        )
        if GATED:
            up_tile = tl.load(
                weight + (row + ROWS)[:, None] * WIDTH + at[None, :],
                mask=mask,
                other=0.0,
                eviction_policy="evict_first",
            )
        part = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
        if NORMED:
            factor = tl.load(norm + at, mask=known, other=0.0).to(tl.float32)
            part = ((part * share).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)
        sums += tile.to(tl.float32) * part[None, :]
        if GATED:
            up_sums += up_tile.to(tl.float32) * part[None, :]
    result = tl.sum(sums, axis=1).to(dtype).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, axis=1).to(dtype).to(tl.float32)
        result = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32) * up
    if BIASED:
        result = (
            (result + tl.load(bias + row, mask=known_row, other=0.0).to(tl.float32))
            .to(dtype)
            .to(tl.float32)
        )
    if ADDED:
        result += tl.load(residual + row, mask=known_row, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(dtype), mask=known_row)


_run_gemv = Kernel(_gemv)


class Tiling(NamedTuple):
    """How a GEMV is cut up: rows of a program, columns of a step, warps; with weights in fp8, steps
    whose loads are under way.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Gemv:
    """``out = act(W norm(x)) + residual`` for one row x; each of norm, gate and residual may be
    missing.
    """

    eps: float
    tilings: Mapping[tuple[int, int, bool], Tiling]
    """Measured ones, by rows of the result, width, and whether it is gated."""

    def __call__(
        self,
        weight: Tensor,
        x: Tensor,
        *,
        norm: Tensor | None = None,
        gated: bool = False,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Multiplies.

        Args:
            weight: [rows, width]; gated, [2 * rows, width], the gates first.
            x: [1, width].
            norm: weight of an RMS norm of x before, [width].
            gated: the result is silu(gates) * ups.
            bias: [rows], added to the product.
            residual: [1, rows], added to the result.
            scales: of a weight in fp8, by its rows or by blocks of ``SCALE_BLOCK``; float32.

        Returns:
            [1, rows].
        """
        rows, width = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        usual = USUAL if scales is None else USUAL_FP8
        tiling = self.tilings.get((rows, width, gated), usual)
        out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
        grid = (pieces_of(rows, tiling.rows), 1)
        tensors = (
            weight, x, x if norm is None else norm, x if bias is None else bias, x if residual is None else residual, out,
        )  # fmt: skip
        steps = (norm is not None, gated, bias is not None, residual is not None)
        if scales is None:
            constants = (
                rows, width, power_of_2(width), tiling.rows, tiling.columns, *steps,
            )  # fmt: skip
            _run_gemv(grid, (*tensors, self.eps), constants, warps=tiling.warps)
        else:
            by_block = scales.shape[0] != weight.shape[0]
            run_fp8_gemv(
                grid,
                (*tensors, scales, self.eps),
                (
                    rows, width, SCALE_BLOCK, tiling.rows, tiling.columns, tiling.stages, *steps,
                    by_block,
                ),
                warps=tiling.warps,
                variant=(x.dtype,),
            )  # fmt: skip
        return out


USUAL = Tiling(4, 512, 4)
USUAL_FP8 = Tiling(8, 512, 2, 3)
"""Do well for most shapes."""
