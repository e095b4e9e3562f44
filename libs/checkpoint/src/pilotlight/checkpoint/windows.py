"""Sliding windows: which layers see only the last tokens, by each family's own rule."""

from typing import Any, NamedTuple

from pilotlight.checkpoint.architectures import Architecture, Windows
from pilotlight.checkpoint.errors import UnsupportedModel, quote
from pilotlight.checkpoint.rope import MAX_CONTEXT_TOKENS
from pilotlight.checkpoint.strict_json import CONFIG_FILE, JsonObject

_DEFAULT_WINDOW_TOKENS = 4096
_DEFAULT_WINDOW_LAYERS = 28
_DEFAULT_PATTERN = 6
_FULL, _SLIDING = "full_attention", "sliding_attention"


class SlidingLayers(NamedTuple):
    """The window, and the layers that have it; None and none where every layer sees everything."""

    window_tokens: int | None
    layers: tuple[int, ...]


def parse_windows(config: JsonObject, family: Architecture, num_layers: int) -> SlidingLayers:
    """Read which layers have a sliding window.

    Raises:
        BadCheckpoint: a value is of the wrong type or out of bounds, or ``layer_types`` names a
            window that is switched off.
        UnsupportedModel: ``layer_types`` asks for layers that the family does not have.
    """
    declared = _declared(config, num_layers)
    match family.windows:
        case Windows.EVERY:
            switched_on = config.has("sliding_window") or "sliding_window" not in config.names()
            layers = tuple(range(num_layers))
        case Windows.SWITCHED:
            switched_on = config.flag("use_sliding_window", default=False)
            layers = tuple(range(num_layers))
        case Windows.UPPER:
            switched_on = config.flag("use_sliding_window", default=False)
            first = config.integer(
                "max_window_layers", 0, MAX_CONTEXT_TOKENS, default=_DEFAULT_WINDOW_LAYERS
            )
            layers = tuple(range(first, num_layers)) if declared is None else declared
            if declared and not switched_on:
                raise config.fault(
                    "layer_types", f"has {_SLIDING}, but use_sliding_window is not true"
                )
        case Windows.MIXED:
            switched_on = True
            layers = _all_but_every(_pattern(config), num_layers) if declared is None else declared
        case Windows.NEVER:
            if config.flag("use_sliding_window", default=False):
                raise UnsupportedModel(
                    "use_sliding_window is not supported for this architecture", file=CONFIG_FILE
                )
            switched_on, layers = False, ()
    if not switched_on:
        layers = ()
    if declared is not None and declared != layers:
        strange = _FULL if layers else _SLIDING
        raise UnsupportedModel(
            f"layer_types with {strange} is not supported for this architecture", file=CONFIG_FILE
        )
    if not layers:
        return SlidingLayers(None, ())
    default = None if "sliding_window" in config.names() else _DEFAULT_WINDOW_TOKENS
    return SlidingLayers(
        config.integer("sliding_window", 1, MAX_CONTEXT_TOKENS, default=default), layers
    )


def _declared(config: JsonObject, num_layers: int) -> tuple[int, ...] | None:
    """The layers that ``layer_types`` calls sliding; None without such a list."""
    kinds = config.items("layer_types")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise UnsupportedModel(
                f"layer_types {_show(kind)} is not supported, only {_FULL} and {_SLIDING}",
                file=CONFIG_FILE,
            )
    if not config.has("layer_types"):
        return None
    if len(kinds) != num_layers:
        raise config.fault("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)


def _pattern(config: JsonObject) -> int:
    return config.integer("sliding_window_pattern", 1, MAX_CONTEXT_TOKENS, default=_DEFAULT_PATTERN)


def _all_but_every(pattern: int, num_layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)


def _show(kind: Any) -> str:
    return quote(kind) if isinstance(kind, str) else f"of type {type(kind).__name__}"
