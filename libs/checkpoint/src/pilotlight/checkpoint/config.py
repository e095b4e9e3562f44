"""``config.json`` to ``ModelSpec``.

What the engine would compute differently from what the configuration says is refused here, by name: a model that loads and then
speaks nonsense is worse than one that does not load.
"""

from dataclasses import replace
from typing import Any

from pilotlight.checkpoint.architectures import SUPPORTED_ARCHITECTURES, expected_parts
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel, quote
from pilotlight.checkpoint.layout import image_bytes
from pilotlight.checkpoint.strict_json import JsonObject
from pilotlight.policy.types import Dtype, ModelSpec, RopeScaling

CONFIG_FILE = "config.json"
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 18
"""Largest hidden and intermediate size."""
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT_TOKENS = 1 << 27

_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_NORM_EPS = 1e-6


def parse_config(data: bytes, stored: Dtype) -> ModelSpec:
    """Read a model's configuration.

    Args:
        data: the content of ``config.json``, as transformers 4 or 5 writes it.
        stored: the element type of the weights' files; part sizes follow from it.

    Raises:
        BadCheckpoint: a value is missing, of the wrong type or out of bounds.
        UnsupportedModel: the architecture, or something that the configuration asks for, is not supported.
    """
    config = JsonObject.parse(data, CONFIG_FILE)
    architecture = _architecture(config)
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.fault("num_key_value_heads", f"does not divide the {num_heads} attention heads")
    max_context_tokens = config.integer("max_position_embeddings", 1, MAX_CONTEXT_TOKENS)
    rope = _rope(config)
    spec = ModelSpec(
        architecture=architecture,
        dtype=stored,
        num_layers=config.integer("num_hidden_layers", 1, MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        vocab_size=config.integer("vocab_size", 1, MAX_VOCABULARY),
        max_context_tokens=max_context_tokens,
        rope_theta=rope.number("rope_theta", 1.0, 1e12, default=_default_theta(config)),
        rope_scaling=_rope_scaling(config, rope, max_context_tokens),
        rms_norm_eps=config.number("rms_norm_eps", 1e-12, 1e-1, default=_DEFAULT_NORM_EPS),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        attention_bias=SUPPORTED_ARCHITECTURES[architecture].always_bias or config.flag("attention_bias", default=False),
        part_bytes=(),
    )
    return replace(spec, part_bytes=tuple(image_bytes(part.values(), stored) for part in expected_parts(spec)))


def declared_dtype(data: bytes) -> Dtype | None:
    """The element type that the configuration says the model should run in; None when it does not say.

    Raises:
        UnsupportedModel: it is none that an engine runs.
    """
    config = JsonObject.parse(data, CONFIG_FILE)
    for key in ("dtype", "torch_dtype"):
        if config.has(key):
            name = config.text(key).removeprefix("torch.")
            if name not in tuple(Dtype):
                raise UnsupportedModel(f"{key} {quote(name)} is none of {', '.join(Dtype)}", file=CONFIG_FILE)
            return Dtype(name)
    return None


def _architecture(config: JsonObject) -> str:
    names = config.items("architectures")
    if len(names) != 1 or not isinstance(names[0], str):
        raise config.fault("architectures", "does not name one architecture")
    if names[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedModel(f"{quote(names[0])} is not supported; supported are {supported}", file=CONFIG_FILE)
    return names[0]


def _refuse_unsupported(config: JsonObject) -> None:
    if config.has("quantization_config"):
        raise UnsupportedModel("quantized weights (quantization_config) are not supported", file=CONFIG_FILE)
    for flag in ("mlp_bias", "use_sliding_window"):
        if config.flag(flag, default=False):
            raise UnsupportedModel(f"{flag} is not supported", file=CONFIG_FILE)
    activation = config.text("hidden_act", default="silu")
    if activation != "silu":
        raise UnsupportedModel(f"the activation {quote(activation)} is not supported, only silu", file=CONFIG_FILE)
    for kind in config.items("layer_types"):
        if kind != "full_attention":
            raise UnsupportedModel(f"layers of type {_show(kind)} are not supported, only full_attention", file=CONFIG_FILE)


def _head_dim(config: JsonObject, hidden_size: int, num_heads: int) -> int:
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.fault("hidden_size", f"is no multiple of the {num_heads} attention heads, and there is no head_dim")
    head_dim = config.integer("head_dim", 2, MAX_HEAD_DIM, default=hidden_size // num_heads)
    if head_dim % 2:
        raise config.fault("head_dim", "is odd: rotary embeddings turn pairs")
    return head_dim


def _rope(config: JsonObject) -> JsonObject:
    """Where the rotary settings stand: transformers 5 has ``rope_parameters``, 4 had ``rope_scaling`` beside ``rope_theta``."""
    modern, older = config.child("rope_parameters"), config.child("rope_scaling")
    if modern is not None and older is not None and config.raw("rope_parameters") != config.raw("rope_scaling"):
        raise BadCheckpoint("rope_parameters and rope_scaling contradict each other", file=CONFIG_FILE)
    rope = modern or older or JsonObject({}, CONFIG_FILE)
    if any(isinstance(rope.raw(name), dict) for name in rope.names()):
        raise UnsupportedModel("rope_parameters that differ by layer are not supported", file=CONFIG_FILE)
    for place in (rope, config):
        if place.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
            raise UnsupportedModel("a partial_rotary_factor other than 1 is not supported", file=CONFIG_FILE)
    return rope


def _default_theta(config: JsonObject) -> float:
    return config.number("rope_theta", 1.0, 1e12, default=_DEFAULT_ROPE_THETA)


def _rope_scaling(config: JsonObject, rope: JsonObject, max_context_tokens: int) -> RopeScaling | None:
    # "type" is the name that the key had before transformers 4.45; configurations converted since then have both.
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(f"rope scaling of type {quote(kind)} is not supported, only llama3", file=CONFIG_FILE)
    scaling = RopeScaling(
        factor=rope.number("factor", 1.0, 1e6),
        low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
        original_max_position_tokens=_original_context(config, rope, max_context_tokens),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.fault("high_freq_factor", "is not greater than low_freq_factor")
    return scaling


def _original_context(config: JsonObject, rope: JsonObject, max_context_tokens: int) -> int:
    # The order in which transformers looks: beside the rope settings, within them, and then the context itself.
    key = "original_max_position_embeddings"
    return config.integer(
        key, 1, MAX_CONTEXT_TOKENS, default=rope.integer(key, 1, MAX_CONTEXT_TOKENS, default=max_context_tokens)
    )


def _show(value: Any) -> str:
    return quote(value) if isinstance(value, str) else type(value).__name__
