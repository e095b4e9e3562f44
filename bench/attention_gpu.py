"""Prefill attention on one GPU by head width and tile: ``python bench/attention_gpu.py``, with what
the compiler made of each.

For heads of 64, 128 and 256, and tiles of queries and keys with 4 and 8 warps: registers and
spilled words of a thread, shared memory of a program, and the median time of one layer's attention
of a whole prompt, or of a piece behind ``--behind`` tokens that are in the cache, or of
``--prompts`` of them at once; and how many products a second those are. The tile that
``prefill_tile`` chooses is marked, and comes first. Where a tile has no place on the device, that
is the line. One line of JSON for each, some three seconds each: they are compiled.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.cuda.attention_metadata import AttentionMetadata, fields_of, send
from pilotlight.engine.cuda.kernels.prefill_attention import (
    NARROW_DIM,
    PREFILL,
    PrefillTile,
    prefill_attention,
    prefill_tile,
)

HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 8)}
"""Heads of queries, and of keys and values, by their width: Gemma 3 12B has the last."""
SIZES = ((128, 64), (128, 128), (128, 32), (64, 64), (64, 128), (64, 32), (32, 64))
WIDE_SIZES = ((128, 32), (64, 32), (32, 32))
"""Of float32."""
DTYPES = (torch.bfloat16, torch.float32)
ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Of each prompt."""

    prompts: int
    tokens: int
    behind: int
    """So many, which are in the cache."""

    @property
    def batch(self) -> Batch:
        """Each prompt's blocks lie behind the one's before."""
        blocks = blocks_for(self.behind + self.tokens)
        return Batch(
            tuple(
                Segment(
                    self.behind,
                    self.tokens,
                    tuple(range(first * blocks, (first + 1) * blocks)),
                    True,
                )
                for first in range(self.prompts)
            )
        )

    def products(self, heads: int, head_dim: int) -> float:
        """A multiplication and an addition for each query, key and width, of scores and of their
        sums.
        """
        seen = self.behind + self.tokens / 2
        return 4 * heads * head_dim * self.prompts * self.tokens * seen


def tiles(head_dim: int, dtype: torch.dtype, piece: Piece) -> Iterator[tuple[PrefillTile, bool]]:
    """The chosen one, then the others."""
    chosen = prefill_tile(head_dim, dtype, piece.prompts * piece.tokens, piece.prompts)
    yield chosen, True
    wide = dtype == torch.float32
    if wide and head_dim <= NARROW_DIM:
        return
    for queries, keys in WIDE_SIZES if wide else SIZES:
        for warps, stages in product((4, 8), (1,) if wide else (2, 3)):
            if (tile := PrefillTile(queries, keys, warps, stages)) != chosen:
                yield tile, False


def measure(
    head_dim: int,
    dtype: torch.dtype,
    tile: PrefillTile,
    step: AttentionMetadata,
    piece: Piece,
) -> dict[str, Any]:
    """One tile's figures."""
    device = torch.device("cuda", 0)
    heads, kv_heads = HEADS[head_dim]
    rows = piece.prompts * piece.tokens
    queries = torch.randn(rows, heads, head_dim, device=device, dtype=dtype)
    keys, values = (
        torch.randn(
            piece.prompts * blocks_for(piece.behind + piece.tokens) * BLOCK_TOKENS,
            kv_heads,
            head_dim,
            device=device,
            dtype=dtype,
        )
        for _ in range(2)
    )
    out = torch.empty(rows, heads * head_dim, device=device, dtype=dtype)
    assert step.chunks is not None
    before = len(PREFILL.compiled)
    times: list[float] = []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        prefill_attention(
            queries, (keys, values), step.rows, step.chunks, head_dim**-0.5, out, tile=tile
        )
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    (made,) = PREFILL.compiled[before:]
    ms = statistics.median(times[2:])
    return {
        "registers": made.n_regs,
        "spills": made.n_spills,
        "shared_bytes": made.metadata.shared,
        "ms": round(ms, 4),
        "tflops": round(piece.products(heads, head_dim) / ms / 1e9, 1),
        "finite": bool(out.isfinite().all()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--behind", type=int, default=0, help="so many, which are in the cache")
    parser.add_argument("--prompts", type=int, default=1, help="so many at once")
    parser.add_argument(
        "--head-dims", type=int, nargs="+", choices=tuple(HEADS), default=list(HEADS)
    )
    parser.add_argument("--chosen", action="store_true", help="no other tiles")
    asked = parser.parse_args(arguments)
    piece = Piece(asked.prompts, asked.tokens, asked.behind)
    step = send(fields_of(piece.batch, 0, None), torch.device("cuda", 0))
    for head_dim in asked.head_dims:
        for dtype in DTYPES:
            for tile, chosen in tiles(head_dim, dtype, piece):
                if asked.chosen and not chosen:
                    continue
                line: dict[str, Any] = {
                    "head_dim": head_dim,
                    "dtype": str(dtype).removeprefix("torch."),
                    **tile._asdict(),
                }
                line["chosen"] = chosen
                try:
                    line |= measure(head_dim, dtype, tile, step, piece)
                except triton.runtime.errors.OutOfResources as error:
                    line["no_place"] = str(error)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
