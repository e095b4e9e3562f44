"""Products of few rows on one GPU, by how they are cut up, beside torch's: ``python
bench/products_gpu.py``.

Every product of a decode step, with the small kernel that follows where the two are cut up
together: a sum's parts are added by the norm, gates are opened by the product itself. Each is
replayed as a graph over as many copies of its weights as no cache holds, so that a figure is that
of a step: microseconds of one product, and the rate at which its weights are read. Kernels are
compiled by all cores before. One line of JSON for each product and row count, the fastest first.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.few_rows import FEW, FewRowsTiling, few_rows
from pilotlight.engine.cuda.kernels.sizes import pieces_of

COPIES_BYTES = 600_000_000
"""Far more than a device's cache."""
REPLAYS = 7
SHARED_BYTES = 227 * 1024
UNDER_WAY_BYTES = 24 * 1024
"""Less on its way for a multiprocessor reads too slowly to be looked at."""
MULTIPROCESSORS = 132
SHOWN = 6
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Product:
    """One of a layer's."""

    name: str
    rows: int
    """Of the result."""
    width: int
    gated: bool = False
    divisible: bool = False
    """The norm adds up its parts."""

    @property
    def weight_rows(self) -> int:
        """Of the weight."""
        return 2 * self.rows if self.gated else self.rows


def layer(
    hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int
) -> tuple[Product, ...]:
    """The products of a step."""
    return (
        Product("qkv", (heads + 2 * kv_heads) * head_dim, hidden),
        Product("o", hidden, heads * head_dim, divisible=True),
        Product("gate_up", inner, hidden, gated=True),
        Product("down", hidden, inner, divisible=True),
        Product("head", vocab, hidden),
    )


SHAPES = {
    "8B": layer(4096, 32, 8, 128, 12288, 151936),
    "4B": layer(2560, 20, 20, 128, 6912, 151936),
    "llama2-7b": layer(4096, 32, 32, 128, 11008, 32000),
    "mistral-7b": layer(4096, 32, 8, 128, 14336, 32000),
}


def tilings(one: Product) -> Iterator[FewRowsTiling]:
    """What has a place on a device and keeps it busy."""
    splits = (1, 2, 3, 4, 6, 8) if one.divisible else (1,)
    for rows, columns, parts, warps, stages in product(
        (32, 64, 128, 256), (64, 128), splits, (4, 8), (3, 4, 5, 6)
    ):
        stage_bytes = 2 * columns * ((2 if one.gated else 1) * rows + FEW)
        programs = pieces_of(one.rows, rows) * parts
        sums = (2 if one.gated else 1) * rows * FEW // (warps * 32)
        at_once = min(SHARED_BYTES // (stages * stage_bytes), pieces_of(programs, MULTIPROCESSORS))
        if (
            stages * stage_bytes <= SHARED_BYTES
            and at_once * (stages - 1) * stage_bytes >= UNDER_WAY_BYTES
            and programs >= MULTIPROCESSORS // 2
            and programs <= 6 * MULTIPROCESSORS + (100_000 if parts == 1 else 0)
            and sums <= 128
            and (one.width // columns) >= parts * 4
            and not (warps == 8 and rows == 32)
        ):
            yield FewRowsTiling(rows, columns, parts, warps, stages)


def compiled(one: Product, tiling: FewRowsTiling) -> str:
    """Has a kernel in triton's cache; what went wrong, or nothing."""
    try:
        weight, x = operands(one, FEW, copies=1)
        few_rows(weight[0], x, tiling, gated=one.gated)
        torch.cuda.synchronize()
    except (RuntimeError, TritonError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def operands(one: Product, count: int, copies: int) -> tuple[list[Tensor], Tensor]:
    """Weights and rows, at random."""
    device = torch.device("cuda", 0)
    weights = [
        torch.randn(one.weight_rows, one.width, device=device, dtype=torch.bfloat16) * 0.02
        for _ in range(copies)
    ]
    return weights, torch.randn(count, one.width, device=device, dtype=torch.bfloat16)


def timed_us(step: Callable[[Tensor], Any], weights: Sequence[Tensor]) -> float:
    """Of one step."""
    step(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            step(weight)
    times: list[float] = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times[2:]) * 1e3 / len(weights)


def measured(one: Product, count: int, found: Sequence[FewRowsTiling]) -> dict[str, Any]:
    """One line."""
    weight_bytes = one.weight_rows * one.width * 2
    weights, x = operands(one, count, max(2, pieces_of(COPIES_BYTES, weight_bytes)))
    residual = torch.zeros(count, one.rows, device=x.device, dtype=x.dtype)
    norm = torch.ones(one.rows, device=x.device, dtype=x.dtype)

    def behind(made: Any) -> None:
        if one.divisible:
            elementwise.add_norm(residual, made, norm, EPS)

    def plain(weight: Tensor) -> None:
        made = torch.mm(x, weight.t())
        behind(elementwise.silu_mul(made) if one.gated else made)

    rates: list[tuple[float, FewRowsTiling]] = []
    for tiling in found:
        try:
            taken = timed_us(
                lambda weight, tiling=tiling: behind(few_rows(weight, x, tiling, gated=one.gated)),
                weights,
            )
        except TritonError:
            continue
        rates.append((taken, tiling))
    rates.sort()
    torch_us = timed_us(plain, weights)
    want = torch.mm(x, weights[0].t())
    want = elementwise.silu_mul(want) if one.gated else want
    made = few_rows(weights[0], x, rates[0][1], gated=one.gated)
    made = made if isinstance(made, Tensor) else made.total(x.dtype)
    off = ((made.float() - want.float()).abs().max() / want.float().abs().max()).item()
    return {
        "product": one.name,
        "rows": one.rows,
        "width": one.width,
        "gated": one.gated,
        "tokens": count,
        "torch_us": round(torch_us, 2),
        "torch_tb_per_s": round(weight_bytes / torch_us / 1e6, 2),
        "fastest": [
            {**tiling._asdict(), "us": round(us, 2), "tb_per_s": round(weight_bytes / us / 1e6, 2)}
            for us, tiling in rates[:SHOWN]
        ],
        "off": round(off, 5),
    }


def failures(compiled: Callable[..., str], work: Sequence[tuple[Any, ...]]) -> frozenset[Any]:
    """What does not compile, by all cores; how many do is printed.

    Args:
        compiled: has one kernel compiled; what went wrong, or nothing.
        work: its arguments, for each kernel.
    """
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        wrong = list(pool.map(compiled, *zip(*work, strict=True), chunksize=4))
    failed = {task: error for task, error in zip(work, wrong, strict=True) if error}
    made = {"compiled": len(work), "failed": len(failed), "errors": sorted({*failed.values()})[:5]}
    print(json.dumps(made), flush=True)
    return frozenset(failed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["8B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, FEW], help=f"at most {FEW}")
    asked = parser.parse_args(arguments)
    wanted = list(dict.fromkeys(one for shape in asked.shapes for one in SHAPES[shape]))
    work = [(one, tiling) for one in wanted for tiling in tilings(one)]
    failed = failures(compiled, work)
    for one in wanted:
        found = [tiling for tiling in tilings(one) if (one, tiling) not in failed]
        for tokens in asked.tokens:
            print(json.dumps(measured(one, tokens, found)), flush=True)


if __name__ == "__main__":
    main()
