"""Which whole prompts are cuDNN's, and what it is called with, without a device."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import placed, spec_of
from structlog.testing import capture_logs
from torch import Tensor

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.cuda.attention_metadata import zeros_on
from pilotlight.engine.cuda.whole_prompts import (
    WHOLE_STEP,
    WHOLE_TOKENS,
    Heads,
    WholePrompts,
    attend_ahead,
    heads_of_zeros,
    look_at_whole,
    may_be_cudnns,
    padded_length,
    split_heads,
)
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype

MOST_TOKENS = 6000
CPU = torch.device("cpu")
HALF = torch.bfloat16
SCALE = 0.25


def prompt(tokens: int, start: int = 0) -> Segment:
    return Segment(start, tokens, tuple(range(blocks_for(start + tokens))), wants_logits=True)


def alone(tokens: int, start: int = 0) -> Batch:
    return Batch((prompt(tokens, start),))


def prepares() -> tuple[WholePrompts, list[int]]:
    """And the lengths that are prepared, in order."""
    lengths: list[int] = []
    return WholePrompts(lengths.append), lengths


def fails(error: Exception) -> Callable[[int], None]:
    def prepare(tokens: int) -> None:
        raise error

    return prepare


@given(st.integers(1, 1 << 20))
def test_padded_lengths_are_multiples_and_hold_the_prompt(tokens: int) -> None:
    length = padded_length(tokens)
    assert length % WHOLE_STEP == 0
    assert 0 <= length - tokens < WHOLE_STEP


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(2, MOST_TOKENS)), max_size=40))
def test_a_prompt_is_cudnns_if_its_length_was_prepared_before(events: list[int | None]) -> None:
    """None: the engine has nothing to do."""
    prompts, lengths = prepares()
    wanted: list[int] = []
    for tokens in events:
        if tokens is None:
            assert prompts.is_over == (not wanted)
            prompts.one()
            wanted = wanted[1:]
            continue
        length = padded_length(tokens)
        long = tokens >= WHOLE_TOKENS
        assert prompts.takes(alone(tokens)) == (long and length in lengths)
        if long and length not in (*lengths, *wanted):
            wanted.append(length)
    while not prompts.is_over:
        prompts.one()
    assert len(lengths) == len({*lengths}) <= padded_length(MOST_TOKENS) // WHOLE_STEP


@pytest.mark.parametrize(
    "batch",
    [
        Batch((prompt(1, 7), prompt(2000))),
        Batch((prompt(2000), prompt(2000))),
        alone(2000, start=16),
        alone(WHOLE_TOKENS - 1),
    ],
    ids=["beside a stream", "beside another", "behind a prefix", "short"],
)
def test_no_other_batch_is_cudnns_nor_wanted(batch: Batch) -> None:
    prompts, lengths = prepares()
    assert not prompts.takes(alone(2048))
    assert not prompts.takes(batch)
    prompts.one()
    assert (lengths, prompts.is_over) == ([2048], True)
    assert not prompts.takes(batch)
    assert prompts.is_over


def test_nothing_is_prepared_that_no_prompt_wanted() -> None:
    prompts, lengths = prepares()
    prompts.one()
    assert (lengths, prompts.is_over) == ([], True)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cuDNN Frontend error: no valid execution plans"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
)
def test_a_length_that_is_refused_is_given_up_for_good(error: Exception) -> None:
    prompts = WholePrompts(fails(error))
    prompts.takes(alone(2000))
    with capture_logs() as logs:
        prompts.one()
    assert [(line["action"], line["tokens"]) for line in logs] == [("whole_prompts_given_up", 2048)]
    assert not prompts.takes(alone(2048))
    assert prompts.is_over
    prompts.takes(alone(4000))
    assert not prompts.is_over, "others are still tried"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("a mistake of ours"),
    ],
)
def test_what_others_would_suffer_from_is_told(error: Exception) -> None:
    prompts = WholePrompts(fails(error))
    prompts.takes(alone(2000))
    with pytest.raises(type(error), match=str(error)):
        prompts.one()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchs_own_refusal_is_one() -> None:
    """On a CPU there is no cuDNN, which torch warns of, too."""
    spec = spec_of("llama", Dtype.BFLOAT16)

    def prepare(tokens: int) -> None:
        attend_ahead(heads_of_zeros(spec, HALF, tokens, zeros_on(CPU), fused=True), SCALE)

    prompts = WholePrompts(prepare)
    prompts.takes(alone(2000))
    with capture_logs() as logs:
        prompts.one()
    assert len(logs) == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "may"),
    [
        ("llama", Dtype.BFLOAT16, True),
        ("qwen3-moe", Dtype.FLOAT16, True),
        ("llama", Dtype.FLOAT32, False),
        ("llama-alone", Dtype.BFLOAT16, False),
        ("qwen3-wide", Dtype.BFLOAT16, False),
        ("mistral", Dtype.BFLOAT16, False),
        ("qwen2", Dtype.BFLOAT16, False),
    ],
)
def test_float32_windows_and_other_heads_are_never_cudnns(
    kind: str, dtype: Dtype, *, may: bool
) -> None:
    assert may_be_cudnns(spec_of(kind, dtype), dtype) == may


@pytest.mark.parametrize("kind", ["qwen3-moe", "gemma3"])
def test_layers_that_are_not_fused_attend_with_the_strides_that_are_prepared(kind: str) -> None:
    spec = replace(spec_of(kind, Dtype.BFLOAT16), sliding_layers=())
    arena = CpuArena(num_slots=1, slot_bytes=64 << 20)
    _, parameters, _ = placed(arena, spec, 1, 4)
    decoder, tokens = decoder_of(spec), 50
    seen: list[Tensor] = []

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen.extend((queries, keys, values))
        return queries.flatten(1)

    with torch.inference_mode():
        decoder.attention(
            0,
            parameters[1],
            torch.ones(tokens, spec.hidden_size, dtype=HALF),
            decoder.rotations(torch.arange(tokens), HALF),
            attend,
        )
    assert_alike(seen, heads_of_zeros(spec, HALF, tokens, zeros_on(CPU), fused=False))


def test_fused_layers_attend_to_views_of_the_projection() -> None:
    spec, tokens = spec_of("llama", Dtype.BFLOAT16), 50
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = torch.arange(tokens * width).view(tokens, width)
    heads = split_heads(qkv, spec)
    assert torch.equal(torch.cat([some.flatten(1) for some in heads], dim=1), qkv)
    found = heads_of_zeros(spec, qkv.dtype, tokens, zeros_on(CPU), fused=True)
    assert_alike(heads, found)
    assert not any(some.any() for some in found)


def assert_alike(heads: list[Tensor] | Heads, found: Heads) -> None:
    assert [(some.shape, some.stride(), some.dtype) for some in heads] == [
        (some.shape, some.stride(), some.dtype) for some in found
    ]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("count", [50, WHOLE_STEP])
def test_rows_see_themselves_and_those_before(first: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count + first)
    heads = tuple(
        torch.randn(first + count, number, 8, generator=generator, dtype=torch.float64)
        for number in (4, 2, 2)
    )
    out = torch.full((first + count, 32), math.pi, dtype=torch.float64)
    queries, keys, values = heads
    found = look_at_whole(slice(first, first + count), (queries, keys, values), SCALE, out)
    keys, values = (some[first:].repeat_interleave(2, dim=1) for some in (keys, values))
    scores = torch.einsum("rhd,nhd->hrn", queries[first:], keys) * SCALE
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    exact = torch.einsum("hrn,nhd->rhd", weights, values).flatten(1)
    torch.testing.assert_close(found[first:], exact)
    assert torch.equal(found[:first], torch.full((first, 32), math.pi, dtype=torch.float64))
