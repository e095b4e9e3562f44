"""The engine against transformers, on random weights: every family, in float64 to the last token,
in narrower dtypes to a tie.
"""

import pytest
import torch
from families import FAMILIES

from pilotlight.checkpoint.architectures import SUPPORTED_ARCHITECTURES, expected_parts
from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.models.registry import DECODERS, decoder_of
from pilotlight.policy.model import Dtype

KINDS = [
    *FAMILIES,
    "llama-head-dim",
    "llama-tied",
    "llama-bias",
    "llama-linear",
    "llama-yarn",
    "mistral-tied",
    "qwen2-tied",
    "qwen3-tied",
    "qwen3-moe-tied",
    "gemma3-untied",
]
NEAR_TIE = 8.0
"""A token may differ where the reference's best two logits lie closer together than this many times
its logits' error."""


@pytest.mark.parametrize(
    ("kind", "seed"),
    [*((kind, 0) for kind in KINDS), *((kind, seed) for kind in FAMILIES for seed in (1, 2))],
)
def test_greedy_tokens_equal_transformers(kind, seed, checkpoint, driver, prompts):
    model = checkpoint(kind, seed)
    runs = driver(BatchLimits(step_tokens=32, running=32))
    runs.load(model)
    for index, prompt in enumerate(prompts):
        runs.add(str(index), prompt, max_tokens=64)
    outputs = runs.finish()
    assert runs.most_running == len(prompts)
    for index, prompt in enumerate(prompts):
        assert len(outputs[str(index)]) == 64
        assert outputs[str(index)] == model.would_say(prompt, outputs[str(index)])
    assert len({token_id for output in outputs.values() for token_id in output}) > 20, (
        "outputs that repeat themselves prove little"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_close_to_transformers(kind, checkpoint, chain, prompts):
    model = checkpoint(kind)
    whole = chain(model, 1, 16)
    # In chunks, the last of a single token, on blocks that do not lie side by side.
    blocks, prompt = (9, 2, 14, 5, 11), prompts[2]
    chunks = [(start, min(3, len(prompt) - start)) for start in range(0, len(prompt), 3)]
    assert chunks[-1] == (69, 1)
    rows = [
        whole.run([Segment(start, count, blocks, True)], prompt[start : start + count])
        for start, count in chunks
    ]
    ends = [start + count - 1 for start, count in chunks]
    torch.testing.assert_close(torch.cat(rows), model.logits(prompt)[ends], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_depend_on_the_batch(temperature, kind, checkpoint, driver, prompts):
    together = driver()
    together.load(checkpoint(kind))
    for index, prompt in enumerate(prompts):
        together.add(str(index), prompt, temperature=temperature, seed=index)
    outputs = together.finish()
    for index, prompt in enumerate(prompts):
        alone = driver(BatchLimits(step_tokens=3, running=3))
        alone.load(checkpoint(kind))
        alone.add(str(index), prompt, temperature=temperature, seed=index)
        assert alone.finish()[str(index)] == outputs[str(index)]


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("kind", FAMILIES)
def test_narrow_dtypes_leave_transformers_at_near_ties_only(
    kind, dtype, checkpoint, chain, prompts, first_differences
):
    model = checkpoint(kind, 0, dtype)
    exact = model.converted(Dtype.FLOAT64)
    for index, (output, logits) in enumerate(chain(model, 2).greedy_with_logits(prompts, 64)):
        token_ids = [*prompts[index], *output]
        reference = model.logits(token_ids)
        assert logits.dtype is reference.dtype
        # What the dtype costs transformers itself: a fault of the engine cannot widen its own
        # bound.
        error = float((reference.double() - exact.logits(token_ids)).abs().max())
        told = reference[len(prompts[index]) - 1 : -1]
        step = next(
            (step for step, token_id in enumerate(output) if int(told[step].argmax()) != token_id),
            64,
        )
        common = slice(0, step + 1)
        assert (
            float((logits[common].double() - told[common].double()).abs().max()) < NEAR_TIE * error
        )
        where = ""
        if step < 64:
            best, second = told[step].double().topk(2).values.tolist()
            assert best - second < NEAR_TIE * error
            where = f"{kind} {index} at {step} (gap {best - second:.2g}, error {error:.2g})"
        first_differences.setdefault(dtype.value, []).append(where)


def test_float16_follows_transformers(checkpoint, chain, prompts):
    model = checkpoint("llama3", 0, Dtype.FLOAT16)
    logits = chain(model, 2, 16).run([Segment(0, len(prompts[1]), (3, 8), True)], prompts[1])
    expected = model.logits(prompts[1])[-1:]
    assert logits.dtype is expected.dtype
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_what_registration_takes_the_engine_runs():
    assert set(SUPPORTED_ARCHITECTURES) == set(DECODERS)


def test_every_architecture_is_tried(checkpoint):
    assert {checkpoint(kind).spec.architecture for kind in FAMILIES} == set(DECODERS)


@pytest.mark.parametrize("kind", KINDS)
def test_registration_and_engine_agree_on_every_tensor(kind, checkpoint):
    model = checkpoint(kind)
    decoder = decoder_of(model.spec)
    for part, expected in enumerate(expected_parts(model.spec)):
        assert {
            decoder.prefix(part) + name: shape for name, shape in decoder.shapes(part).items()
        } == expected
        assert {name: shape for name, (_, shape, _) in model.parts[part].items()} == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_transformers_saves_can_be_registered(kind, checkpoint, tmp_path):
    model = checkpoint(kind)
    model.model.save_pretrained(tmp_path)
    read = read_checkpoint(FolderSource(tmp_path))
    assert read.spec == model.spec
    for part, stored in enumerate(read.manifest.parts):
        assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored.tensors} == {
            name: (dtype, shape) for name, (dtype, shape, _) in model.parts[part].items()
        }
