"""What a checkpoint says about generating text: end tokens and sampling defaults."""

from typing import Any

import msgspec

from pilotlight.checkpoint.strict_json import JsonObject

GENERATION_FILE = "generation_config.json"
MAX_EOS_TOKENS = 256
_MAX_TOKEN_ID = 1 << 31


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults for requests that do not say otherwise; None where the checkpoint is silent."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an output, in the order of the file."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def parse_generation(
    generation: JsonObject | None, config: JsonObject | None
) -> GenerationDefaults:
    """Read the defaults.

    Args:
        generation: ``generation_config.json``, where there is one.
        config: ``config.json``; it says which tokens end an output where the generation
            configuration does not.

    Raises:
        BadCheckpoint: a value is of the wrong type or out of bounds.
    """
    eos_token_ids: tuple[int, ...] = ()
    for place in (config, generation):
        if place is not None and place.has("eos_token_id"):
            eos_token_ids = _token_ids(place, "eos_token_id")
    if generation is None:
        return GenerationDefaults(eos_token_ids=eos_token_ids)
    return GenerationDefaults(
        eos_token_ids=eos_token_ids,
        temperature=generation.number("temperature", 0.0, 100.0)
        if generation.has("temperature")
        else None,
        top_p=generation.number("top_p", 0.0, 1.0) if generation.has("top_p") else None,
        top_k=generation.integer("top_k", 0, _MAX_TOKEN_ID) if generation.has("top_k") else None,
    )


def _token_ids(place: JsonObject, name: str) -> tuple[int, ...]:
    value: Any = place.raw(name)
    if not isinstance(value, list):
        return (place.integer(name, 0, _MAX_TOKEN_ID),)
    ids = place.items(name)
    if len(ids) > MAX_EOS_TOKENS:
        raise place.fault(name, f"has {len(ids)} entries; at most {MAX_EOS_TOKENS} are read")
    if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in ids):
        raise place.fault(name, "holds more than token ids")
    return tuple(dict.fromkeys(ids))
