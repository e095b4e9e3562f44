"""Models with random weights, of any family and size, on any device: no checkpoint, no
transformers.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters, Source
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype, Experts, ModelSpec, Stage
from pilotlight.policy.testing import tiny_spec

SMALL = tiny_spec(
    num_layers=3,
    hidden_size=192,
    intermediate_size=320,
    num_heads=8,
    head_dim=32,
    vocab_size=997,
    max_context_tokens=4096,
)
WINDOW: dict[str, Any] = {"sliding_window_tokens": 40}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-bias": {"attention_bias": True, "tied_embeddings": True},
    "llama-alone": {"num_kv_heads": 8, "head_dim": 20},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_layers": (0, 1, 2), **WINDOW},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "sliding_layers": (1,), **WINDOW},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 64},
    "qwen3-moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "experts": Experts(
            num_experts=6, experts_per_token=2, intermediate_size=64, layers=(0, 2), normalized=True
        ),
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "tied_embeddings": True,
        "sliding_layers": (0, 2),
        "sliding_rope_theta": 1000.0,
        "attention_scale": 0.2,
        "logit_softcap": 20.0,
        **WINDOW,
    },
}
WIDE: dict[str, dict[str, Any]] = {
    "gemma3-wide": {
        **KINDS["gemma3"],
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "attention_scale": 256**-0.5,
    },
    "qwen3-wide": {**KINDS["qwen3"], "num_heads": 4, "num_kv_heads": 2, "head_dim": 256},
}
"""With heads of 256, as Gemma 3 has them."""


def spec_of(kind: str, dtype: Dtype) -> ModelSpec:
    """A small model of a family."""
    return with_sizes(replace(SMALL, dtype=dtype, **(KINDS | WIDE)[kind]))


def with_sizes(spec: ModelSpec) -> ModelSpec:
    """The same with the bytes of its parts."""
    decoder = decoder_of(replace(spec, part_bytes=(0,) * (spec.num_layers + 2)))
    sizes = (
        sum(map(prod, decoder.shapes(part).values())) * spec.dtype.size_bytes
        for part in range(spec.num_layers + 2)
    )
    return replace(spec, part_bytes=tuple(sizes))


def random_parts(spec: ModelSpec, seed: int) -> Iterator[dict[str, Tensor]]:
    """Every part's tensors, named as in a checkpoint, large enough that outputs wander about."""
    generator = torch.Generator().manual_seed(seed)
    decoder = decoder_of(spec)
    for part in range(spec.num_layers + 2):
        tensors: dict[str, Tensor] = {}
        for name, shape in decoder.shapes(part).items():
            value = torch.randn(shape, generator=generator) * (
                1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.2
            )
            if "norm" in name and not spec.architecture.startswith("Gemma"):
                value += 1.0
            tensors[decoder.prefix(part) + name] = value.to(TORCH_DTYPES[spec.dtype])
        yield tensors


def source_of(tensor: Tensor) -> Source:
    """A tensor as a loader offers it."""
    dtype = Dtype(str(tensor.dtype).removeprefix("torch."))
    return (
        dtype,
        tuple(tensor.shape),
        memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()),
    )


def placed(
    arena: Arena,
    spec: ModelSpec,
    seed: int,
    num_blocks: int,
    dtype: Dtype | None = None,
    stage: Stage | None = None,
) -> tuple[StageMemory, Parameters, KvCache]:
    """A stage in place: its memory, its parameters, and an empty KV cache."""
    memory = StageMemory(arena, decoder_of(spec), stage or spec.whole, dtype or spec.dtype)
    parameters = Parameters(memory)
    for part, tensors in enumerate(random_parts(spec, seed)):
        if part in parameters.parts:
            parameters.place(
                part, {name: source_of(tensor) for name, tensor in tensors.items()}, lambda: 0.0
            )
    return memory, parameters, KvCache(memory, num_blocks)
