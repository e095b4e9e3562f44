"""Log probabilities that are computed without waiting are those of the sampler."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.logprobs import Logprobs, logprobs_of
from pilotlight.engine.device.sampler import NotSampled, SampledToken, sample
from pilotlight.policy.request import Sampling

VOCAB = 97


def spec(logprobs: bool, top: int = 0, temperature: float = 0.0, top_k: int = 0) -> SampleSpec:
    sampling = Sampling(
        seed=3,
        max_tokens=9,
        temperature=temperature,
        top_k=top_k,
        logprobs=logprobs,
        top_logprobs=top,
    )
    return SampleSpec(sampling, position=4)


def chosen_of(sampled: list[SampledToken | NotSampled]) -> torch.Tensor:
    """As kernels leave it."""
    ids = [token.token_id if isinstance(token, SampledToken) else -1 for token in sampled]
    return torch.tensor(ids, dtype=torch.int32)


def of(
    logits: torch.Tensor, specs: list[SampleSpec], sampled: list[SampledToken | NotSampled]
) -> list[SampledToken | NotSampled]:
    """What a sampler tells that has the tokens alone, and log probabilities beside them."""
    bare = [
        SampledToken(token.token_id, None) if isinstance(token, SampledToken) else token
        for token in sampled
    ]
    beside = logprobs_of(logits, chosen_of(sampled), specs)
    return bare if beside is None else beside.moved(torch.clone).added_to(bare)


@given(
    asked=st.lists(
        st.tuples(st.booleans(), st.sampled_from((0, 1, 5, 20)), st.sampled_from((0.0, 0.7))),
        min_size=1,
        max_size=40,
    ),
    seed=st.integers(0, 1000),
)
def test_they_are_those_of_the_sampler(asked: list[tuple[bool, int, float]], seed: int) -> None:
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    specs = [spec(*one) for one in asked]
    sampled = sample(logits, specs)
    for one, token, told in zip(specs, sampled, of(logits, specs, sampled), strict=True):
        assert isinstance(token, SampledToken)
        assert isinstance(told, SampledToken)
        assert told.token_id == token.token_id
        assert (told.logprob is None) == (not one.sampling.logprobs)
        if token.logprob is not None:
            assert told.logprob == pytest.approx(token.logprob, abs=1e-9)
        assert [token_id for token_id, _ in told.top] == [token_id for token_id, _ in token.top]
        assert [value for _, value in told.top] == pytest.approx([value for _, value in token.top])


def test_rows_without_a_token_and_rows_that_are_not_simple_are_left_out() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1] = math.nan
    specs = [spec(True, 2), spec(True, 2), spec(True, 2, temperature=0.5, top_k=3)]
    beside = logprobs_of(logits, torch.tensor([5, -1, 7], dtype=torch.int32), specs)
    assert isinstance(beside, Logprobs)
    assert beside.rows == (0, 1)
    told = beside.added_to(
        [SampledToken(5, None), NotSampled.NOT_FINITE, SampledToken(7, -1.0, ((7, -1.0),))]
    )
    first, second, third = told
    assert isinstance(first, SampledToken)
    assert first.logprob == pytest.approx(-math.log(VOCAB))
    assert len(first.top) == 2
    assert second is NotSampled.NOT_FINITE
    assert third == SampledToken(7, -1.0, ((7, -1.0),)), "the sampler's own"


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    logits = torch.arange(3.0)[None]
    told = of(logits, [spec(True, 20)], sample(logits, [spec(True, 20)]))
    assert isinstance(told[0], SampledToken)
    assert [token_id for token_id, _ in told[0].top] == [2, 1, 0]


def test_nothing_is_computed_where_nothing_is_asked() -> None:
    assert logprobs_of(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int32), [spec(False)]) is None
