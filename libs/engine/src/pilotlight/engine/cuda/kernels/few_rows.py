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

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.elementwise import silu_mul
from pilotlight.engine.cuda.kernels.launching import Kernel, shared_bytes
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

    def shared_bytes(self, *, gated: bool) -> int:
        """Of shared memory, what a program holds: its loads."""
        rows = (2 if gated else 1) * self.rows + FEW
        return self.stages * rows * self.columns * 2


MULTIPROCESSORS = 132
"""Of a large device; fewer than half of them busy read too slowly."""
SPLIT_COLUMNS = 512
"""A part has as many at least."""


@cache
def tiling_of(rows: int, width: int, *, gated: bool, divisible: bool) -> FewRowsTiling | None:
    """What did best, or nearly, for each product of four common models on an H200 (``make
    bench-products-gpu``): one program for each multiprocessor with many loads under way, and where
    there is more to do, several for each.

    Args:
        rows: of the result.
        width: of the weight.
        gated: as in ``few_rows``.
        divisible: the result may come as parts.

    Returns:
        None: torch multiplies, for a shape that fills no tiles or too little of a device.
    """
    if width % 128 or rows % 128:
        return None
    tiles = rows // 64
    if gated:
        return FewRowsTiling(64, 64, 1, 4, 4) if 2 * tiles >= MULTIPROCESSORS else None
    if tiles > MULTIPROCESSORS:
        return FewRowsTiling(128, 64, 1, 4, 6 if tiles <= 2 * MULTIPROCESSORS else 3)
    splits = min(MULTIPROCESSORS // tiles, width // SPLIT_COLUMNS) if divisible else 1
    enough = 2 * tiles * splits >= MULTIPROCESSORS
    return FewRowsTiling(64, 128, splits, 4, 5) if enough else None


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


def product(weight: Tensor, x: Tensor) -> Tensor:
    """[num_tokens, width] times [rows, width]: [num_tokens, rows]."""
    tiling = _tiling(weight.shape[0], x)
    if tiling is None:
        return torch.mm(x, weight.t())
    made = few_rows(weight, x, tiling)
    assert isinstance(made, Tensor)
    return made


def divisible_product(weight: Tensor, x: Tensor) -> Tensor | Parts:
    """The same, perhaps in parts."""
    tiling = _tiling(weight.shape[0], x, divisible=True)
    return torch.mm(x, weight.t()) if tiling is None else few_rows(weight, x, tiling)


def gated_product(weight: Tensor, x: Tensor) -> Tensor:
    """silu(gates) * ups: [num_tokens, width] times [2 * rows, width]: [num_tokens, rows]."""
    tiling = _tiling(weight.shape[0] // 2, x, gated=True)
    if tiling is None:
        return silu_mul(torch.mm(x, weight.t()))
    made = few_rows(weight, x, tiling, gated=True)
    assert isinstance(made, Tensor)
    return made


def _tiling(
    rows: int, x: Tensor, *, gated: bool = False, divisible: bool = False
) -> FewRowsTiling | None:
    if not 1 < x.shape[0] <= FEW or x.dtype.itemsize != 2:
        return None
    tiling = tiling_of(rows, x.shape[1], gated=gated, divisible=divisible)
    # A smaller device has no place for as many loads.
    fits = tiling is not None and tiling.shared_bytes(gated=gated) <= shared_bytes()
    return tiling if fits else None
