"""Sampling against transformers' processors, and by chi-square against what they leave.

20,000 samples each, the same in each run.
"""

import math
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from families import FAMILIES
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pilotlight.engine.core.counts import counts_of
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.philox import uniform
from pilotlight.engine.device.logits import SampleSpec, adjust
from pilotlight.engine.device.sampler import NotSampled, _probabilities, sample
from pilotlight.policy.request import Sampling

SAMPLES = 20_000
LEAST_P = 1e-6
VOCAB_SIZE = 48
LOGITS = (
    torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(17), dtype=torch.float64) * 2
)
PROMPT = [3, 9, 9, 30]
OUTPUT = [5, 9, 5, 5, 41]

SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.02},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.0, "frequency_penalty": -0.4},
    {"logit_bias": ((5, 3.0), (7, -100.0), (40, 2.5))},
    {"min_tokens": 9, "stop_token_ids": (int(LOGITS.argmax()), 5)},
    {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((2, 1.5), (9, -2.0)),
        "min_tokens": 100,
        "stop_token_ids": (11,),
    },
]


def sampling_of(settings) -> Sampling:
    return Sampling(**{"seed": 77, "max_tokens": 1000, "temperature": 1.0, **settings})


def spec_of(sampling: Sampling, position: int = len(OUTPUT)) -> SampleSpec:
    return SampleSpec(sampling, position, counts=counts_of(sampling, PROMPT, OUTPUT))


def reference(settings) -> torch.Tensor:
    """The distribution of the token after ``OUTPUT``."""
    return processed(LOGITS, PROMPT, OUTPUT, sampling_of(settings))


def processed(
    logits: torch.Tensor, prompt: list[int], output: list[int], sampling: Sampling
) -> torch.Tensor:
    """What transformers makes of logits [vocab_size], and for the penalties that it has not,
    OpenAI's formula.
    """
    ids = torch.tensor([prompt + output])
    scores = logits[None].clone()
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token_id, count in Counter(output).items():
        scores[0, token_id] -= count * sampling.frequency_penalty + sampling.presence_penalty
    rest = LogitsProcessorList()
    if sampling.logit_bias:
        rest.append(
            SequenceBiasLogitsProcessor(
                [[[token_id], bias] for token_id, bias in sampling.logit_bias]
            )
        )
    if sampling.min_tokens:
        rest.append(
            MinNewTokensLengthLogitsProcessor(
                len(prompt), sampling.min_tokens, list(sampling.stop_token_ids), device="cpu"
            )
        )
    rest.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        rest.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        rest.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        rest.append(MinPLogitsWarper(sampling.min_p))
    return rest(ids, scores)[0].softmax(dim=-1)


def p_value(seen: list[int], wanted: list[float]) -> float:
    """How probable counts are that lie at least so far from those that are expected."""
    statistic = sum(
        (count - expected) ** 2 / expected for count, expected in zip(seen, wanted, strict=True)
    )
    return float(
        torch.special.gammaincc(
            torch.tensor((len(seen) - 1) / 2.0), torch.tensor(statistic / 2.0, dtype=torch.float64)
        )
    )


def test_p_values():
    assert p_value([10, 10, 10], [10.0, 10.0, 10.0]) == 1
    assert p_value([16, 4], [10.0, 10.0]) == pytest.approx(math.erfc(math.sqrt(3.6)), rel=1e-9)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processors_leave_what_those_of_transformers_leave(settings):
    spec = spec_of(sampling_of(settings))
    logits = LOGITS[None].clone()
    adjust(logits, [spec])
    probabilities = _probabilities(logits, [spec])[0]
    assert torch.allclose(
        probabilities / probabilities.sum(), reference(settings), rtol=0, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_samples_follow_the_reference(settings):
    """The counters are other positions than the one whose distribution this is; with ``min_tokens``
    all of them are below it.
    """
    expected = reference(settings)
    sampling = sampling_of(
        {
            **settings,
            "min_tokens": SAMPLES + 100 if settings.get("min_tokens") else 0,
            "max_tokens": SAMPLES + 200,
        }
    )
    specs = [spec_of(sampling, position) for position in range(SAMPLES)]
    assert_follows(specs, expected)


def test_samples_of_many_seeds_follow_the_reference():
    """The same position of as many requests."""
    assert_follows([spec_of(sampling_of({"seed": seed})) for seed in range(SAMPLES)], reference({}))


def assert_follows(specs: list[SampleSpec], expected: torch.Tensor) -> None:
    """Chi-square test of what is sampled from ``LOGITS``."""
    counts = torch.bincount(
        torch.tensor([row.token_id for row in sample(LOGITS.expand(SAMPLES, -1), specs)]),
        minlength=VOCAB_SIZE,
    )
    assert not counts[expected == 0].any()
    # Tokens that are expected less than five times are counted together.
    rare = (expected > 0) & (expected * SAMPLES < 5)
    often = (expected > 0) & ~rare
    seen = [*counts[often].tolist(), *([int(counts[rare].sum())] if rare.any() else [])]
    wanted = [
        *(expected[often] * SAMPLES).tolist(),
        *([float(expected[rare].sum()) * SAMPLES] if rare.any() else []),
    ]
    assert len(seen) > 1
    assert p_value(seen, wanted) > LEAST_P


@pytest.mark.parametrize("kind", FAMILIES)
def test_sampled_tokens_are_those_of_transformers_with_the_same_noise(
    kind, checkpoint, driver, prompts
):
    """Penalties, positions and seeds as they are in the middle of a running engine, chunked and
    batched.
    """
    model, runs = checkpoint(kind, 1), driver(BatchLimits(step_tokens=24, running=24))
    runs.load(model)
    asked = {
        f"{index} {number}": (
            prompt,
            sampling_of({**settings, "seed": 2**63 + index, "max_tokens": 24}),
        )
        for index, prompt in enumerate(prompts)
        for number, settings in enumerate(({}, SETTINGS[6], SETTINGS[-1]))
    }
    for name, (prompt, sampling) in asked.items():
        runs.add(name, prompt, **asdict(sampling))
    for name, output in runs.finish().items():
        prompt, sampling = asked[name]
        assert len(output) == 24
        rows = model.logits([*prompt, *output])[len(prompt) - 1 : -1]
        for position, (logits, token_id) in enumerate(zip(rows, output, strict=True)):
            shares = processed(logits, prompt, output[:position], sampling).cumsum(dim=0)
            assert token_id == int((shares <= uniform(sampling.seed, position) * shares[-1]).sum())


def test_a_mixed_batch_is_its_rows_alone():
    """Every row has its own parameters, some rows are greedy, one is not finite, and there are more
    than are widened at once.
    """
    specs = [
        spec_of(sampling_of({"seed": index, **settings}))
        for index, settings in enumerate([*SETTINGS, *SETTINGS])
    ]
    specs[3] = spec_of(
        sampling_of({**SETTINGS[-1], "temperature": 0.0, "logprobs": True, "top_logprobs": 3})
    )
    specs[8] = spec_of(sampling_of({"temperature": 0.0}))
    logits = torch.randn(len(specs), VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    logits[5, 0] = math.nan
    together = sample(logits, specs)
    assert together == [sample(logits[row : row + 1], [spec])[0] for row, spec in enumerate(specs)]
    assert together[5] is NotSampled.NOT_FINITE
    assert together[8].token_id == int(logits[8].argmax())
    logprobs = logits[3].double().log_softmax(-1)
    assert [token_id for token_id, _ in together[3].top] == logprobs.argsort(descending=True)[
        :3
    ].tolist()
    assert together[3].logprob == pytest.approx(float(logprobs[together[3].token_id]), abs=1e-12)


def test_penalties_are_a_function_of_prompt_and_output():
    sampling = sampling_of({"repetition_penalty": 1.5, "frequency_penalty": 0.5})
    grown = counts_of(sampling, PROMPT, OUTPUT[:2])
    for token_id in OUTPUT[2:]:
        grown.add(token_id)
    fresh = counts_of(sampling, PROMPT, OUTPUT)
    assert (grown.prompt, grown.output) == (fresh.prompt, fresh.output)
    assert counts_of(sampling_of({}), PROMPT, OUTPUT) is None


def test_masks():
    bits = bytes([0b00000010] + [0] * 5)
    only = SampleSpec(sampling_of({}), 0, allowed=bits, may_end=False)
    end = SampleSpec(sampling_of({"stop_token_ids": (4, 999)}), 0, allowed=bytes(6))
    never = SampleSpec(sampling_of({"stop_token_ids": (4,), "min_tokens": 1}), 0, allowed=bytes(6))
    sampled = sample(LOGITS.expand(3, -1), [only, end, never])
    assert [getattr(one, "token_id", one) for one in sampled] == [1, 4, NotSampled.NOTHING_LEFT]
