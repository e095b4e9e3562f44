"""Products of few rows with weights in fp8 on one GPU, by how they are cut up: ``make
bench-products-fp8-gpu``.

As ``products_gpu.py``, whose shapes these are: each product of a decode step with the small kernel
that follows, replayed as a graph over as many copies of its weights as no cache holds. Beside each
is the tiling that the engine takes today, and the product in bfloat16 with its own. One line of
JSON for each product, the fastest tilings first.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from products_gpu import (
    COPIES_BYTES,
    EPS,
    MULTIPROCESSORS,
    SHAPES,
    SHARED_BYTES,
    SHOWN,
    UNDER_WAY_BYTES,
    Product,
    failures,
    timed_us,
)
from torch import Tensor
from triton.errors import TritonError

from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.few_rows import divisible_product, gated_product
from pilotlight.engine.cuda.kernels.few_rows import product as plain_product
from pilotlight.engine.cuda.kernels.fp8 import Fp8Kernels, GemmTiling, Tilings, padded_tokens
from pilotlight.engine.cuda.kernels.fp8_rows import Quantized
from pilotlight.engine.cuda.kernels.parts import Parts
from pilotlight.engine.cuda.kernels.sizes import pieces_of
from pilotlight.engine.cuda.tilings import BLOCK_GEMM_TILINGS, ROW_GEMM_TILINGS
from pilotlight.policy.model import SCALE_BLOCK

SCALES = {"block": BLOCK_GEMM_TILINGS, "row": ROW_GEMM_TILINGS}
DTYPE = torch.bfloat16


def tilings(one: Product, tokens: int) -> Iterator[GemmTiling]:
    """What has a place on a device and keeps it busy."""
    for rows, parts, warps, stages, at_once in product(
        (64, 128),
        (1, 2, 3, 4, 6, 8) if one.divisible else (1,),
        (4, 8),
        (3, 4, 5, 6, 8),
        sorted({min(size, padded_tokens(tokens)) for size in (32, 64)}),
    ):
        stage_bytes = SCALE_BLOCK * (rows + at_once)
        programs = pieces_of(one.weight_rows, rows) * parts * (padded_tokens(tokens) // at_once)
        both = min(SHARED_BYTES // (stages * stage_bytes), pieces_of(programs, MULTIPROCESSORS))
        if (
            stages * stage_bytes <= SHARED_BYTES
            and both * (stages - 1) * stage_bytes >= UNDER_WAY_BYTES
            and programs >= MULTIPROCESSORS // 2
            and one.width // SCALE_BLOCK >= parts * 4
        ):
            yield GemmTiling(rows, parts, warps, stages, at_once)


class Operands:
    """Weights and rows of one product, at random."""

    def __init__(self, one: Product, tokens: int, scales: str, copies: int) -> None:
        self._one, self._scales = one, scales
        device, rows, width = torch.device("cuda", 0), one.weight_rows, one.width
        self.weights = [
            torch.randn(rows, width, device=device, dtype=DTYPE).to(torch.float8_e4m3fn)
            for _ in range(copies)
        ]
        by_block = scales == "block"
        shape = (pieces_of(rows, SCALE_BLOCK), pieces_of(width, SCALE_BLOCK))
        self._weight_scales = torch.full(shape if by_block else (rows,), 0.02, device=device)
        self.plain = torch.randn(tokens, width, device=device, dtype=DTYPE)
        self.rows: Quantized = self.kernels({}).quantize(self.plain)
        self._residual = torch.zeros(tokens, one.rows, device=device, dtype=DTYPE)
        self._norm = torch.ones(one.rows, device=device, dtype=DTYPE)

    def kernels(self, chosen: Tilings) -> Fp8Kernels:
        """The engine's, by other tilings."""
        return Fp8Kernels(self._scales == "block", chosen)

    def multiply(self, kernels: Fp8Kernels, weight: Tensor) -> Tensor | Parts:
        """The product alone."""
        return kernels.product(
            self.rows, weight, self._weight_scales, DTYPE, divisible=self._one.divisible
        )

    def step(self, kernels: Fp8Kernels, weight: Tensor) -> None:
        """With what follows: gates are opened, or the norm adds parts up; both quantize."""
        made = self.multiply(kernels, weight)
        if self._one.gated:
            assert isinstance(made, Tensor)
            kernels.silu_mul(made)
        elif self._one.divisible:
            kernels.add_norm(self._residual, made, self._norm, EPS)

    def plain_step(self, weight: Tensor) -> None:
        """The same in bfloat16."""
        if self._one.gated:
            gated_product(weight, self.plain)
        elif self._one.divisible:
            made = divisible_product(weight, self.plain)
            elementwise.add_norm(self._residual, made, self._norm, EPS)
        else:
            plain_product(weight, self.plain)


def chosen(one: Product, tokens: int, tiling: GemmTiling) -> Tilings:
    """Tilings that have one for this product."""
    return {(one.weight_rows, one.width, padded_tokens(tokens)): tiling}


def compiled(one: Product, tokens: int, scales: str, tiling: GemmTiling) -> str:
    """Has a kernel in triton's cache; what went wrong, or nothing."""
    try:
        operands = Operands(one, tokens, scales, copies=1)
        operands.multiply(operands.kernels(chosen(one, tokens, tiling)), operands.weights[0])
        torch.cuda.synchronize()
    except (RuntimeError, TritonError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def measured(one: Product, tokens: int, scales: str, found: Sequence[GemmTiling]) -> dict[str, Any]:
    """One line."""
    weight_bytes = one.weight_rows * one.width
    operands = Operands(one, tokens, scales, max(2, pieces_of(COPIES_BYTES, weight_bytes)))

    def us(kernels: Fp8Kernels) -> float:
        return timed_us(partial(operands.step, kernels), operands.weights)

    today_us = us(operands.kernels(SCALES[scales]))
    rates = sorted((us(operands.kernels(chosen(one, tokens, each))), each) for each in found)
    copies = [
        torch.randn(one.weight_rows, one.width, device=operands.plain.device, dtype=DTYPE)
        for _ in range(max(2, pieces_of(COPIES_BYTES, 2 * weight_bytes)))
    ]
    return {
        "product": one.name,
        "rows": one.weight_rows,
        "width": one.width,
        "tokens": tokens,
        "scales": scales,
        "bfloat16_us": round(timed_us(operands.plain_step, copies), 2),
        "today_us": round(today_us, 2),
        "fastest": [
            {
                **tiling._asdict(),
                "us": round(took, 2),
                "tb_per_s": round(weight_bytes / took / 1e6, 2),
            }
            for took, tiling in rates[:SHOWN]
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["8B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64], help="at most 64")
    parser.add_argument("--scales", nargs="+", choices=tuple(SCALES), default=["block"])
    asked = parser.parse_args(arguments)
    # The head stays in 16 bits.
    wanted = dict.fromkeys(one for shape in asked.shapes for one in SHAPES[shape][:-1])
    rows = list(product(wanted, asked.tokens, asked.scales))
    work = [(*row, tiling) for row in rows for tiling in tilings(*row[:2])]
    failed = failures(compiled, work)
    for row in rows:
        found = [tiling for tiling in tilings(*row[:2]) if (*row, tiling) not in failed]
        print(json.dumps(measured(*row, found)), flush=True)


if __name__ == "__main__":
    main()
