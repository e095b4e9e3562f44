"""The ten models of MEDUSA's Table 1, as shapes of ``bench/engine_gpu_weights.py``.

Falcon has no decoder here: Mistral 7B stands in its place. The context is the shortest of the ten
models'.
"""

from typing import Any

LLAMA, MISTRAL, QWEN2 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"


def _shape(
    architecture: str,
    vocab_size: int,
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    intermediate: int,
) -> dict[str, Any]:
    """``heads``: of queries, and of keys and values."""
    return {
        "architecture": architecture,
        "vocab_size": vocab_size,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": hidden // heads[0],
        "intermediate_size": intermediate,
        "max_context_tokens": 4096,
    }


MEDUSA_SHAPES = {
    "mistral-7b": _shape(MISTRAL, 32_000, 32, 4096, (32, 8), 14_336),
    "llama2-7b": _shape(LLAMA, 32_000, 32, 4096, (32, 32), 11_008),
    "llama2-13b": _shape(LLAMA, 32_000, 40, 5120, (40, 40), 13_824),
    "qwen1.5-0.5b": _shape(QWEN2, 151_936, 24, 1024, (16, 16), 2816),
    "qwen1.5-1.8b": _shape(QWEN2, 151_936, 24, 2048, (16, 16), 5504),
    "qwen1.5-4b": _shape(QWEN2, 151_936, 40, 2560, (20, 20), 6912),
    "qwen1.5-7b": _shape(QWEN2, 151_936, 32, 4096, (32, 32), 11_008),
    "qwen1.5-14b": _shape(QWEN2, 152_064, 40, 5120, (40, 40), 13_696),
    "yi-6b": _shape(LLAMA, 64_000, 32, 4096, (32, 4), 11_008),
    "yi-9b": _shape(LLAMA, 64_000, 48, 4096, (32, 4), 11_008),
}
KV_TOKENS = 32_768
"""Room that the bench's models have."""
WORK_GIB = 4.0
"""For the context, libraries, graphs, and what a pass of 8,192 tokens takes."""


def parameters_gib(shape: str) -> float:
    """Of its parameters in bfloat16; biases and norms, which are nothing, are left out."""
    one = MEDUSA_SHAPES[shape]
    hidden, heads = one["hidden_size"], (one["num_heads"], one["num_kv_heads"])
    projections = 2 * (heads[0] + heads[1]) * one["head_dim"] + 3 * one["intermediate_size"]
    numbers = hidden * (2 * one["vocab_size"] + one["num_layers"] * projections)
    return 2 * numbers / (1 << 30)


def needed_gib(shape: str) -> float:
    """What a GPU has to have for it: parameters, KV, and all the rest."""
    one = MEDUSA_SHAPES[shape]
    kv = 4 * KV_TOKENS * one["num_layers"] * one["num_kv_heads"] * one["head_dim"]
    return parameters_gib(shape) + kv / (1 << 30) + WORK_GIB


PAPER_GIB = {
    "llama2-7b": 12.6,
    "llama2-13b": 24.2,
    "qwen1.5-0.5b": 1.2,
    "qwen1.5-1.8b": 3.4,
    "qwen1.5-4b": 7.4,
    "qwen1.5-7b": 14.4,
    "qwen1.5-14b": 26.4,
    "yi-6b": 11.3,
    "yi-9b": 16.4,
}
"""Sizes of their parameters in bfloat16, as Table 1 has them."""
PAPER_NODES = {
    "llama2-7b": 12_518,
    "llama2-13b": 16_150,
    "qwen1.5-0.5b": 9118,
    "qwen1.5-1.8b": 9550,
    "qwen1.5-4b": 16_150,
    "qwen1.5-7b": 12_902,
    "qwen1.5-14b": 16_350,
    "yi-6b": 12_902,
    "yi-9b": 19_318,
}
"""Nodes of 35 graphs in vLLM of that time, as Table 1 has them."""
