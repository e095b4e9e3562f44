"""Tiny random models of every kind, made by transformers."""

from collections.abc import Callable
from copy import deepcopy

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NUM_LAYERS = 4
SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "sdpa",
}
WINDOW_TOKENS = 20
"""Fewer than the longest prompt has, and no whole number of blocks."""
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
}
ROPE_YARN_IN_FULL = {
    **ROPE_YARN,
    "beta_fast": 4.0,
    "beta_slow": 0.8,
    "truncate": False,
    "mscale": 0.7,
    "mscale_all_dim": 0.4,
}
ROPE_GEMMA = {"full_attention": {**ROPE_LINEAR, "rope_theta": 1e6}, "sliding_attention": ROPE}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS}
EXPERTS = {
    "experts_implementation": "eager",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
}


def made(
    model: type[PreTrainedModel], config: type, /, **settings: object
) -> Callable[[], PreTrainedModel]:
    return lambda: model(config(**{**SIZES, "rope_parameters": ROPE, **deepcopy(settings)}))


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": made(LlamaForCausalLM, LlamaConfig),
    "llama-head-dim": made(LlamaForCausalLM, LlamaConfig, head_dim=20),
    "llama-tied": made(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True),
    "llama-bias": made(LlamaForCausalLM, LlamaConfig, attention_bias=True),
    "llama3": made(
        LlamaForCausalLM, LlamaConfig, rope_parameters=ROPE_LLAMA3, tie_word_embeddings=True
    ),
    "llama-linear": made(LlamaForCausalLM, LlamaConfig, rope_parameters=ROPE_LINEAR),
    "llama-yarn": made(LlamaForCausalLM, LlamaConfig, rope_parameters=ROPE_YARN_IN_FULL),
    "mistral": made(MistralForCausalLM, MistralConfig, sliding_window=WINDOW_TOKENS),
    "mistral-tied": made(
        MistralForCausalLM, MistralConfig, sliding_window=None, tie_word_embeddings=True
    ),
    "qwen2": made(Qwen2ForCausalLM, Qwen2Config),
    "qwen2-tied": made(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True),
    "qwen2-window": made(Qwen2ForCausalLM, Qwen2Config, **WINDOWS, max_window_layers=1),
    "qwen3": made(Qwen3ForCausalLM, Qwen3Config, head_dim=16, rope_parameters=ROPE_YARN),
    "qwen3-tied": made(
        Qwen3ForCausalLM, Qwen3Config, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3-moe": made(
        Qwen3MoeForCausalLM, Qwen3MoeConfig, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen3-moe-tied": made(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        **EXPERTS,
        **WINDOWS,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
    ),
    "gemma3": made(Gemma3ForCausalLM, Gemma3TextConfig, **GEMMA, rope_parameters=ROPE_GEMMA),
    "gemma3-untied": made(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        **{
            **GEMMA,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
        },
        rope_parameters=ROPE_GEMMA,
    ),
}
