"""Sampling from logits: distribution, filters, log probabilities."""

import math

import pytest
import torch

from pilotlight.engine.device.sampler import NotSampled, SampleSpec, _pick, sample
from pilotlight.policy.request import Sampling

PROBABILITIES = [0.05, 0.35, 0.02, 0.25, 0.1, 0.0, 0.15, 0.08]
LOGITS = torch.tensor([math.log(p) if p else -60.0 for p in PROBABILITIES], dtype=torch.float64)
SAMPLES = 4000
CHI_SQUARE_P001 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def sampled(num_samples: int = SAMPLES, logits: torch.Tensor = LOGITS, **sampling) -> list[int]:
    parameters = Sampling(**{"seed": 11, "max_tokens": 1, **sampling})
    rows = sample(
        logits.expand(num_samples, -1),
        [SampleSpec(parameters, position) for position in range(num_samples)],
    )
    return [row.token_id for row in rows]


def assert_follows(tokens: list[int], expected: dict[int, float]) -> None:
    """Chi-square test at p = 0.001; the samples are the same in each run."""
    assert set(tokens) <= expected.keys()
    total = sum(expected.values())
    counts = {token: len(tokens) * share / total for token, share in expected.items()}
    statistic = sum((tokens.count(token) - count) ** 2 / count for token, count in counts.items())
    assert statistic < CHI_SQUARE_P001[len(expected) - 1]


def of(*tokens: int) -> dict[int, float]:
    return {token: PROBABILITIES[token] for token in tokens}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, of(0, 1, 2, 3, 4, 6, 7)),
        ({"top_k": 3}, of(1, 3, 6)),
        ({"top_k": 100}, of(0, 1, 2, 3, 4, 6, 7)),
        ({"top_p": 0.59}, of(1, 3)),
        ({"top_p": 0.61}, of(1, 3, 6)),
        ({"top_p": 0.99}, of(0, 1, 2, 3, 4, 6, 7)),
        (
            {"top_k": 4, "top_p": 0.75},
            of(1, 3, 6),
        ),  # of the four's 0.85: 0.35 + 0.25 is 0.71, so the third belongs to it
        (
            {"temperature": 0.5},
            {token: share**2 for token, share in of(0, 1, 2, 3, 4, 6, 7).items()},
        ),
        ({"temperature": 2.0, "top_k": 2}, {1: 0.35**0.5, 3: 0.25**0.5}),
    ],
)
def test_samples_follow_the_filtered_distribution(sampling, expected):
    assert_follows(sampled(**sampling), expected)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300}]
)
def test_greedy_by_any_name(sampling):
    assert set(sampled(50, **sampling)) == {1}


def test_ties():
    level = torch.zeros(6, dtype=torch.float64)
    assert set(sampled(200, level, top_k=2)) == set(range(6)), "equals of the k-th stay"
    assert set(sampled(200, level, top_p=0.5)) == {0, 1, 2}, "the lower ids make up the nucleus"
    assert set(sampled(200, level, top_p=0.1)) == {0}, "one token is always left"
    assert set(sampled(20, level, temperature=0.0)) == {0}


@pytest.mark.parametrize(("noise", "token_id"), [(0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_noise_at_the_edges_never_picks_a_token_without_a_share(noise, token_id):
    assert _pick(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64), [noise]) == [
        token_id
    ]


def test_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort():
    logits = (
        torch.randn(50_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    )
    probabilities = logits.softmax(0)
    ordered, order = probabilities.sort(descending=True, stable=True)
    nucleus = set(order[: int((ordered.cumsum(0) < 0.3).sum()) + 1].tolist())
    assert 100 < len(nucleus) < 20_000
    assert set(sampled(100, logits, top_p=0.3)) <= nucleus


def test_noise_depends_on_seed_and_position_alone():
    spec = SampleSpec(Sampling(seed=5, max_tokens=1), 17)
    other = SampleSpec(Sampling(seed=6, max_tokens=1), 17)
    alone = sample(LOGITS[None], [spec])
    assert sample(LOGITS.expand(3, -1), [other, spec, other])[1] == alone[0]
    assert sampled(100, seed=5) != sampled(100, seed=6)


def test_logprob_is_that_of_the_raw_logits():
    sampling = Sampling(seed=1, max_tokens=1, temperature=0.3, top_k=2, logprobs=True)
    (row,) = sample(LOGITS[None] + 5, [SampleSpec(sampling, 0)])
    assert row.logprob == pytest.approx(math.log(PROBABILITIES[row.token_id]), abs=1e-12)
    (quiet,) = sample(LOGITS[None], [SampleSpec(Sampling(seed=1, max_tokens=1), 0)])
    assert quiet.logprob is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_nothing(bad):
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = bad
    rows = sample(logits, [SampleSpec(Sampling(seed=1, max_tokens=1, temperature=0.0), 0)] * 3)
    assert [getattr(row, "token_id", row) for row in rows] == [1, NotSampled.NOT_FINITE, 1]


def test_bfloat16_logits_are_sampled_as_their_exact_values():
    narrow = LOGITS.bfloat16()
    assert sampled(200, narrow, top_p=0.9) == sampled(200, narrow.double(), top_p=0.9)
