"""Which checkpoints make vectors or scores, and how they say so."""

import json

import pytest

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.encoders import ENCODERS
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel
from pilotlight.checkpoint.folders import POOLING_FILE
from pilotlight.checkpoint.pooling import LENGTH_FILE, MODULES_FILE
from pilotlight.checkpoint.reader import FolderSource, MemorySource
from pilotlight.checkpoint.safetensors import SINGLE_FILE
from pilotlight.checkpoint.strict_json import CONFIG_FILE
from pilotlight.checkpoint.testing import encode_safetensors, tiny_config, tiny_files, tiny_tensors
from pilotlight.policy.model import Dtype
from pilotlight.policy.pooling import Pooling, PoolingMode, Task

_ENCODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "layer_norm_eps": 1e-12,
}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def modules(*names: str) -> bytes:
    return json.dumps(
        [{"idx": number, "type": f"a.b.{name}"} for number, name in enumerate(names)]
    ).encode()


def said(pooling: dict[str, object] | None = None, *names: str) -> dict[str, bytes]:
    return {
        MODULES_FILE: modules("Transformer", "Pooling", *names),
        POOLING_FILE: json.dumps(MEAN if pooling is None else pooling).encode(),
    }


def encoder_tensors(prefix: str = "", labels: dict[str, tuple[int, ...]] | None = None):
    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (32,), f"{name}.bias": (32,)}

    def linear(name: str, rows: int, width: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, width), f"{name}.bias": (rows,)}

    tensors = {
        "embeddings.word_embeddings.weight": (96, 32),
        "embeddings.position_embeddings.weight": (66, 32),
        "embeddings.token_type_embeddings.weight": (2, 32),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(2):
        name = f"encoder.layer.{layer}"
        for kind in ("query", "key", "value"):
            tensors |= linear(f"{name}.attention.self.{kind}", 32, 32)
        tensors |= linear(f"{name}.attention.output.dense", 32, 32)
        tensors |= norm(f"{name}.attention.output.LayerNorm")
        tensors |= linear(f"{name}.intermediate.dense", 40, 32)
        tensors |= linear(f"{name}.output.dense", 32, 40)
        tensors |= norm(f"{name}.output.LayerNorm")
    tensors |= linear("pooler.dense", 32, 32)
    return [*((prefix + name, shape) for name, shape in tensors.items()), *(labels or {}).items()]


def encoder_files(
    architecture: str = "BertModel", *, prefix: str = "", labels=None, **changes: object
) -> dict[str, bytes]:
    config = {"architectures": [architecture], **_ENCODER, **changes}
    return {
        CONFIG_FILE: json.dumps(config).encode(),
        SINGLE_FILE: encode_safetensors(encoder_tensors(prefix, labels), Dtype.FLOAT32),
    }


def test_an_encoder_that_makes_vectors():
    files = {**encoder_files(), **said(None, "Normalize")}
    spec = read_checkpoint(MemorySource(files)).spec
    assert spec.pooling == Pooling(mode=PoolingMode.MEAN, normalize=True)
    assert (spec.task, spec.max_context_tokens, spec.tensor_prefix) == (Task.EMBED, 66, "")
    parts = read_checkpoint(MemorySource(files)).manifest.parts
    assert [tensor.name for tensor in parts[-1].tensors] == [
        "encoder.layer.1.output.LayerNorm.weight",
        "encoder.layer.1.output.LayerNorm.bias",
    ], "the head is never empty, and a pooler that nothing reads is in no part"


def test_positions_of_robertas_kind_begin_behind_the_padding():
    files = {**encoder_files("RobertaModel", prefix="roberta.", pad_token_id=1), **said()}
    spec = read_checkpoint(MemorySource(files)).spec
    assert (spec.max_context_tokens, spec.tensor_prefix) == (64, "roberta.")
    assert spec.encoder is not None
    assert spec.encoder.first_position == 2


def test_texts_may_be_shorter_than_the_model_can_read():
    files = {**encoder_files(), **said(), LENGTH_FILE: b'{"max_seq_length": 20}'}
    assert read_checkpoint(MemorySource(files)).spec.max_context_tokens == 20


@pytest.mark.parametrize(
    ("activation", "sigmoid"), [(None, True), ("torch.nn.modules.linear.Identity", False)]
)
def test_a_cross_encoder_scores(activation, sigmoid):
    labels = {"classifier.weight": (1, 32), "classifier.bias": (1,)}
    files = encoder_files(
        "BertForSequenceClassification",
        prefix="bert.",
        labels=labels,
        id2label={"0": "LABEL_0"},
        sbert_ce_default_activation_function=activation,
    )
    spec = read_checkpoint(MemorySource(files)).spec
    assert spec.pooling == Pooling(mode=PoolingMode.CLS, task=Task.SCORE, sigmoid=sigmoid)


@pytest.mark.parametrize("bare", [True, False])
def test_a_decoder_that_makes_vectors_has_no_use_for_its_projection(bare):
    config = tiny_config("Qwen3ForCausalLM")
    tensors = tiny_tensors(config)
    if bare:
        config["architectures"] = ["Qwen3Model"]
        tensors = {
            name.removeprefix("model."): shape
            for name, shape in tensors.items()
            if name != "lm_head.weight"
        }
    files = {
        CONFIG_FILE: json.dumps(config).encode(),
        SINGLE_FILE: encode_safetensors(tensors.items()),
        **said({"pooling_mode_lasttoken": True}, "Normalize"),
    }
    checkpoint = read_checkpoint(MemorySource(files))
    spec = checkpoint.spec
    assert (spec.architecture, spec.task, spec.tied_embeddings) == (
        "Qwen3ForCausalLM",
        Task.EMBED,
        True,
    )
    assert spec.tensor_prefix == ("" if bare else "model.")
    names = [tensor.name for tensor in checkpoint.manifest.parts[-1].tensors]
    assert names == [f"{spec.tensor_prefix}norm.weight"]


def test_a_decoder_that_scores_by_two_tokens():
    config = tiny_config("Qwen3ForCausalLM", classifier_from_token=["no", "yes"])
    spec = read_checkpoint(MemorySource(tiny_files(config))).spec
    assert spec.pooling == Pooling(
        mode=PoolingMode.LAST, task=Task.SCORE, sigmoid=True, answers=("no", "yes")
    )


def test_a_decoder_that_says_nothing_generates():
    spec = read_checkpoint(MemorySource(tiny_files(tiny_config()))).spec
    assert (spec.task, spec.pooling) == (Task.GENERATE, None)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (encoder_files(), "no modules.json"),
        ({**encoder_files(), **said({"pooling_mode_max_tokens": True})}, "max_tokens"),
        ({**encoder_files(), **said({**MEAN, "pooling_mode_cls_token": True})}, "cls_token"),
        ({**encoder_files(), **said({"pooling_mode_lasttoken": True})}, "lasttoken"),
        ({**encoder_files(), **said(None, "Dense")}, "Dense"),
        ({**encoder_files(hidden_act="quick_gelu"), **said()}, "quick_gelu"),
        ({**encoder_files(position_embedding_type="relative_key"), **said()}, "relative_key"),
        ({**encoder_files(is_decoder=True), **said()}, "is_decoder"),
        (encoder_files("BertForSequenceClassification"), "2 labels"),
        (
            encoder_files(
                "BertForSequenceClassification",
                num_labels=1,
                sbert_ce_default_activation_function="a.Softmax",
            ),
            "Softmax",
        ),
        ({**tiny_files(tiny_config()), **said({"pooling_mode_cls_token": True})}, "cls"),
    ],
)
def test_what_the_engine_would_get_wrong_is_refused_by_name(files, named):
    with pytest.raises(UnsupportedModel, match=named):
        read_checkpoint(MemorySource(files))


@pytest.mark.parametrize(
    "files",
    [
        {**encoder_files(), MODULES_FILE: modules("Transformer", "Pooling")},
        {**encoder_files(), **said(), LENGTH_FILE: b'{"max_seq_length": 0}'},
        {**encoder_files(num_attention_heads=5), **said()},
        {**encoder_files(matryoshka_dimensions=["x"]), **said()},
        {**encoder_files(), **said(), MODULES_FILE: b"{}"},
        {
            **tiny_files(tiny_config()),
            CONFIG_FILE: json.dumps(tiny_config(classifier_from_token=["yes"])).encode(),
        },
    ],
)
def test_what_contradicts_itself_is_refused(files):
    with pytest.raises(BadCheckpoint):
        read_checkpoint(MemorySource(files))


def test_a_folder_lists_the_one_file_below_that_counts(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    source = FolderSource(tmp_path)
    listed = source.list_files()
    assert [file.name for file in listed] == [POOLING_FILE, "config.json"]
    assert source.read(listed[0], 0, 2) == b"{}"


def test_every_encoder_is_of_a_kind():
    assert {family.prefix for family in ENCODERS.values()} == {"bert.", "roberta."}
