"""Which families of models are supported: the tensors of each part, and what their configurations
mean where they say nothing.

A part is what can be held on its own: part 0 is the embedding, part 1 + l is layer l, and part
``num_layers + 1`` is the head (final norm and output projection). With tied embeddings the head has
no projection of its own: it uses part 0's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType

from pilotlight.checkpoint.encoders import encoder_parts, is_encoder_buffer
from pilotlight.policy.model import Dtype, ModelSpec

Shape = tuple[int, ...]
_Dims = tuple[str, ...]
"""A shape in words; ``_sizes`` has the numbers."""


class Windows(Enum):
    """Which layers have a sliding window, and where the configuration says so."""

    NEVER = auto()
    EVERY = auto()
    """All of them, unless ``sliding_window`` is null; without that key it is 4,096."""
    SWITCHED = auto()
    """All of them, if ``use_sliding_window`` is true."""
    UPPER = auto()
    """If ``use_sliding_window`` is true: those in ``layer_types``, or else from
    ``max_window_layers`` on."""
    MIXED = auto()
    """Those in ``layer_types``, or else all but every ``sliding_window_pattern``-th."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family. Names in ``norms`` and ``bias`` follow ``model.layers.N.``."""

    norms: Mapping[str, _Dims] = field(default_factory=dict[str, _Dims])
    """Of every layer, beside the two that every family has."""
    bias: Mapping[str, _Dims] = field(default_factory=dict[str, _Dims])
    """Of every layer where ``ModelSpec.attention_bias`` is true."""
    always_bias: bool = False
    """Whether ``attention_bias`` follows from the architecture, or stands in the configuration."""
    experts: bool = False
    """Some layers have experts in place of one feed-forward network."""
    windows: Windows = Windows.NEVER
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The configuration's key, and the only value that is supported."""
    default_theta: float = 10_000.0
    default_head_dim: int | None = None
    """None: the hidden size over the number of heads."""
    default_tied: bool = False
    sliding_theta: float | None = None
    """Default of the sliding layers' own rotary base, in families whose sliding layers have one."""
    query_scalar: bool = False
    """Attention scores are divided by the root of ``query_pre_attn_scalar``."""
    logit_softcap: bool = False
    """``final_logit_softcapping`` counts."""


_EMBEDDING: Mapping[str, _Dims] = {"model.embed_tokens.weight": ("vocab", "hidden")}
_FINAL_NORM: Mapping[str, _Dims] = {"model.norm.weight": ("hidden",)}
_PROJECTION: Mapping[str, _Dims] = {"lm_head.weight": ("vocab", "hidden")}
_LAYER: Mapping[str, _Dims] = {
    "input_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.v_proj.weight": ("key", "hidden"),
    "self_attn.o_proj.weight": ("hidden", "query"),
    "post_attention_layernorm.weight": ("hidden",),
}
_INPUT_BIASES: Mapping[str, _Dims] = {
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
}
_ALL_BIASES: Mapping[str, _Dims] = {**_INPUT_BIASES, "self_attn.o_proj.bias": ("hidden",)}
_HEAD_NORMS: Mapping[str, _Dims] = {
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
}
_GEMMA_NORMS: Mapping[str, _Dims] = {
    **_HEAD_NORMS,
    "pre_feedforward_layernorm.weight": ("hidden",),
    "post_feedforward_layernorm.weight": ("hidden",),
}

SUPPORTED_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(bias=_ALL_BIASES),
        "MistralForCausalLM": Architecture(windows=Windows.EVERY),
        "Qwen2ForCausalLM": Architecture(
            bias=_INPUT_BIASES, always_bias=True, windows=Windows.UPPER
        ),
        "Qwen3ForCausalLM": Architecture(
            norms=_HEAD_NORMS, bias=_ALL_BIASES, windows=Windows.UPPER, default_head_dim=128
        ),
        "Qwen3MoeForCausalLM": Architecture(
            norms=_HEAD_NORMS, bias=_ALL_BIASES, experts=True, windows=Windows.SWITCHED
        ),
        "Gemma3ForCausalLM": Architecture(
            norms=_GEMMA_NORMS,
            bias=_ALL_BIASES,
            windows=Windows.MIXED,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            default_theta=1_000_000.0,
            default_head_dim=256,
            default_tied=True,
            sliding_theta=10_000.0,
            query_scalar=True,
            logit_softcap=True,
        ),
    }
)

# Older exports saved buffers that every engine computes anew.
_BUFFER = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)


def expected_parts(spec: ModelSpec) -> tuple[dict[str, Shape], ...]:
    """The tensors of each part with their shapes, in execution order.

    Behind each quantized weight comes its scale. ``spec.part_bytes`` is not looked at.
    """
    if spec.encoder is not None:
        return encoder_parts(spec, spec.encoder)
    sizes, quantization = _sizes(spec), spec.quantization

    def shaped(dims: Mapping[str, _Dims], prefix: str = "") -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, words in dims.items():
            name = (prefix + name).replace("model.", spec.tensor_prefix, 1)
            shapes[name] = shape = tuple(sizes[dim] for dim in words)
            if quantization is not None and quantization.covers(name):
                rows, width = shape
                scale = quantization.scale_of(name)
                shapes[scale] = quantization.stored_scale_shape(rows, width)
        return shapes

    layers = (
        shaped(dict(_in_layer(spec, layer)), f"model.layers.{layer}.")
        for layer in range(spec.num_layers)
    )
    head = {**_FINAL_NORM, **({} if spec.tied_embeddings else _PROJECTION)}
    return (shaped(_EMBEDDING), *layers, shaped(head))


def expected_dtype(spec: ModelSpec, name: str) -> Dtype:
    """The element type that a tensor has to be stored in."""
    quantization = spec.quantization
    return spec.dtype if quantization is None else quantization.stored_dtype(name, spec.dtype)


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor that no part expects is harmless: a buffer, or a tied model's second copy of
    its embedding.
    """
    if spec.encoder is not None:
        return is_encoder_buffer(spec, name)
    tied_copy = spec.tied_embeddings and name in _PROJECTION
    return tied_copy or _BUFFER.fullmatch("model." + name.removeprefix("model.")) is not None


def _in_layer(spec: ModelSpec, layer: int) -> Iterator[tuple[str, _Dims]]:
    family = SUPPORTED_ARCHITECTURES[spec.architecture]
    yield from _LAYER.items()
    if spec.experts is None or layer not in spec.experts.layers:
        yield from _feed_forward("mlp.", "intermediate")
    else:
        yield "mlp.gate.weight", ("experts", "hidden")
        for expert in range(spec.experts.num_experts):
            yield from _feed_forward(f"mlp.experts.{expert}.", "expert")
    yield from family.norms.items()
    if spec.attention_bias:
        yield from family.bias.items()


def _feed_forward(prefix: str, width: str) -> Iterator[tuple[str, _Dims]]:
    yield f"{prefix}gate_proj.weight", (width, "hidden")
    yield f"{prefix}up_proj.weight", (width, "hidden")
    yield f"{prefix}down_proj.weight", ("hidden", width)


def _sizes(spec: ModelSpec) -> dict[str, int]:
    experts = spec.experts
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "intermediate": spec.intermediate_size,
        "query": spec.num_heads * spec.head_dim,
        "key": spec.num_kv_heads * spec.head_dim,
        "head": spec.head_dim,
        "experts": experts.num_experts if experts else 0,
        "expert": experts.intermediate_size if experts else 0,
    }
