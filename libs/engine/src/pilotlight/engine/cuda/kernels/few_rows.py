"""Products of few rows: as fast as the weights can be read, where a product for many rows leaves a
fifth of the memory's rate unused.

::

    rows ─ product ─┬─> rows
                    ├─> Parts, of a sum that is cut up ─> add_norm
                    └─> silu(gates) * ups, if gated

Weights are the left side, so that their rows fill tensor cores whose other side has few. A product
is summed in float32 in one order for all row counts of a tiling, and rounded once; what follows is
rounded as if it were a kernel of its own.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.fp8_rows import Parts
from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.sizes import pieces_of


class FewRowsTiling(NamedTuple):
    """How a product is cut up: rows of the weight in a program (of gates, and as many ups), columns
    of a step, parts of its width, warps, loads under way.
    """

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


FewRowsTilings = Mapping[tuple[int, int, int, bool], FewRowsTiling]
"""Measured ones, by rows of the result, width, rows of x at most, and whether it is gated."""


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
    place = out + (split * count + token[None, :]).to(tl.int64) * ROWS + row[:, None]
    tl.store(
        place,
        sums.to(out.dtype.element_ty),
        mask=(row < ROWS)[:, None] & known_token[None, :],
    )


_run = Kernel(_few_rows)


def few_rows(
    weight: Tensor, x: Tensor, tiling: FewRowsTiling, most: int, *, gated: bool = False
) -> Tensor | Parts:
    """Multiplies.

    Args:
        weight: [rows, width]; gated, [2 * rows, width], the gates first.
        x: [num_tokens, width].
        tiling: one without splits, if gated.
        most: as many tokens may there be: 16 or more, a power of two. What is summed in which order
            does not depend on how many there are.
        gated: the result is silu(gates) * ups.

    Returns:
        [num_tokens, rows].
    """
    count, (all_rows, width) = x.shape[0], weight.shape
    rows = all_rows // 2 if gated else all_rows
    splits = tiling.splits
    out = torch.empty(
        splits, count, rows, dtype=torch.float32 if splits > 1 else x.dtype, device=x.device
    )
    _run(
        (pieces_of(rows, tiling.rows) * splits, 1),
        (weight, x, out, count),
        (rows, width, tiling.rows, tiling.columns, most, splits, gated),
        warps=tiling.warps,
        stages=tiling.stages,
        variant=(out.dtype,),
    )
    return Parts(out, count) if splits > 1 else out[0]
