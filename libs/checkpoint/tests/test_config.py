"""config.json to ModelSpec: both families, both generations of transformers, and what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.checkpoint.config import declared_dtype, parse_config
from pilotlight.checkpoint.errors import BadCheckpoint, CheckpointError, UnsupportedModel
from pilotlight.checkpoint.testing import tiny_config
from pilotlight.policy.types import Dtype, RopeScaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_tokens=64)


def spec_of(architecture="LlamaForCausalLM", **changes):
    return parse_config(json.dumps(tiny_config(architecture, **changes)).encode(), Dtype.BFLOAT16)


def test_llama():
    spec = spec_of()
    assert (spec.architecture, spec.dtype, spec.num_layers, spec.hidden_size) == ("LlamaForCausalLM", Dtype.BFLOAT16, 2, 32)
    assert (spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (40, 4, 2, 8)
    assert (spec.vocab_size, spec.max_context_tokens, spec.rms_norm_eps) == (96, 128, 1e-5)
    assert (spec.rope_theta, spec.rope_scaling) == (10000.0, None)
    assert (spec.tied_embeddings, spec.attention_bias) == (False, False)
    assert len(spec.part_bytes) == 4


def test_qwen2_has_biases_without_saying_so():
    assert spec_of("Qwen2ForCausalLM").attention_bias
    assert spec_of("Qwen2ForCausalLM").part_bytes[1] == spec_of().part_bytes[1] + 64 + 64 + 64


def test_llama_with_attention_bias_has_four_biases():
    assert spec_of(attention_bias=True).part_bytes[1] == spec_of().part_bytes[1] + 4 * 64


def test_tied_embeddings_leave_the_norm_alone_in_the_head():
    spec = spec_of(tie_word_embeddings=True)
    assert spec.part_bytes == (96 * 32 * 2, *spec_of().part_bytes[1:3], 64)


def test_head_dim_need_not_divide_the_hidden_size():
    assert spec_of(head_dim=16).head_dim == 16
    assert spec_of(hidden_size=30, head_dim=8).head_dim == 8
    with pytest.raises(BadCheckpoint, match="hidden_size"):
        spec_of(hidden_size=30)
    with pytest.raises(BadCheckpoint, match="odd"):
        spec_of(head_dim=7)


def test_every_head_has_keys_of_its_own_by_default():
    assert spec_of(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": None}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_scaling": LLAMA3}, 10000.0, SCALING),
        ({"rope_scaling": {"rope_type": "default"}}, 10000.0, None),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, SCALING),
        ({"rope_theta": 2e4, "rope_parameters": {"rope_type": "default"}}, 2e4, None),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, 10000.0, SCALING),
    ],
)
def test_rotary_settings_of_either_generation(changes, theta, scaling):
    spec = spec_of(**changes)
    assert (spec.rope_theta, spec.rope_scaling) == (theta, scaling)


def test_the_original_context_defaults_to_the_context():
    scaling = spec_of(rope_scaling={**LLAMA3, "original_max_position_embeddings": None}).rope_scaling
    assert scaling is not None
    assert scaling.original_max_position_tokens == 128


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, Qwen2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": [[]]}, "layers of type list"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer"),
    ],
)
def test_what_the_engine_would_get_wrong_is_refused_by_name(changes, fault):
    with pytest.raises(UnsupportedModel, match=fault):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is not a list"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size is not within"),
        ({"hidden_size": 1 << 60}, "hidden_size is not within"),
        ({"hidden_size": True}, "hidden_size is not an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is not a number"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_scaling": 3}, "rope_scaling is not an object"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "contradict"),
        ({"tie_word_embeddings": 1}, "neither true nor false"),
        ({"hidden_act": 1}, "hidden_act is not a string"),
    ],
)
def test_nonsense_is_named(changes, fault):
    with pytest.raises(BadCheckpoint, match=fault):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, None), ({"dtype": "bfloat16"}, Dtype.BFLOAT16), ({"torch_dtype": "torch.float16"}, Dtype.FLOAT16)],
)
def test_declared_dtype(changes, dtype):
    assert declared_dtype(json.dumps(tiny_config(**changes)).encode()) is dtype


def test_a_dtype_that_no_engine_runs_is_refused():
    with pytest.raises(UnsupportedModel, match="int8"):
        declared_dtype(json.dumps(tiny_config(dtype="int8")).encode())


KEYS = [*tiny_config(), "head_dim", "rope_scaling", "rope_parameters", "attention_bias", "layer_types", "hidden_act", "dtype"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4))
def test_any_configuration_gives_a_spec_or_a_checkpoint_error(changes):
    data = json.dumps({**tiny_config(), **changes}).encode()
    try:
        spec = parse_config(data, Dtype.FLOAT32)
        declared_dtype(data)
    except CheckpointError:
        return
    assert len(spec.part_bytes) == spec.num_layers + 2
