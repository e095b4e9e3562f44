"""Attention's kernels, for single rows and for prompts, against the same computation in float64 on
the CPU.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

from float64_reference import DTYPES, close, poisoned

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.cuda.attention_metadata import fields_of, send, zeros_on
from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.decode_attention import (
    DecodeScratch,
    RawHeads,
    decode_attention,
)
from pilotlight.engine.cuda.kernels.prefill_attention import (
    MANY_ROWS,
    PrefillTile,
    prefill_attention,
)
from pilotlight.engine.cuda.prompts import StaticPrompt
from pilotlight.engine.cuda.static_words import StaticDecode
from pilotlight.engine.models.layers import rms_norm

pytestmark = pytest.mark.gpu


SPARE = 20


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """[rows, heads, head_dim] by angles [rows, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Cache:
    """A paged cache with requests in it, on the device and, in float64, on the CPU."""

    def __init__(
        self,
        fresh: Callable[..., Tensor],
        device: torch.device,
        dtype: torch.dtype,
        contexts: Sequence[int],
        heads: int,
        dim: int,
    ) -> None:
        per_request = [blocks_for(context) for context in contexts]
        order = torch.randperm(sum(per_request) + 3).tolist()
        self.tables = [tuple(order.pop() for _ in range(count)) for count in per_request]
        shape = ((sum(per_request) + 3) * BLOCK_TOKENS, heads, dim)
        self.keys, self.values = (fresh(*shape).to(dtype) for _ in range(2))
        written = torch.zeros(shape[0], dtype=torch.bool)
        for table, context in zip(self.tables, contexts, strict=True):
            written[self.slots(table, 0, context)] = True
        # Slots without an owner are NaN: a row that reads one shows it.
        self.keys[~written] = self.values[~written] = math.nan
        self.there = self.keys.to(device, copy=True), self.values.to(device, copy=True)

    @staticmethod
    def slots(table: Sequence[int], start: int, stop: int) -> list[int]:
        return [
            table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
            for at in range(start, stop)
        ]

    def attend(
        self, query: Tensor, table: Sequence[int], position: int, window: int | None, scale: float
    ) -> Tensor:
        """[heads, head_dim] of one row -> the same, in float64."""
        start = 0 if window is None else max(0, position + 1 - window)
        slots = self.slots(table, start, position + 1)
        keys, values = self.keys[slots].double(), self.values[slots].double()
        grouped = query.double().unflatten(0, (keys.shape[1], -1))
        weights = torch.einsum("hgd,nhd->hgn", grouped, keys).mul(scale).softmax(dim=-1)
        return torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)


SHAPES = [(4, 2, 128), (4, 4, 20), (8, 1, 64), (4, 1, 256), (2, 2, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 50])
def test_single_rows_attend(
    device: torch.device,
    fresh: Callable[..., Tensor],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
) -> None:
    contexts = (1, 16, 17, 333, 1500)
    cache = Cache(fresh, device, dtype, contexts, kv_heads, dim)
    batch = Batch(
        tuple(
            Segment(n - 1, 1, table, True) for n, table in zip(contexts, cache.tables, strict=True)
        )
    )
    step = send(fields_of(batch, SPARE, window), device)
    splits = step.splits if window is None else step.sliding_splits
    scratch = DecodeScratch(len(contexts) + SPARE, heads, kv_heads, dim, zeros_on(device))
    queries = fresh(len(contexts), heads, dim).to(dtype)
    for _ in range(2):  # The second time, the counters have to be as they were.
        out = poisoned(len(contexts), heads * dim, dtype=dtype, device=device)
        decode_attention(
            queries.to(device, copy=True), cache.there, step.rows, splits, scratch, 0.3, out
        )
        exact = torch.stack(
            [
                cache.attend(query, table, n - 1, window, 0.3)
                for query, table, n in zip(queries, cache.tables, contexts, strict=True)
            ]
        )
        close(out, exact.flatten(1), dtype)
    assert not scratch.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dressed", [False, True], ids=["plain", "bias-and-norms"])
def test_raw_heads_are_turned_stored_and_attended_to(
    device: torch.device,
    fresh: Callable[..., Tensor],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    dressed: bool,
) -> None:
    """The decode kernel does at once what the one for prompts does in place; both as float64 does
    it.

    Padding touches nothing.
    """
    contexts = (1, 200, 17)
    cache = Cache(fresh, device, dtype, contexts, kv_heads, dim)
    batch = Batch(
        tuple(
            Segment(n - 1, 1, table, True) for n, table in zip(contexts, cache.tables, strict=True)
        )
    )
    static = StaticDecode(zeros_on(device), 8, SPARE, 64, None, pinned=device.type == "cuda")
    assert static.fill(batch, None)
    step, _ = static.view(4)
    width = (heads + 2 * kv_heads) * dim
    qkv, bias = fresh(4, width).to(dtype), fresh(width).to(dtype)
    norms = fresh(dim).to(dtype), fresh(dim).to(dtype)
    frequencies = 1.0 / 100 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    turns = elementwise.rotations(
        step.rows.positions, frequencies.to(device, copy=True), 1.0, dtype
    )
    scratch = DecodeScratch(4 + SPARE, heads, kv_heads, dim, zeros_on(device))
    raw = RawHeads(None, None, 0.0, turns)
    if dressed:
        raw = RawHeads(
            bias.to(device, copy=True),
            (norms[0].to(device, copy=True), norms[1].to(device, copy=True)),
            1e-6,
            turns,
        )
    before = [half.clone() for half in cache.there]
    out = poisoned(4, heads * dim, dtype=dtype, device=device)
    decode_attention(
        qkv.to(device, copy=True), cache.there, step.rows, step.splits, scratch, 0.2, out, raw
    )

    exact = qkv.double()[:3]
    if dressed:
        exact = exact + bias.double()
    parts = exact.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
    queries, keys, values = parts
    if dressed:
        queries, keys = (
            rms_norm(x, norm.double(), 1e-6) for x, norm in zip((queries, keys), norms, strict=True)
        )
    angles = torch.tensor([[n - 1] for n in contexts]).double() * frequencies.double()
    queries, keys = turned(queries, angles), turned(keys, angles)
    slots = [
        cache.slots(table, n - 1, n)[0] for table, n in zip(cache.tables, contexts, strict=True)
    ]
    stored_keys, stored_values = cache.there
    close(stored_keys[slots], keys, dtype)
    close(stored_values[slots], values, dtype)
    others = torch.ones(len(stored_keys), dtype=torch.bool)
    others[slots] = False
    for half, was in zip(cache.there, before, strict=True):
        assert torch.equal(
            half[others.to(device, copy=True)].view(torch.uint8),
            was[others.to(device, copy=True)].view(torch.uint8),
        )
    cache.keys[slots], cache.values[slots] = keys.to(dtype), values.to(dtype)
    attended = [
        cache.attend(query, table, n - 1, None, 0.2)
        for query, table, n in zip(queries, cache.tables, contexts, strict=True)
    ]
    close(out[:3], torch.stack(attended).flatten(1), dtype)
    assert out[3].isnan().all()

    first = [half[slots].clone() for half in cache.there]
    in_place = qkv.to(device, copy=True)
    elementwise.turn_and_store(
        in_place, raw.bias, raw.norms, raw.eps, turns, step.rows.slots, cache.there, heads
    )
    close(in_place[:3], torch.cat((queries, keys, values), dim=1).flatten(1), dtype)
    for half, was in zip(cache.there, first, strict=True):
        close(half[slots], was.cpu().double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 50])
def test_chunks_attend(
    device: torch.device,
    fresh: Callable[..., Tensor],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
) -> None:
    """Whole prompts, chunks behind a prefix, and single rows beside them, which are another
    kernel's.
    """
    spans = ((0, 5), (40, 41), (0, 130), (37, 300), (199, 200))
    cache = Cache(fresh, device, dtype, [stop for _, stop in spans], kv_heads, dim)
    batch = Batch(
        tuple(
            Segment(start, stop - start, table, True)
            for (start, stop), table in zip(spans, cache.tables, strict=True)
        )
    )
    step = send(fields_of(batch, SPARE, window), device)
    queries = fresh(batch.num_tokens, heads, dim).to(dtype)
    out = poisoned(batch.num_tokens, heads * dim, dtype=dtype, device=device)
    prefill_attention(
        queries.to(device, copy=True), cache.there, step.rows, step.chunks, 0.3, out, window
    )
    scratch = DecodeScratch(5 + SPARE, heads, kv_heads, dim, zeros_on(device))
    splits = step.splits if window is None else step.sliding_splits
    decode_attention(
        queries.to(device, copy=True), cache.there, step.rows, splits, scratch, 0.3, out
    )
    exact = [
        cache.attend(queries[row], table, position, window, 0.3)
        for row, (table, position) in enumerate(
            (table, position)
            for table, (start, stop) in zip(cache.tables, spans, strict=True)
            for position in range(start, stop)
        )
    ]
    close(out, torch.stack(exact).flatten(1), dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize("window", [None, 300])
def test_many_rows_attend(
    device: torch.device,
    fresh: Callable[..., Tensor],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
) -> None:
    """Enough rows that tiles are others; behind a prefix."""
    start, count, dtype = 77, MANY_ROWS + 41, torch.bfloat16
    stop = start + count
    cache = Cache(fresh, device, dtype, (stop,), kv_heads, dim)
    (table,) = cache.tables
    step = send(fields_of(Batch((Segment(start, count, table, True),)), SPARE, window), device)
    queries = fresh(count, heads, dim).to(dtype)
    out = poisoned(count, heads * dim, dtype=dtype, device=device)
    prefill_attention(
        queries.to(device, copy=True), cache.there, step.rows, step.chunks, 0.05, out, window
    )
    slots, rows = cache.slots(table, 0, stop), torch.arange(start, stop)[:, None]
    keys, values = (
        half[slots].double().repeat_interleave(heads // kv_heads, dim=1)
        for half in (cache.keys, cache.values)
    )
    seen = torch.arange(stop)[None]
    hidden = (seen > rows) if window is None else (seen > rows) | (seen <= rows - window)
    scores = (
        torch.einsum("rhd,nhd->hrn", queries.double(), keys)
        .mul(0.05)
        .masked_fill(hidden, -math.inf)
    )
    close(out, torch.einsum("hrn,nhd->rhd", scores.softmax(dim=-1), values).flatten(1), dtype)


@pytest.mark.parametrize(
    "tile", [PrefillTile(128, 32, 8, 3), PrefillTile(64, 64, 4, 2), PrefillTile(64, 32, 4, 3)]
)
def test_other_tiles_attend_alike(
    device: torch.device, fresh: Callable[..., Tensor], tile: PrefillTile
) -> None:
    """Parts of the host's tiles, too: the last one of a segment may begin behind its rows."""
    spans, heads, kv_heads, dim = ((0, 5), (37, 300), (0, 130)), 4, 2, 256
    cache = Cache(fresh, device, torch.bfloat16, [stop for _, stop in spans], kv_heads, dim)
    batch = Batch(
        tuple(
            Segment(start, stop - start, table, True)
            for (start, stop), table in zip(spans, cache.tables, strict=True)
        )
    )
    step = send(fields_of(batch, SPARE, None), device)
    queries = fresh(batch.num_tokens, heads, dim).to(device, torch.bfloat16)
    usual, other = (
        poisoned(batch.num_tokens, heads * dim, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    prefill_attention(queries, cache.there, step.rows, step.chunks, 0.05, usual)
    prefill_attention(queries, cache.there, step.rows, step.chunks, 0.05, other, tile=tile)
    close(other, usual.cpu().double(), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
def test_a_padded_prompt_attends_and_its_padding_does_nothing(
    device: torch.device, fresh: Callable[..., Tensor], dtype: torch.dtype, window: int | None
) -> None:
    """Behind a prefix, in words that held a longer prompt before: padding rows, and a whole tile of
    them, write nothing.
    """
    heads, kv_heads, dim, start, count = 4, 2, 128, 40, 70
    cache = Cache(fresh, device, dtype, (500, start + count), kv_heads, dim)
    longer, mine = cache.tables
    static = StaticPrompt(zeros_on(device), pinned=device.type == "cuda")
    batch = Batch((Segment(start, count, mine, True),))
    assert static.fill(Batch((Segment(0, 500, longer, True),)), None)
    assert static.fill(batch, None)
    step, _ = static.view(256)
    queries = fresh(256, heads, dim).to(dtype)
    queries[count:] = math.nan
    out = poisoned(256, heads * dim, dtype=dtype, device=device)
    prefill_attention(
        queries.to(device, copy=True), cache.there, step.rows, step.chunks, 0.3, out, window
    )
    exact = [cache.attend(queries[row], mine, start + row, window, 0.3) for row in range(count)]
    close(out[:count], torch.stack(exact).flatten(1), dtype)
    assert out[count:].isnan().all()
    before = [half.clone() for half in cache.there]
    elementwise.store(
        queries[:, :kv_heads].to(device),
        queries[:, kv_heads:].to(device),
        step.rows.slots,
        cache.there,
    )
    slots = cache.slots(mine, start, start + count)
    for half, was, new in zip(cache.there, before, queries.split(kv_heads, dim=1), strict=True):
        assert torch.equal(half[slots].cpu(), new[:count])
        others = torch.ones(half.shape[0], dtype=torch.bool, device=half.device)
        others[slots] = False
        assert torch.equal(half[others].nan_to_num(), was[others].nan_to_num())
