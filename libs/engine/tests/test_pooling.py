"""Vectors and scores are those of transformers, pooled as sentence-transformers says, however the
texts come to run.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pooled_models import VOCABULARY, save_pooled
from transformers import PreTrainedModel

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import Manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.parameters import Source
from pilotlight.engine.errors import BadRequest, ContextTooLong, UnknownInstance
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.pooling import Pooled, PoolingMode
from pilotlight.policy.request import FinishReason

TEXTS = {
    f"text {number}": [2 + (7 * index + 3 * number) % (VOCABULARY - 2) for index in range(length)]
    for number, length in enumerate((1, 9, 33, 9, 120, 40, 64))
}
TOLERANCE = 1e-5
EMBEDDERS = (
    ("bert", "mean", True),
    ("bert", "cls", True),
    ("bert_relu", "mean", False),
    ("roberta", "mean", True),
    ("roberta", "cls", False),
    ("qwen3_backbone", "lasttoken", True),
    ("qwen3_backbone", "mean", False),
    ("qwen3", "lasttoken", True),
)


@dataclass(frozen=True)
class Saved:
    """A model as it was saved: what registration reads of it, and its parts."""

    model: PreTrainedModel
    spec: ModelSpec
    parts: dict[int, dict[str, Source]]

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        backbone = getattr(self.model, "model", self.model)
        return backbone(input_ids=torch.tensor([token_ids])).last_hidden_state[0]


@pytest.fixture
def saved(tmp_path: Path):
    """saved(kind, **how): see ``save_pooled``."""

    def save(kind: str, **how: object) -> Saved:
        model = save_pooled(kind, tmp_path, **how)
        source = FolderSource(tmp_path)
        read = read_checkpoint(source)
        return Saved(model, read.spec, dict(enumerate(parts_of(source, read.manifest))))

    return save


def parts_of(source: FolderSource, manifest: Manifest):
    for part in manifest.parts:
        image = bytearray(part.image_bytes)
        for chunk in part.chunks:
            for segment in chunk.segments:
                data = source.read(
                    manifest.files[segment.file], segment.file_offset, segment.size_bytes
                )
                image[segment.image_offset : segment.image_offset + segment.size_bytes] = data
        yield {
            tensor.name: (
                tensor.dtype,
                tensor.shape,
                memoryview(image)[tensor.image_offset : tensor.image_offset + tensor.size_bytes],
            )
            for tensor in part.tensors
        }


def vector_of(output) -> list[float]:
    assert (output.code, output.finish) == ("", FinishReason.LENGTH)
    return list(struct.unpack(f"<{len(output.vector) // 4}f", output.vector))


def expected_vector(model: Saved, token_ids: list[int]) -> torch.Tensor:
    states, pooling = model.states(token_ids), model.spec.pooling
    vector = {
        PoolingMode.MEAN: lambda: states.mean(dim=0),
        PoolingMode.CLS: lambda: states[0],
        PoolingMode.LAST: lambda: states[-1],
    }[pooling.mode]()
    return vector / vector.norm() if pooling.normalize else vector


def ask(spec: ModelSpec, **asked: object) -> dict[str, object]:
    return {"max_tokens": 1, "pooled": Pooled(mode=spec.pooling.mode, **asked)}


@pytest.mark.parametrize("step_tokens", [512, 50])
@pytest.mark.parametrize(("kind", "mode", "normalize"), EMBEDDERS)
def test_vectors_are_those_of_transformers(kind, mode, normalize, step_tokens, driver, saved):
    model = saved(kind, mode=mode, normalize=normalize)
    runs = driver(BatchLimits(step_tokens=step_tokens, running=8))
    runs.load(model)
    for name, text in TEXTS.items():
        runs.add(name, text, **ask(model.spec))
    runs.finish()
    for name, text in TEXTS.items():
        expected = expected_vector(model, text).tolist()
        assert vector_of(runs.outputs[name]) == pytest.approx(expected, abs=TOLERANCE), name


def test_a_vector_is_cut_and_made_of_length_1_again(driver, saved):
    model = saved("bert", mode="mean")
    runs = driver()
    runs.load(model)
    runs.add("cut", TEXTS["text 2"], **ask(model.spec, dimensions=16))
    runs.finish()
    first = expected_vector(model, TEXTS["text 2"])[:16]
    expected = (first / first.norm()).tolist()
    assert vector_of(runs.outputs["cut"]) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["bert_cross", "xlm_roberta_cross"])
def test_scores_are_those_of_transformers(kind, driver, saved):
    model = saved(kind)
    runs = driver()
    runs.load(model)
    for name, text in TEXTS.items():
        second = len(text) // 2 if kind == "bert_cross" else None
        runs.add(name, text, **ask(model.spec, second_starts=second))
    runs.finish()
    for name, text in TEXTS.items():
        types = torch.zeros(1, len(text), dtype=torch.long)
        if kind == "bert_cross":
            types[:, len(text) // 2 :] = 1
        with torch.inference_mode():
            logits = model.model(input_ids=torch.tensor([text]), token_type_ids=types).logits
        expected = logits.sigmoid().flatten().tolist()
        assert vector_of(runs.outputs[name]) == pytest.approx(expected, abs=TOLERANCE), name


def test_a_decoder_scores_by_two_tokens(driver, saved):
    model = saved("qwen3_reranker")
    runs = driver(BatchLimits(step_tokens=50, running=4))
    runs.load(model)
    for name, text in TEXTS.items():
        runs.add(name, text, **ask(model.spec, answers=(11, 17)))
    runs.finish()
    for name, text in TEXTS.items():
        with torch.inference_mode():
            logits = model.model(input_ids=torch.tensor([text])).logits[0, -1]
        expected = logits[[11, 17]].softmax(dim=-1)[1].item()
        assert vector_of(runs.outputs[name]) == [pytest.approx(expected, abs=1e-3)], name


def test_a_text_of_an_encoder_runs_whole_and_nothing_of_it_is_found_again(driver, saved):
    model = saved("bert", mode="mean")
    runs = driver(BatchLimits(step_tokens=40, running=8))
    runs.load(model)
    for name in ("first", "second"):
        runs.add(name, TEXTS["text 4"], **ask(model.spec))
    assert runs.step().batch_tokens == 120, "longer than a step: it runs alone"
    assert runs.step().batch_tokens == 120
    assert vector_of(runs.outputs["first"]) == vector_of(runs.outputs["second"])
    assert runs.outputs["second"].cached_tokens == 0


def test_a_decoder_that_takes_the_last_state_shares_prefixes(driver, saved):
    model = saved("qwen3", mode="lasttoken")
    runs = driver()
    runs.load(model)
    runs.add("first", TEXTS["text 6"], **ask(model.spec))
    runs.finish()
    runs.add("second", TEXTS["text 6"], **ask(model.spec))
    runs.finish()
    assert runs.outputs["second"].cached_tokens == 48
    first, second = vector_of(runs.outputs["first"]), vector_of(runs.outputs["second"])
    assert first == pytest.approx(second, abs=TOLERANCE)


def test_a_text_may_fill_the_context_and_not_go_beyond(driver, saved):
    model = saved("roberta", mode="mean")
    runs = driver()
    runs.load(model)
    most = model.spec.max_context_tokens
    assert most == 128, "two of the 130 positions are before the first token's"
    runs.add("full", [5] * most, **ask(model.spec))
    runs.finish()
    expected = expected_vector(model, [5] * most).tolist()
    assert vector_of(runs.outputs["full"]) == pytest.approx(expected, abs=TOLERANCE)
    with pytest.raises(ContextTooLong):
        runs.add("longer", [5] * (most + 1), **ask(model.spec))


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 1},
        {"max_tokens": 2, "pooled": Pooled(mode=PoolingMode.MEAN)},
        {"max_tokens": 1, "pooled": Pooled(mode=PoolingMode.CLS)},
        {"max_tokens": 1, "pooled": Pooled(mode=PoolingMode.MEAN, dimensions=49)},
        {"max_tokens": 1, "pooled": Pooled(mode=PoolingMode.MEAN, answers=(1, 2))},
        {"max_tokens": 1, "pooled": Pooled(mode=PoolingMode.MEAN, second_starts=10)},
        {"max_tokens": 1, "pooled": Pooled(mode=PoolingMode.MEAN), "prompt_logprobs": 1},
    ],
)
def test_what_the_model_does_not_give_is_refused(sampling, driver, saved):
    runs = driver()
    runs.load(saved("bert", mode="mean"))
    with pytest.raises(BadRequest):
        runs.add("x", TEXTS["text 1"], **sampling)


def test_vectors_of_a_model_that_generates_are_refused(driver, checkpoint):
    runs = driver()
    runs.load(checkpoint("llama"))
    with pytest.raises(BadRequest, match="task is generate"):
        runs.add("x", [1, 2], max_tokens=1, pooled=Pooled(mode=PoolingMode.LAST))


def test_a_part_of_a_model_makes_no_vectors(driver, saved):
    model = saved("qwen3", mode="lasttoken")
    runs = driver()
    runs.load(model, stage=Stage(0, 1))
    with pytest.raises(UnknownInstance):
        runs.add("x", [1, 2], **ask(model.spec))


def test_a_vector_that_is_no_number_is_an_error(driver, saved):
    model = saved("bert", mode="mean")
    name = "embeddings.LayerNorm.bias"
    dtype, shape, data = model.parts[0][name]
    model.parts[0][name] = (dtype, shape, memoryview(b"\x00\x00\xc0\x7f" * (len(data) // 4)))
    runs = driver()
    runs.load(model)
    runs.add("x", TEXTS["text 1"], **ask(model.spec))
    runs.finish()
    assert runs.outputs["x"].finish is FinishReason.ERROR


def test_bfloat16_comes_close(driver, saved):
    model = saved("bert", mode="mean")
    runs = driver()
    runs.load(model, dtype=Dtype.BFLOAT16)
    runs.add("x", TEXTS["text 2"], **ask(model.spec))
    runs.finish()
    vector = torch.tensor(vector_of(runs.outputs["x"]))
    assert torch.dot(vector, expected_vector(model, TEXTS["text 2"])) > 0.99
