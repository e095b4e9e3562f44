"""Products of few rows: weights are read nearly as fast as the memory gives them, where what torch
multiplies with leaves a tenth of that unused.

::

    rows ─ product ─┬─> rows
                    ├─> Parts, of a sum that is cut up ─> add_norm
                    └─> silu(gates) * ups, if gated

Weights are the left side, so that their rows fill tensor cores whose other side has few. A product
is summed in float32, in one order however many rows there are, and rounded once; what follows is
rounded as if it were a kernel of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.elementwise import silu_mul
from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.parts import Parts
from pilotlight.engine.cuda.kernels.sizes import pieces_of

FEW = 64
"""More rows are multiplied by torch, which is as fast there."""


class FewRowsTiling(NamedTuple):
    """How a product is cut up: rows of the weight in a program (of gates, and as many of ups),
    columns of a step, parts of its width, warps, loads under way.
    """

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


FewRowsTilings = Mapping[tuple[int, int, bool], FewRowsTiling]
"""Measured ones, by rows of the result, width, and whether it is gated."""


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    weight, x, out, count,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr, TOKENS_AT_ONCE: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    row = (tile * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)).to(tl.int64)
    token = tl.arange(0, TOKENS_AT_ONCE)
    known_token = token < count
    column = tl.arange(0, COLUMNS_AT_ONCE)
    STEPS: tl.constexpr = (WIDTH + COLUMNS_AT_ONCE - 1) // COLUMNS_AT_ONCE
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    sums = tl.zeros([ROWS_AT_ONCE, TOKENS_AT_ONCE], tl.float32)
    ups = tl.zeros([ROWS_AT_ONCE, TOKENS_AT_ONCE], tl.float32)
    first = split * EACH
    for step in range(first, min(first + EACH, STEPS)):
        at = step * COLUMNS_AT_ONCE + column
        weights_at = weight + row[:, None] * WIDTH + at[None, :]
        x_at = x + token[None, :] * WIDTH + at[:, None]
        if WIDTH % COLUMNS_AT_ONCE == 0 and ROWS % ROWS_AT_ONCE == 0:
            weights = tl.load(weights_at)
            columns = tl.load(x_at, mask=known_token[None, :], other=0.0)
        else:
            known = (row < ROWS)[:, None] & (at < WIDTH)[None, :]
            weights = tl.load(weights_at, mask=known, other=0.0)
            columns = tl.load(x_at, mask=known_token[None, :] & (at < WIDTH)[:, None], other=0.0)
        sums = tl.dot(weights, columns, sums)
        if GATED:
            if WIDTH % COLUMNS_AT_ONCE == 0 and ROWS % ROWS_AT_ONCE == 0:
                ups_weights = tl.load(weights_at + ROWS * WIDTH)
            else:
                known = (row < ROWS)[:, None] & (at < WIDTH)[None, :]
                ups_weights = tl.load(weights_at + ROWS * WIDTH, mask=known, other=0.0)
            ups = tl.dot(ups_weights, columns, ups)
    if GATED:
        dtype = out.dtype.element_ty
        gate = sums.to(dtype).to(tl.float32)
        sums = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * ups.to(dtype).to(
            tl.float32
        )
    place = out + (split * TOKENS_AT_ONCE + token[None, :]) * ROWS + row[:, None]
    tl.store(
        place,
        sums.to(out.dtype.element_ty),
        mask=(row < ROWS)[:, None] & known_token[None, :],
    )


_run = Kernel(_few_rows)


def few_rows(
    weight: Tensor, x: Tensor, tiling: FewRowsTiling, *, gated: bool = False
) -> Tensor | Parts:
    """Multiplies.

    Args:
        weight: [rows, width]; gated, [2 * rows, width], the gates first. Of 16 bits: float32 would
            be rounded.
        x: [num_tokens, width], no more than ``FEW``.
        tiling: one without splits, if gated.
        gated: the result is silu(gates) * ups.

    Returns:
        [num_tokens, rows].
    """
    count, (all_rows, width) = x.shape[0], weight.shape
    rows = all_rows // 2 if gated else all_rows
    splits = tiling.splits
    out = torch.empty(
        splits, FEW, rows, dtype=torch.float32 if splits > 1 else x.dtype, device=x.device
    )
    _run(
        (pieces_of(rows, tiling.rows) * splits, 1),
        (weight, x, out, count),
        (rows, width, tiling.rows, tiling.columns, FEW, splits, gated),
        warps=tiling.warps,
        stages=tiling.stages,
        variant=(out.dtype,),
    )
    return Parts(out, count) if splits > 1 else out[0, :count]


@dataclass(frozen=True, slots=True)
class Products:
    """Products of rows, few or many."""

    tilings: FewRowsTilings

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        """[num_tokens, width] times [rows, width]: [num_tokens, rows]."""
        product = self.divisible(weight, x, at_most=1)
        assert isinstance(product, Tensor)
        return product

    def divisible(self, weight: Tensor, x: Tensor, *, at_most: int | None = None) -> Tensor | Parts:
        """The same, perhaps in parts, ``at_most`` so many."""
        tiling = self._tiling(weight.shape[0], x, gated=False)
        if tiling is None or tiling.splits > (at_most or tiling.splits):
            return torch.mm(x, weight.t())
        return few_rows(weight, x, tiling)

    def gated(self, weight: Tensor, x: Tensor) -> Tensor:
        """silu(gates) * ups: [num_tokens, width] times [2 * rows, width]: [num_tokens, rows]."""
        tiling = self._tiling(weight.shape[0] // 2, x, gated=True)
        if tiling is None:
            return silu_mul(torch.mm(x, weight.t()))
        product = few_rows(weight, x, tiling, gated=True)
        assert isinstance(product, Tensor)
        return product

    def _tiling(self, rows: int, x: Tensor, *, gated: bool) -> FewRowsTiling | None:
        few = x.shape[0] <= FEW and x.dtype.itemsize == 2
        return self.tilings.get((rows, x.shape[1], gated)) if few else None
