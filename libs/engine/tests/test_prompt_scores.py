"""Log probabilities of prompts are those of transformers, however the prompt came to run."""

import pytest
import torch
from families import FAMILIES

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.errors import BadRequest
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import MAX_PROMPT_VALUES

PROMPT = [(7 * index) % 199 for index in range(45)]
TOLERANCE = {Dtype.FLOAT64: 1e-9, Dtype.FLOAT32: 2e-3}
"""Logits of these checkpoints are in the hundreds: float32 has seven digits of them."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_are_scored_as_by_transformers(kind, dtype, driver, checkpoint):
    model = checkpoint(kind, dtype=dtype)
    runs = driver(BatchLimits(step_tokens=20, running=4))
    runs.load(model)
    runs.add("beside", [5, 6, 7], max_tokens=8)
    runs.add("scored", PROMPT, max_tokens=3, prompt_logprobs=3)
    runs.finish()
    told = runs.outputs["scored"].prompt
    assert told is not None
    assert runs.outputs["beside"].prompt is None
    expected = model.logits(PROMPT).double().log_softmax(dim=-1)[:-1]
    chosen = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])
    assert list(told.logprobs) == pytest.approx(chosen[:, 0].tolist(), abs=TOLERANCE[dtype])
    top = expected.topk(3)
    values = [value for place in told.top for _, value in place]
    assert values == pytest.approx(top.values.flatten().tolist(), abs=TOLERANCE[dtype])
    if dtype is Dtype.FLOAT64:
        assert [[token_id for token_id, _ in place] for place in told.top] == top.indices.tolist()
        assert list(told.ranks) == ((expected > chosen).sum(dim=-1) + 1).tolist()
    for token_id, logprob, rank, place in zip(
        PROMPT[1:], told.logprobs, told.ranks, told.top, strict=True
    ):
        assert (rank == 1) == (place[0] == (token_id, logprob)), "the same figure, to the last bit"


def test_a_cached_prefix_is_run_again_to_be_scored_and_told_to_others(driver, checkpoint):
    runs = driver()
    runs.load(checkpoint("llama"))
    runs.add("first", PROMPT, max_tokens=2)
    runs.finish()
    runs.add("scored", PROMPT, max_tokens=2, prompt_logprobs=0)
    runs.add("second", PROMPT, max_tokens=2)
    runs.finish()
    cached = {name: output.cached_tokens for name, output in runs.outputs.items()}
    assert cached == {"first": 0, "scored": 0, "second": 32}
    told = runs.outputs["scored"].prompt
    assert told is not None
    assert (len(told.logprobs), set(told.top)) == (len(PROMPT) - 1, {()})
    assert runs.outputs["scored"].token_ids == runs.outputs["second"].token_ids


def test_a_preempted_prompt_is_scored_once(driver, checkpoint):
    model = checkpoint("llama")
    runs = driver(BatchLimits(step_tokens=20, running=4))
    runs.load(model, kv_tokens=16 * 7)
    prompts = {name: [*PROMPT[:30], index] for index, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        runs.add(name, prompt, max_tokens=60, prompt_logprobs=1)
    runs.finish()
    assert runs.preemptions > 0
    for name, prompt in prompts.items():
        expected = model.logits(prompt).double().log_softmax(dim=-1)[:-1]
        chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert list(runs.outputs[name].prompt.logprobs) == pytest.approx(chosen, abs=1e-9)


def test_a_prompt_of_one_token_has_nothing_to_score(driver, checkpoint):
    runs = driver()
    runs.load(checkpoint("llama"))
    runs.add("one", [5], max_tokens=1, prompt_logprobs=2)
    runs.finish()
    assert runs.outputs["one"].prompt.logprobs == ()


def test_more_than_a_message_holds_is_refused(driver, checkpoint):
    runs = driver()
    runs.load(checkpoint("llama"))
    for wanted in (-1, 21):
        with pytest.raises(BadRequest, match="prompt_logprobs"):
            runs.add("x", PROMPT, prompt_logprobs=wanted)
    assert MAX_PROMPT_VALUES > 100_000
