"""Which models are supported, and which tensors each of their parts has.

A part is what can be held on its own: part 0 is the embedding, part 1 + l is layer l, and part ``num_layers + 1`` is the head
(final norm and output projection). With tied embeddings the head has no projection of its own: it uses part 0's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pilotlight.policy.types import ModelSpec

Shape = tuple[int, ...]
_Dims = tuple[str, ...]
"""A shape in words; ``_sizes`` has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The tensors of one family, with shapes in words. Names in ``layer`` and ``bias`` follow ``model.layers.N.``."""

    embedding: Mapping[str, _Dims]
    layer: Mapping[str, _Dims]
    bias: Mapping[str, _Dims]
    """In every layer as well, where ``ModelSpec.attention_bias`` is true."""
    norm: Mapping[str, _Dims]
    projection: Mapping[str, _Dims]
    """Of the head; left out where the embeddings are tied."""
    always_bias: bool
    """Whether ``attention_bias`` follows from the architecture, or stands in the configuration."""


_LLAMA = Architecture(
    embedding={"model.embed_tokens.weight": ("vocab", "hidden")},
    layer={
        "input_layernorm.weight": ("hidden",),
        "self_attn.q_proj.weight": ("query", "hidden"),
        "self_attn.k_proj.weight": ("key", "hidden"),
        "self_attn.v_proj.weight": ("key", "hidden"),
        "self_attn.o_proj.weight": ("hidden", "query"),
        "post_attention_layernorm.weight": ("hidden",),
        "mlp.gate_proj.weight": ("intermediate", "hidden"),
        "mlp.up_proj.weight": ("intermediate", "hidden"),
        "mlp.down_proj.weight": ("hidden", "intermediate"),
    },
    bias={
        "self_attn.q_proj.bias": ("query",),
        "self_attn.k_proj.bias": ("key",),
        "self_attn.v_proj.bias": ("key",),
        "self_attn.o_proj.bias": ("hidden",),
    },
    norm={"model.norm.weight": ("hidden",)},
    projection={"lm_head.weight": ("vocab", "hidden")},
    always_bias=False,
)
_QWEN2 = Architecture(
    embedding=_LLAMA.embedding,
    layer=_LLAMA.layer,
    bias={
        "self_attn.q_proj.bias": ("query",),
        "self_attn.k_proj.bias": ("key",),
        "self_attn.v_proj.bias": ("key",),
    },
    norm=_LLAMA.norm,
    projection=_LLAMA.projection,
    always_bias=True,
)

SUPPORTED_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {"LlamaForCausalLM": _LLAMA, "Qwen2ForCausalLM": _QWEN2},
)

# Older exports saved buffers that everybody computes anew.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def expected_parts(spec: ModelSpec) -> tuple[dict[str, Shape], ...]:
    """The tensors of each part with their shapes, in execution order. ``spec.part_bytes`` is not looked at."""
    family = SUPPORTED_ARCHITECTURES[spec.architecture]
    sizes = _sizes(spec)

    def shaped(dims: Mapping[str, _Dims], prefix: str = "") -> dict[str, Shape]:
        return {prefix + name: tuple(sizes[dim] for dim in words) for name, words in dims.items()}

    in_layer = {**family.layer, **(family.bias if spec.attention_bias else {})}
    layers = (shaped(in_layer, f"model.layers.{layer}.") for layer in range(spec.num_layers))
    head = {**family.norm, **({} if spec.tied_embeddings else family.projection)}
    return (shaped(family.embedding), *layers, shaped(head))


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor that no part expects is harmless: a rotary buffer, or a tied model's second copy of its embedding."""
    tied_copy = spec.tied_embeddings and name in SUPPORTED_ARCHITECTURES[spec.architecture].projection
    return tied_copy or _BUFFER.fullmatch(name) is not None


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "intermediate": spec.intermediate_size,
        "query": spec.num_heads * spec.head_dim,
        "key": spec.num_kv_heads * spec.head_dim,
    }
