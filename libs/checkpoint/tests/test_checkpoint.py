"""Whole checkpoints: what registration gets, and what it says of a checkpoint that does not fit its
configuration.
"""

import json

import pytest

from pilotlight.checkpoint import errors
from pilotlight.checkpoint.architectures import SUPPORTED_ARCHITECTURES
from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.errors import BadCheckpoint, CheckpointError, UnsupportedModel
from pilotlight.checkpoint.generation import GenerationDefaults
from pilotlight.checkpoint.reader import MemorySource
from pilotlight.checkpoint.safetensors import SINGLE_FILE
from pilotlight.checkpoint.testing import encode_safetensors, tiny_config, tiny_files, tiny_tensors
from pilotlight.common import errors as common_errors
from pilotlight.policy.model import Dtype, Stage


def read(files):
    return read_checkpoint(MemorySource(files))


def with_tensors(config, tensors, dtype=Dtype.BFLOAT16):
    return {
        "config.json": json.dumps(config).encode(),
        SINGLE_FILE: encode_safetensors(tensors.items(), dtype),
    }


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
@pytest.mark.parametrize("shards", [1, 7])
@pytest.mark.parametrize("tied", [False, True])
def test_a_sound_checkpoint(architecture, shards, tied):
    checkpoint = read(
        tiny_files(tiny_config(architecture, tie_word_embeddings=tied), shards=shards)
    )
    assert checkpoint.spec.architecture == architecture
    assert checkpoint.spec.tied_embeddings is tied
    assert checkpoint.manifest.spec == checkpoint.spec
    assert len(checkpoint.manifest.files) == shards
    assert checkpoint.spec.stage_bytes(Stage(0, 2)) == sum(
        part.image_bytes for part in checkpoint.manifest.parts
    )


def test_ignored_tensors_are_in_no_image():
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    plain = read(with_tensors(config, tensors))
    extra = {
        "lm_head.weight": (96, 32),
        "model.rotary_emb.inv_freq": (4,),
        "model.layers.1.self_attn.rotary_emb.inv_freq": (4,),
    }
    assert read(with_tensors(config, tensors | extra)).spec == plain.spec


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"model.norm.weight": None}, "missing: model.norm.weight"),
        ({"lm_head.weight": None}, "missing: lm_head.weight"),
        (
            {"model.layers.2.mlp.up_proj.weight": (40, 32)},
            "has no tensors such as model.layers.2.mlp.up_proj.weight",
        ),
        ({"model.layers.0.self_attn.q_proj.bias": (32,)}, "has no tensors such as"),
        ({"model.rotary_emb.inv_freq.x": (4,)}, "has no tensors such as"),
        ({"model.norm.weight": (31,)}, r"shape \[31\], the configuration says \[32\]"),
        ({"model.embed_tokens.weight": (32, 96)}, r"shape \[32, 96\]"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(change, fault):
    config = tiny_config()
    tensors = {
        name: shape for name, shape in (tiny_tensors(config) | change).items() if shape is not None
    }
    with pytest.raises(BadCheckpoint, match=fault):
        read(with_tensors(config, tensors))


def test_qwen2_without_its_biases_is_refused():
    with pytest.raises(BadCheckpoint, match=r"q_proj\.bias, .* and 3 more"):
        read(with_tensors(tiny_config("Qwen2ForCausalLM"), tiny_tensors(tiny_config())))


def test_a_missing_expert_is_named():
    config = tiny_config("Qwen3MoeForCausalLM")
    tensors = tiny_tensors(config)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(
        BadCheckpoint, match=r"missing: model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"
    ):
        read(with_tensors(config, tensors))


def test_mixed_and_quantized_element_types_are_unsupported():
    config = tiny_config()
    weights = encode_safetensors(tiny_tensors(config).items())
    files = {
        "config.json": json.dumps(config).encode(),
        SINGLE_FILE: weights.replace(b'"BF16"', b'"F16" ', 1),
    }
    with pytest.raises(UnsupportedModel, match="mixed element types"):
        read(files)
    files[SINGLE_FILE] = weights.replace(b'"BF16"', b'"I16" ')
    with pytest.raises(UnsupportedModel, match="I16"):
        read(files)


def test_files_that_are_missing_are_named():
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read({})
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        read({"config.json": json.dumps(tiny_config()).encode()})
    with pytest.raises(BadCheckpoint, match="no tensors"):
        read(with_tensors(tiny_config(), {}))


def test_auto_means_what_the_configuration_says():
    assert read(tiny_files(tiny_config(), Dtype.FLOAT32)).run_dtype is Dtype.FLOAT32
    checkpoint = read(tiny_files(tiny_config(torch_dtype="bfloat16"), Dtype.FLOAT32))
    assert (checkpoint.spec.dtype, checkpoint.run_dtype) == (Dtype.FLOAT32, Dtype.BFLOAT16)


class TestGeneration:
    def defaults(self, generation=None, **config):
        files = tiny_files(tiny_config(**config))
        if generation is not None:
            files["generation_config.json"] = json.dumps(generation).encode()
        return read(files).generation

    def test_end_tokens_come_from_the_configuration(self):
        assert self.defaults() == GenerationDefaults(eos_token_ids=(2,))
        assert self.defaults(eos_token_id=[5, 3, 5]).eos_token_ids == (5, 3)
        assert self.defaults(eos_token_id=None).eos_token_ids == ()

    def test_the_generation_configuration_goes_first(self):
        found = self.defaults(
            {"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
        )
        assert found == GenerationDefaults(
            eos_token_ids=(7, 8), temperature=0.6, top_p=0.9, top_k=20
        )
        assert self.defaults({"temperature": 1}).eos_token_ids == (2,)

    @pytest.mark.parametrize(
        "generation",
        [
            {"eos_token_id": "x"},
            {"eos_token_id": [None]},
            {"eos_token_id": -1},
            {"top_p": 2},
            {"top_k": 0.5},
            {"temperature": -1},
        ],
    )
    def test_nonsense_is_named(self, generation):
        with pytest.raises(BadCheckpoint, match=r"generation_config\.json: "):
            self.defaults(generation)

    def test_a_list_of_end_tokens_is_bounded(self):
        with pytest.raises(BadCheckpoint, match="257 entries"):
            self.defaults({"eos_token_id": list(range(257))})


def test_the_source_version_covers_weights_index_and_text_files_only():
    files = tiny_files(tiny_config(), shards=2)
    version = read(files).source_version
    assert read({**files, "README.md": b"x"}).source_version == version
    changed = [
        {**files, "tokenizer.json": b"{}"},
        {**files, "model.safetensors.index.json": files["model.safetensors.index.json"] + b" "},
    ]
    for other in changed:
        assert read(other).source_version != version


def test_text_files_that_are_present_are_listed():
    checkpoint = read({**tiny_files(tiny_config()), "tokenizer.json": b"{}", "merges.txt": b""})
    assert [file.name for file in checkpoint.text_files] == ["config.json", "tokenizer.json"]


def test_each_error_has_the_code_of_its_namesake():
    for kind in CheckpointError.__subclasses__():
        assert kind.code == getattr(common_errors, kind.__name__).code


def test_foreign_names_cannot_disturb_a_message():
    assert errors.quote("\x1b[31m\ud800") == r"'\x1b[31m\ud800'"
    assert len(errors.quote("a" * 1000)) == 120
