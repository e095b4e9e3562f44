"""config.json to ModelSpec: every family, both generations of transformers, and what is refused."""

import json
import math
from dataclasses import replace

import pytest

from pilotlight.checkpoint.config import declared_dtype, parse_config
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel
from pilotlight.checkpoint.testing import tiny_config
from pilotlight.policy.model import Dtype, Experts, RopeKind, RopeScaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_tokens=64
)


LINEAR = {"rope_type": "linear", "factor": 8.0}
MOE = tiny_config("Qwen3MoeForCausalLM")
SLIDING = "sliding_attention"
FULL = "full_attention"


def spec_of(architecture="LlamaForCausalLM", **changes):
    return parse_config(json.dumps(tiny_config(architecture, **changes)).encode(), Dtype.BFLOAT16)


def test_llama():
    spec = spec_of()
    assert (spec.architecture, spec.dtype, spec.num_layers, spec.hidden_size) == (
        "LlamaForCausalLM",
        Dtype.BFLOAT16,
        2,
        32,
    )
    assert (spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        40,
        4,
        2,
        8,
    )
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
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            1e6,
            None,
        ),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, SCALING),
        ({"rope_theta": 2e4, "rope_parameters": {"rope_type": "default"}}, 2e4, None),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, 10000.0, SCALING),
    ],
)
def test_rotary_settings_of_either_generation(changes, theta, scaling):
    spec = spec_of(**changes)
    assert (spec.rope_theta, spec.rope_scaling) == (theta, scaling)


def test_the_original_context_defaults_to_the_context():
    scaling = spec_of(
        rope_scaling={**LLAMA3, "original_max_position_embeddings": None}
    ).rope_scaling
    assert scaling is not None
    assert scaling.original_max_position_tokens == 128


def test_yarn():
    def scaling(**changes):
        yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **changes}
        return spec_of("Qwen2ForCausalLM", rope_scaling=yarn).rope_scaling

    plain = scaling()
    assert plain == RopeScaling(
        kind=RopeKind.YARN,
        factor=4.0,
        original_max_position_tokens=32,
        attention_factor=pytest.approx(0.1 * math.log(4) + 1),
    )
    assert scaling(factor=None) == plain, "the context over the original one"
    assert scaling(beta_fast=16, beta_slow=2, truncate=False) == replace(
        plain, beta_fast=16.0, beta_slow=2.0, truncate=False
    )
    assert scaling(attention_factor=1.5) == replace(plain, attention_factor=1.5)
    assert scaling(mscale=1.0, mscale_all_dim=1.0) == replace(plain, attention_factor=1.0)
    with pytest.raises(BadCheckpoint, match="rope_theta is not greater than 1"):
        spec_of(rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 4.0})


def test_linear_scaling():
    assert spec_of(rope_scaling={"type": "linear", "factor": 2.5}).rope_scaling == RopeScaling(
        kind=RopeKind.LINEAR, factor=2.5
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "window_tokens", "layers"),
    [
        ("MistralForCausalLM", {}, 4096, (0, 1, 2, 3)),
        ("MistralForCausalLM", {"sliding_window": 64}, 64, (0, 1, 2, 3)),
        ("MistralForCausalLM", {"sliding_window": "null"}, None, ()),
        (
            "MistralForCausalLM",
            {"sliding_window": 64, "layer_types": [SLIDING] * 4},
            64,
            (0, 1, 2, 3),
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 64}, None, ()),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 64}, None, ()),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
            64,
            (3,),
        ),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "layer_types": [FULL, SLIDING, FULL, SLIDING]},
            4096,
            (1, 3),
        ),
        ("Qwen3ForCausalLM", {"layer_types": [FULL] * 4}, None, ()),
        (
            "Qwen3MoeForCausalLM",
            {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 4},
            None,
            (),
        ),
        (
            "Qwen3MoeForCausalLM",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
            64,
            (0, 1, 2, 3),
        ),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, 16, (0, 1, 3)),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": None}, 16, (0, 1, 2, 3)),
        ("Gemma3ForCausalLM", {"layer_types": [FULL, FULL, SLIDING, FULL]}, 16, (2,)),
        ("LlamaForCausalLM", {"sliding_window": 64, "layer_types": [FULL] * 4}, None, ()),
    ],
)
def test_sliding_windows_follow_each_familys_rule(architecture, changes, window_tokens, layers):
    config = tiny_config(architecture, num_hidden_layers=4, **changes)
    if config.get("sliding_window") == "null":
        config["sliding_window"] = None
    spec = parse_config(json.dumps(config).encode(), Dtype.BFLOAT16)
    assert (spec.sliding_window_tokens, spec.sliding_layers) == (window_tokens, layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": LINEAR},
        {"rope_local_base_freq": 5e3, "rope_scaling": LINEAR},
        {
            "rope_parameters": {
                FULL: {"rope_theta": 1e6, **LINEAR},
                SLIDING: {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ],
)
def test_gemma_turns_its_sliding_layers_by_a_base_of_their_own(changes):
    spec = spec_of("Gemma3ForCausalLM", **changes)
    assert (spec.rope_theta, spec.sliding_rope_theta) == (1e6, 5e3)
    assert spec.rope_scaling == RopeScaling(kind=RopeKind.LINEAR, factor=8.0)


def test_gemma_by_its_defaults():
    spec = spec_of("Gemma3ForCausalLM", head_dim=None)
    assert (spec.head_dim, spec.tied_embeddings, spec.attention_scale) == (256, True, 1 / 16)
    assert (spec.rope_theta, spec.sliding_rope_theta, spec.logit_softcap) == (1e6, 1e4, None)
    told = spec_of(
        "Gemma3ForCausalLM",
        tie_word_embeddings=False,
        query_pre_attn_scalar=64,
        final_logit_softcapping=30.0,
    )
    assert (told.tied_embeddings, told.attention_scale, told.logit_softcap) == (False, 1 / 8, 30.0)
    assert (
        told.part_bytes[1] - spec_of("LlamaForCausalLM", intermediate_size=40).part_bytes[1]
        == 4 * 64
    )


def test_qwen3_norms_heads_of_128_by_default():
    spec = spec_of("Qwen3ForCausalLM", head_dim=None)
    assert (spec.head_dim, spec.attention_bias) == (128, False)
    assert spec_of("Qwen3MoeForCausalLM").head_dim == 8


def test_experts():
    spec = spec_of(
        "Qwen3MoeForCausalLM",
        num_hidden_layers=5,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        norm_topk_prob=True,
    )
    assert spec.experts == Experts(
        num_experts=3, experts_per_token=2, intermediate_size=12, normalized=True, layers=(1,)
    )
    dense, sparse = spec.part_bytes[1], spec.part_bytes[2]
    matrices, router = 3 * 32 * 2, 192
    assert sparse - dense == router + 3 * 12 * matrices - 40 * matrices
    assert (
        spec_of("Qwen3MoeForCausalLM", num_experts=None, num_local_experts=2).experts.num_experts
        == 2
    )
    assert spec_of().experts is None


def test_mistral_has_no_biases_whatever_the_configuration_says():
    assert not spec_of("MistralForCausalLM", attention_bias=True).attention_bias


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported; supported are LlamaForCausalLM, ",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "architecture Gemma3ForConditionalGeneration is not supported",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"layer_types": [FULL, SLIDING]}, "layer_types with sliding_attention"),
        ({"layer_types": [FULL, "chunked_attention"]}, "layer_types chunked_attention"),
        ({"layer_types": [[]]}, "layer_types of type list"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": [SLIDING, FULL]},
            "layer_types with full_attention",
        ),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling type 'longrope'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling type 'dynamic'"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "differ by layer"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {SLIDING: LINEAR}},
            "rope_scaling type 'linear' for sliding_attention",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": LINEAR},
            "rope_parameters for rope_type",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"},
            r"gelu \(hidden_activation\)",
        ),
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
        ({"layer_types": [FULL]}, "layer_types has 1 entries for 2 layers"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": [FULL, SLIDING]},
            "use_sliding_window is not true",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window is not within",
        ),
        ({**MOE, "num_experts_per_tok": 4}, "num_experts_per_tok"),
        ({**MOE, "num_experts": None}, "num_local_experts is missing"),
        ({**MOE, "num_experts": 1 << 16}, "num_experts is not within"),
        ({**MOE, "mlp_only_layers": [True]}, "mlp_only_layers"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_nonsense_is_named(changes, fault):
    with pytest.raises(BadCheckpoint, match=fault):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, Dtype.BFLOAT16),
        ({"torch_dtype": "torch.float16"}, Dtype.FLOAT16),
    ],
)
def test_declared_dtype(changes, dtype):
    assert declared_dtype(json.dumps(tiny_config(**changes)).encode()) is dtype


def test_a_dtype_that_no_engine_runs_is_refused():
    with pytest.raises(UnsupportedModel, match="int8"):
        declared_dtype(json.dumps(tiny_config(dtype="int8")).encode())
