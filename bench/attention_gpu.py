"""Prefill attention on one GPU by head width and tile: ``python bench/attention_gpu.py``, with what
the compiler made of each.

For heads of 64, 128 and 256, and tiles of queries and keys with 4 and 8 warps: registers and
spilled words of a thread, shared memory of a program, and the median time of one layer's attention
of a whole prompt, or of a piece behind ``--behind`` tokens that are in the cache; and how many
products a second those are. The tile that ``prefill_tile`` chooses is marked, and comes first.
Where a tile has no place on the device, that is the line. One line of JSON for each, some three
seconds each: they are compiled.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
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
SIZES = ((128, 64), (128, 128), (128, 32), (64, 64), (64, 128))
WIDE_SIZES = ((128, 32), (64, 32), (32, 32))
"""Of float32."""
DTYPES = (torch.bfloat16, torch.float32)
ROUNDS = 20


def tiles(head_dim: int, dtype: torch.dtype, tokens: int) -> Iterator[tuple[PrefillTile, bool]]:
    """The chosen one, then the others."""
    chosen = prefill_tile(head_dim, dtype, tokens)
    yield chosen, True
    wide, broad = dtype == torch.float32, head_dim > NARROW_DIM
    if wide and not broad:
        return
    for queries, keys in WIDE_SIZES if wide else SIZES:
        for warps, stages in product((4, 8), (1,) if wide else (2, 3) if broad else (3,)):
            if (tile := PrefillTile(queries, keys, warps, stages)) != chosen:
                yield tile, False


def measure(
    head_dim: int,
    dtype: torch.dtype,
    tile: PrefillTile,
    step: AttentionMetadata,
    tokens: int,
    behind: int,
) -> dict[str, Any]:
    """One tile's figures, for a piece of so many tokens behind others."""
    device = torch.device("cuda", 0)
    heads, kv_heads = HEADS[head_dim]
    queries = torch.randn(tokens, heads, head_dim, device=device, dtype=dtype)
    keys, values = (
        torch.randn(
            blocks_for(behind + tokens) * BLOCK_TOKENS,
            kv_heads,
            head_dim,
            device=device,
            dtype=dtype,
        )
        for _ in range(2)
    )
    out = torch.empty(tokens, heads * head_dim, device=device, dtype=dtype)
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
    # A multiplication and an addition for each query, key and width, of scores and of their sums.
    products = 4 * heads * head_dim * tokens * (behind + tokens / 2)
    return {
        "registers": made.n_regs,
        "spills": made.n_spills,
        "shared_bytes": made.metadata.shared,
        "ms": round(ms, 4),
        "tflops": round(products / ms / 1e9, 1),
        "finite": bool(out.isfinite().all()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--behind", type=int, default=0, help="so many, which are in the cache")
    parser.add_argument(
        "--head-dims", type=int, nargs="+", choices=tuple(HEADS), default=list(HEADS)
    )
    parser.add_argument("--chosen", action="store_true", help="no other tiles")
    asked = parser.parse_args(arguments)
    blocks = tuple(range(blocks_for(asked.behind + asked.tokens)))
    step = send(
        fields_of(Batch((Segment(asked.behind, asked.tokens, blocks, True),)), 0, None),
        torch.device("cuda", 0),
    )
    for head_dim in asked.head_dims:
        for dtype in DTYPES:
            for tile, chosen in tiles(head_dim, dtype, asked.tokens):
                if asked.chosen and not chosen:
                    continue
                line: dict[str, Any] = {
                    "head_dim": head_dim,
                    "dtype": str(dtype).removeprefix("torch."),
                    **tile._asdict(),
                }
                line["chosen"] = chosen
                try:
                    line |= measure(head_dim, dtype, tile, step, asked.tokens, asked.behind)
                except triton.runtime.errors.OutOfResources as error:
                    line["no_place"] = str(error)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
