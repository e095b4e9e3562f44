"""The engine against transformers, in float64 on random weights."""

import pytest
import torch

from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.scheduler import BatchLimits
from pilotlight.policy.types import Dtype

KINDS = ["llama", "llama-head-dim", "llama-tied", "llama-bias", "llama3", "qwen2", "qwen2-tied"]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers(kind, seed, checkpoint, driver, prompts):
    model = checkpoint(kind, seed)
    runs = driver(BatchLimits(prefill_tokens=32))
    runs.load(model)
    for index, prompt in enumerate(prompts):
        runs.add(str(index), prompt, max_tokens=32)
    outputs = runs.finish()
    assert runs.most_running == len(prompts)
    expected = {str(index): model.greedy(prompt, 32) for index, prompt in enumerate(prompts)}
    assert outputs == expected
    assert len({token_id for output in expected.values() for token_id in output}) > 20, (
        "outputs that repeat themselves prove little"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_close_to_transformers(kind, checkpoint, chain, prompts):
    model = checkpoint(kind)
    whole = chain(model, 1, 16)
    # Every prefix of the prompt in its own chunk, on blocks that do not lie side by side.
    blocks, prompt = (9, 2, 14, 5, 11), prompts[2]
    rows = [
        whole.run([Segment(start, min(7, len(prompt) - start), blocks, True)], prompt[start : start + 7])
        for start in range(0, len(prompt), 7)
    ]
    ends = [min(start + 7, len(prompt)) - 1 for start in range(0, len(prompt), 7)]
    torch.testing.assert_close(torch.cat(rows), model.logits(prompt)[ends], rtol=0, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_depend_on_the_batch(temperature, checkpoint, driver, prompts):
    together = driver()
    together.load(checkpoint("llama"))
    for index, prompt in enumerate(prompts):
        together.add(str(index), prompt, temperature=temperature, seed=index)
    outputs = together.finish()
    for index, prompt in enumerate(prompts):
        alone = driver(BatchLimits(prefill_tokens=3))
        alone.load(checkpoint("llama"))
        alone.add(str(index), prompt, temperature=temperature, seed=index)
        assert alone.finish()[str(index)] == outputs[str(index)]


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
def test_narrow_dtypes_follow_transformers(dtype, checkpoint, chain, prompts):
    model = checkpoint("llama3", 0, dtype)
    logits = chain(model, 2, 16).run([Segment(0, len(prompts[1]), (3, 8), True)], prompts[1])
    expected = model.logits(prompts[1])[-1:]
    assert logits.dtype is expected.dtype
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
