"""Attention over the KV cache on a CPU: what each row sees, and the sizes that torch meets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.device.index import SPAN_STEP, index_of, slots_of
from pilotlight.engine.device.kv import KvCache
from pilotlight.policy.model import Stage

HEADS, KV_HEADS, HEAD_DIM, BLOCKS = 4, 2, 16, 40


class OneLayer:
    """The memory of a stage of one layer: plain tensors full of what is no number, as an earlier
    owner may have left it.
    """

    stage = Stage(0, 1)

    def __init__(self, dtype: torch.dtype, sliding: bool) -> None:
        spec = SimpleNamespace(sliding_layers=(0,) if sliding else (), attention_scale=None)
        self.decoder = SimpleNamespace(spec=spec)
        shape = (BLOCKS * BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
        self._rows = (
            torch.full(shape, torch.nan, dtype=dtype),
            torch.full(shape, torch.nan, dtype=dtype),
        )

    def resize(self, num_blocks: int) -> None:
        assert num_blocks == BLOCKS

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        assert layer == 0
        return self._rows


def segment(start: int, count: int, *, scattered: bool) -> Segment:
    blocks = tuple(range(-(-(start + count) // BLOCK_TOKENS)))
    return Segment(
        start=start, count=count, blocks=blocks[::-1] if scattered else blocks, wants_logits=True
    )


def attend(one: Segment, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the cache gives for a segment's rows, and what float64 gives for the same numbers."""
    torch.manual_seed(one.stop)
    memory: Any = OneLayer(dtype, sliding=window is not None)
    cache = KvCache(memory, BLOCKS)
    queries = torch.randn(one.count, HEADS, HEAD_DIM, dtype=dtype)
    keys, values = (torch.randn(one.stop, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    for half, new in zip(cache.stored(0), (keys, values), strict=True):
        half[slots_of(one.blocks, 0, one.start)] = new[: one.start]
    attended = cache.attend(
        0, index_of(Batch((one,)), window, dtype), queries, keys[one.start :], values[one.start :]
    )

    positions = torch.arange(one.start, one.stop)[:, None]
    seen = (torch.arange(one.stop) <= positions) & (
        torch.arange(one.stop) > positions - (window or one.stop)
    )
    wide = [x.double().transpose(0, 1) for x in (queries, keys, values)]
    expected = functional.scaled_dot_product_attention(
        wide[0], wide[1], wide[2], attn_mask=seen, enable_gqa=True
    )
    return attended, expected.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 24], ids=["full", "sliding"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in place", "scattered"])
@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 2), (0, 31), (0, 32), (0, 33), (5, 2), (30, 2), (31, 40), (64, 32), (200, 77)],
)
def test_rows_see_their_keys_and_no_others(
    start: int, count: int, scattered: bool, window: int | None, dtype: torch.dtype
) -> None:
    attended, expected = attend(segment(start, count, scattered=scattered), window, dtype)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(attended.double(), expected, rtol=tolerance, atol=tolerance)


def test_few_sizes_of_spans_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are compiled for a size of bfloat16 are kept for good: a process must not meet a
    new one with each prompt.
    """
    met: set[tuple[int, int]] = set()
    plain = functional.scaled_dot_product_attention

    def watched(queries: Tensor, keys: Tensor, *rest: Any, **options: Any) -> Tensor:
        if queries.dtype is torch.bfloat16:
            met.add((queries.shape[2], keys.shape[2]))
        return plain(queries, keys, *rest, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    for start in range(0, 256, 23):
        for count in range(2, 128, 9):
            attend(segment(start, count, scattered=False), None, torch.bfloat16)
    assert all(size % SPAN_STEP == 0 for sizes in met for size in sizes)
    assert len(met) <= (128 // SPAN_STEP) * (384 // SPAN_STEP)
