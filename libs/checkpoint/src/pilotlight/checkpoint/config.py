"""``config.json`` to ``ModelSpec``.

What the engine would compute differently from what the configuration says is refused here, by name:
a model that loads and then speaks nonsense is worse than one that does not load.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from types import MappingProxyType

from pilotlight.checkpoint.architectures import (
    SUPPORTED_ARCHITECTURES,
    Architecture,
    expected_dtype,
    expected_parts,
)
from pilotlight.checkpoint.encoder_config import parse_encoder
from pilotlight.checkpoint.encoders import ENCODERS
from pilotlight.checkpoint.errors import UnsupportedModel, quote
from pilotlight.checkpoint.layout import image_bytes, quantized_bytes
from pilotlight.checkpoint.pooling import BACKBONES, parse_pooling, text_tokens
from pilotlight.checkpoint.quantization import check_blocks, parse_quantization
from pilotlight.checkpoint.rope import MAX_CONTEXT_TOKENS, parse_rope
from pilotlight.checkpoint.strict_json import CONFIG_FILE, JsonObject
from pilotlight.checkpoint.windows import parse_windows
from pilotlight.policy.model import RUN_DTYPES, Dtype, Experts, ModelSpec
from pilotlight.policy.pooling import Task

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 18
"""Largest hidden and intermediate size."""
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCABULARY = 1 << 22
MAX_EXPERTS = 1 << 16
"""Of all layers together."""

_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_QUERY_SCALAR = 256.0
_BARE_EMBEDDING = "embed_tokens.weight"
_NOTHING_SAID: Mapping[str, bytes] = MappingProxyType({})


def parse_config(
    data: bytes,
    stored: Dtype,
    scale_dtype: Dtype | None = None,
    *,
    said: Mapping[str, bytes] = _NOTHING_SAID,
    names: Container[str] = (),
) -> ModelSpec:
    """Read a model's configuration.

    Args:
        data: the content of ``config.json``, as transformers 4 or 5 writes it.
        stored: the element type of the weights' files; part sizes follow from it.
        scale_dtype: that of the scales of quantized weights; None: float32, if there are any.
        said: of the files that say how vectors are made, those that there are.
        names: of the checkpoint's tensors, where they tell what the configuration does not.

    Raises:
        BadCheckpoint: a value is missing, of the wrong type or out of bounds.
        UnsupportedModel: the architecture, or something that the configuration asks for, is not
            supported.
    """
    config = JsonObject.parse(data, CONFIG_FILE)
    named = _architecture(config)
    pooling = parse_pooling(config, named, said)
    if pooling is not None and named in ENCODERS:
        return _with_sizes(parse_encoder(config, named, pooling, stored, said=said, names=names))
    architecture = BACKBONES.get(named, named)
    family = SUPPORTED_ARCHITECTURES[architecture]
    _refuse_unsupported(config, family)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.fault(
            "num_key_value_heads", f"does not divide the {num_heads} attention heads"
        )
    max_context_tokens = config.integer("max_position_embeddings", 1, MAX_CONTEXT_TOKENS)
    rope = parse_rope(config, family, max_context_tokens)
    windows = parse_windows(config, family, num_layers)
    spec = ModelSpec(
        architecture=architecture,
        dtype=stored,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, family, hidden_size, num_heads),
        vocab_size=config.integer("vocab_size", 1, MAX_VOCABULARY),
        max_context_tokens=text_tokens(said, max_context_tokens),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rms_norm_eps=config.number("rms_norm_eps", 1e-12, 1e-1, default=_DEFAULT_NORM_EPS),
        tied_embeddings=(pooling is not None and pooling.task is Task.EMBED)
        or config.flag("tie_word_embeddings", default=family.default_tied),
        attention_bias=_attention_bias(config, family),
        part_bytes=(),
        sliding_window_tokens=windows.window_tokens,
        sliding_layers=windows.layers,
        sliding_rope_theta=rope.sliding_theta,
        attention_scale=_attention_scale(config) if family.query_scalar else None,
        logit_softcap=_logit_softcap(config, family),
        experts=_experts(config, num_layers) if family.experts else None,
        quantization=parse_quantization(config, scale_dtype),
        pooling=pooling,
        tensor_prefix="" if _BARE_EMBEDDING in names else "model.",
    )
    check_blocks(spec)
    return _with_sizes(spec)


def declared_dtype(data: bytes) -> Dtype | None:
    """The element type that the configuration says the model should run in; None when it does not
    say.

    Raises:
        UnsupportedModel: it is none that an engine runs.
    """
    config = JsonObject.parse(data, CONFIG_FILE)
    for key in ("dtype", "torch_dtype"):
        if config.has(key):
            name = config.text(key).removeprefix("torch.")
            if name not in RUN_DTYPES:
                raise UnsupportedModel(
                    f"{key} {quote(name)} is none of {', '.join(RUN_DTYPES)}", file=CONFIG_FILE
                )
            return Dtype(name)
    return None


def _with_sizes(spec: ModelSpec) -> ModelSpec:
    """The spec with the sizes that follow from it."""
    parts = expected_parts(spec)
    part_bytes = tuple(
        image_bytes((shape, expected_dtype(spec, name)) for name, shape in part.items())
        for part in parts
    )
    if spec.quantization is None:
        return replace(spec, part_bytes=part_bytes)
    sizes = [quantized_bytes(spec.quantization, part) for part in parts]
    quantization = replace(
        spec.quantization,
        stored_bytes=tuple(stored for stored, _ in sizes),
        placed_bytes=tuple(placed for _, placed in sizes),
    )
    return replace(spec, part_bytes=part_bytes, quantization=quantization)


def _architecture(config: JsonObject) -> str:
    names = config.items("architectures")
    if len(names) != 1 or not isinstance(names[0], str):
        raise config.fault("architectures", "does not name one architecture")
    if names[0] not in {*SUPPORTED_ARCHITECTURES, *ENCODERS, *BACKBONES}:
        supported = ", ".join((*SUPPORTED_ARCHITECTURES, *ENCODERS, *BACKBONES))
        fault = f"architecture {quote(names[0])} is not supported; supported are {supported}"
        raise UnsupportedModel(fault, file=CONFIG_FILE)
    return names[0]


def _refuse_unsupported(config: JsonObject, family: Architecture) -> None:
    for flag in ("mlp_bias", "use_bidirectional_attention"):
        if config.flag(flag, default=False):
            raise UnsupportedModel(f"{flag} is not supported", file=CONFIG_FILE)
    if config.has("attn_logit_softcapping"):
        raise UnsupportedModel("attn_logit_softcapping is not supported", file=CONFIG_FILE)
    key, supported = family.activation
    activation = config.text(key, default=supported)
    if activation != supported:
        raise UnsupportedModel(
            f"the activation {quote(activation)} ({key}) is not supported, only {supported}",
            file=CONFIG_FILE,
        )


def _head_dim(config: JsonObject, family: Architecture, hidden_size: int, num_heads: int) -> int:
    default = family.default_head_dim or hidden_size // num_heads
    if not config.has("head_dim") and family.default_head_dim is None and hidden_size % num_heads:
        raise config.fault(
            "hidden_size",
            f"is no multiple of the {num_heads} attention heads, and there is no head_dim",
        )
    head_dim = config.integer("head_dim", 2, MAX_HEAD_DIM, default=default)
    if head_dim % 2:
        raise config.fault("head_dim", "is odd: rotary embeddings turn pairs")
    return head_dim


def _attention_bias(config: JsonObject, family: Architecture) -> bool:
    # A family without biases has none whatever the configuration says, and so has transformers.
    return family.always_bias or (
        bool(family.bias) and config.flag("attention_bias", default=False)
    )


def _attention_scale(config: JsonObject) -> float:
    return config.number("query_pre_attn_scalar", 1e-6, 1e6, default=_DEFAULT_QUERY_SCALAR) ** -0.5


def _logit_softcap(config: JsonObject, family: Architecture) -> float | None:
    key = "final_logit_softcapping"
    if not config.has(key):
        return None
    if not family.logit_softcap:
        raise UnsupportedModel(f"{key} is not supported for this architecture", file=CONFIG_FILE)
    return config.number(key, 1e-3, 1e6)


def _experts(config: JsonObject, num_layers: int) -> Experts:
    """Layers have experts, unless they are in ``mlp_only_layers`` or between the steps of
    ``decoder_sparse_step``.
    """
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = config.items("mlp_only_layers")
    if any(type(layer) is not int for layer in dense):
        raise config.fault("mlp_only_layers", "is not a list of integers")
    layers = tuple(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )
    # transformers 5 has a second name for it.
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    num_experts = config.integer(key, 1, MAX_EXPERTS // num_layers)
    return Experts(
        num_experts=num_experts,
        experts_per_token=config.integer("num_experts_per_tok", 1, num_experts),
        intermediate_size=config.integer("moe_intermediate_size", 1, MAX_WIDTH),
        normalized=config.flag("norm_topk_prob", default=False),
        layers=layers,
    )
