"""Rotary settings: where each generation of transformers writes them, and what they come to."""

import math
from typing import Any, NamedTuple

from pilotlight.checkpoint.architectures import Architecture
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel, quote
from pilotlight.checkpoint.strict_json import CONFIG_FILE, JsonObject
from pilotlight.policy.model import RopeKind, RopeScaling

MAX_CONTEXT_TOKENS = 1 << 27
_MIN_THETA, _MAX_THETA = 1.0, 1e12
_MAX_FACTOR = 1e6
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Rope(NamedTuple):
    """How a model's layers turn queries and keys."""

    theta: float
    scaling: RopeScaling | None
    sliding_theta: float | None
    """Of the sliding layers, where they have their own."""


def parse_rope(config: JsonObject, family: Architecture, max_context_tokens: int) -> Rope:
    """Read the rotary settings: ``rope_parameters`` of transformers 5, or ``rope_scaling`` beside
    ``rope_theta`` of 4.

    Raises:
        BadCheckpoint: a value is missing, of the wrong type or out of bounds.
        UnsupportedModel: the settings ask for something that no engine here computes.
    """
    modern, older = config.child("rope_parameters"), config.child("rope_scaling")
    if (
        modern is not None
        and older is not None
        and config.raw("rope_parameters") != config.raw("rope_scaling")
    ):
        raise BadCheckpoint(
            "rope_parameters and rope_scaling contradict each other", file=CONFIG_FILE
        )
    sliding_theta = None
    if family.sliding_theta is not None:
        sliding_theta, modern = _sliding_theta(config, family.sliding_theta, modern)
    rope = modern or older or JsonObject({}, CONFIG_FILE)
    if any(isinstance(rope.raw(name), dict) for name in rope.names()):
        raise UnsupportedModel(
            "rope_parameters that differ by layer are not supported for this architecture",
            file=CONFIG_FILE,
        )
    for place in (rope, config):
        if place.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
            raise UnsupportedModel(
                "a partial_rotary_factor other than 1 is not supported", file=CONFIG_FILE
            )
    beside = config.number("rope_theta", _MIN_THETA, _MAX_THETA, default=family.default_theta)
    theta = rope.number("rope_theta", _MIN_THETA, _MAX_THETA, default=beside)
    return Rope(theta, _scaling(config, rope, theta, max_context_tokens), sliding_theta)


def _sliding_theta(
    config: JsonObject, default: float, modern: JsonObject | None
) -> tuple[float, JsonObject | None]:
    """The base of the sliding layers, and the settings of the others."""
    beside = config.number("rope_local_base_freq", _MIN_THETA, _MAX_THETA, default=default)
    if modern is None:
        return beside, None
    strange = [name for name in modern.names() if name not in (_FULL, _SLIDING)]
    if strange:
        raise UnsupportedModel(
            f"rope_parameters for {quote(strange[0])} are not supported", file=CONFIG_FILE
        )
    sliding = modern.child(_SLIDING) or JsonObject({}, CONFIG_FILE)
    kind = _kind(sliding)
    if kind != "default":
        raise UnsupportedModel(
            f"rope_scaling type {_quoted(kind)} for {_SLIDING} is not supported", file=CONFIG_FILE
        )
    theta = sliding.number("rope_theta", _MIN_THETA, _MAX_THETA, default=beside)
    return theta, modern.child(_FULL)


def _kind(rope: JsonObject) -> str:
    # "type" is the name that the key had before transformers 4.45; configurations converted since
    # then have both.
    return rope.text("rope_type", default=rope.text("type", default="default"))


def _scaling(
    config: JsonObject, rope: JsonObject, theta: float, max_context_tokens: int
) -> RopeScaling | None:
    kind = _kind(rope)
    if kind == "default":
        return None
    if kind == RopeKind.LINEAR:
        return RopeScaling(kind=RopeKind.LINEAR, factor=rope.number("factor", 1.0, _MAX_FACTOR))
    if kind == RopeKind.LLAMA3:
        return _llama3(rope, _original_context(config, rope, max_context_tokens))
    if kind == RopeKind.YARN:
        if theta <= 1.0:
            raise rope.fault("rope_theta", "is not greater than 1, which yarn needs")
        return _yarn(rope, _original_context(config, rope, max_context_tokens), max_context_tokens)
    supported = ", ".join(RopeKind)
    raise UnsupportedModel(
        f"rope_scaling type {_quoted(kind)} is not supported; supported are {supported}",
        file=CONFIG_FILE,
    )


def _llama3(rope: JsonObject, original_tokens: int) -> RopeScaling:
    scaling = RopeScaling(
        factor=rope.number("factor", 1.0, _MAX_FACTOR),
        low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
        original_max_position_tokens=original_tokens,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.fault("high_freq_factor", "is not greater than low_freq_factor")
    return scaling


def _yarn(rope: JsonObject, original_tokens: int, max_context_tokens: int) -> RopeScaling:
    stretch = max(1.0, max_context_tokens / original_tokens)
    factor = rope.number("factor", 1.0, _MAX_FACTOR, default=stretch)
    scales = [rope.number(name, 0.0, 1e3, default=0.0) for name in ("mscale", "mscale_all_dim")]
    if all(scales):
        attention_factor = _attention_factor(factor, scales[0]) / _attention_factor(
            factor, scales[1]
        )
    else:
        attention_factor = _attention_factor(factor, 1.0)
    return RopeScaling(
        kind=RopeKind.YARN,
        factor=factor,
        original_max_position_tokens=original_tokens,
        # Zero means what absence means, as in transformers.
        beta_fast=rope.number("beta_fast", 0.0, 1e6, default=0.0) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0, 1e6, default=0.0) or 1.0,
        attention_factor=rope.number("attention_factor", 1e-6, 1e6, default=attention_factor),
        truncate=rope.flag("truncate", default=True),
    )


def _attention_factor(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _original_context(config: JsonObject, rope: JsonObject, max_context_tokens: int) -> int:
    # The order in which transformers looks: beside the rope settings, within them, and then the
    # context itself.
    key = "original_max_position_embeddings"
    return config.integer(
        key,
        1,
        MAX_CONTEXT_TOKENS,
        default=rope.integer(key, 1, MAX_CONTEXT_TOKENS, default=max_context_tokens),
    )


def _quoted(kind: Any) -> str:
    return f"'{quote(str(kind))}'"
