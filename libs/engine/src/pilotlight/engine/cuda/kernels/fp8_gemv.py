"""GEMV with weights in fp8: they are widened in registers and scaled there.

The row stays as it is, and its norm is applied to the sum, float32 both: this rounds less than a
product of many rows, which quantizes them (``kernels.fp8``).
"""

import triton
import triton.language as tl

from pilotlight.engine.cuda.kernels.launching import Kernel


@triton.jit
def _fp8_gemv(
    weight, x, norm, bias, residual, out, scales, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    BY_BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)).to(tl.int64)
    known_row = row < ROWS
    dtype = out.dtype.element_ty
    # A step has whole blocks, [blocks, block]: one scale is read for each.
    EVEN: tl.constexpr = ROWS % ROWS_AT_ONCE == 0 and WIDTH % COLUMNS_AT_ONCE == 0
    BLOCKS: tl.constexpr = COLUMNS_AT_ONCE // BLOCK
    STRIDE: tl.constexpr = WIDTH // BLOCK
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # All rows of a program are in one row of blocks.
    scales_at = scales + tl.program_id(0) * ROWS_AT_ONCE // BLOCK * STRIDE + block
    up_scales_at = scales_at + ROWS // BLOCK * STRIDE
    sums = tl.zeros([ROWS_AT_ONCE, BLOCKS, BLOCK], tl.float32)
    up_sums = tl.zeros([ROWS_AT_ONCE, BLOCKS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCKS, BLOCK], tl.float32)
    for first in tl.range(0, WIDTH, COLUMNS_AT_ONCE, num_stages=STAGES):
        at = first + column
        known = at < WIDTH
        place = weight + row[:, None, None] * WIDTH + at[None, :, :]
        up_place = place + ROWS * WIDTH
        if EVEN:
            tile = tl.load(place, eviction_policy="evict_first")
            part = tl.load(x + at).to(tl.float32)
        else:
            mask = known_row[:, None, None] & known[None, :, :]
            tile = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
            part = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
        if GATED and EVEN:
            up_tile = tl.load(up_place, eviction_policy="evict_first")
        elif GATED:
            mask = known_row[:, None, None] & known[None, :, :]
            up_tile = tl.load(up_place, mask=mask, other=0.0, eviction_policy="evict_first")
        if NORMED:
            squares += part * part
            part *= tl.load(norm + at, mask=known, other=0.0).to(tl.float32)
        up_part = part
        if BY_BLOCK:
            known_block = first // BLOCK + block < STRIDE
            scale = tl.load(scales_at + first // BLOCK, mask=known_block, other=0.0)
            part = part * scale[:, None]
            if GATED:
                scale = tl.load(up_scales_at + first // BLOCK, mask=known_block, other=0.0)
                up_part = up_part * scale[:, None]
        sums += tile.to(tl.float32) * part[None, :, :]
        if GATED:
            up_sums += up_tile.to(tl.float32) * up_part[None, :, :]
    share = 1.0
    if NORMED:
        share = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / WIDTH + eps)
    result = tl.sum(tl.sum(sums, axis=2), axis=1) * share
    if not BY_BLOCK:
        result *= tl.load(scales + row, mask=known_row, other=0.0)
    result = result.to(dtype).to(tl.float32)
    if GATED:
        up = tl.sum(tl.sum(up_sums, axis=2), axis=1) * share
        if not BY_BLOCK:
            up *= tl.load(scales + ROWS + row, mask=known_row, other=0.0)
        up = up.to(dtype).to(tl.float32)
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


run_fp8_gemv = Kernel(_fp8_gemv)
"""Takes what ``gemv`` takes, and scales by block or by row."""
