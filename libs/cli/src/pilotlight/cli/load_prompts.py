"""What a load test asks: random prompts of a given length, or conversations of a ShareGPT file."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pilotlight.common.errors import BadRequest

MAX_FILE_BYTES = 2 * 1024**3
WORDS = (
    "a small flame stays on so that the burner lights at once when somebody asks for it and nobody pays for what is not used; "
    "the valve opens, gas comes, and the fire is there before the hand has left the knob. It has burned since morning, blue and low."
)
"""Its tokens are what random prompts are made of: every tokenizer has some for it."""
PROMPT_CHARS_LIMIT = 200_000
"""Of a conversation's prompt; longer ones are left out."""
CHARS_PER_TOKEN = 4
"""About: how long a reply is whose tokens are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request: token ids for a completion, or a text for a chat."""

    asked: list[int] | str
    output_tokens: int
    """At most, or exactly where its end is ignored."""


def random_prompts(
    count: int, input_tokens: int, output_tokens: int, tokens: Sequence[int], rng: random.Random
) -> list[Prompt]:
    """Prompts of exactly this length, which have nothing in common.

    Args:
        count: How many.
        input_tokens: Of each.
        output_tokens: Of each answer.
        tokens: What they are made of.
        rng: The same seed gives the same prompts.
    """
    return [
        Prompt(asked=rng.choices(tokens, k=input_tokens), output_tokens=output_tokens)
        for _ in range(count)
    ]


def sharegpt_prompts(
    path: Path, count: int, output_tokens: int | None, rng: random.Random
) -> list[Prompt]:
    """First turns of conversations of a file in ShareGPT's form, drawn at random.

    Args:
        path: JSON: a list of ``{"conversations": [{"from", "value"}, …]}``.
        count: How many; drawn again where there are fewer.
        output_tokens: Of each answer; None: about as many as the file's reply has.
        rng: The same seed draws the same ones.

    Raises:
        BadRequest: the file cannot be read, or has no such conversations.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadRequest(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB: use a part of it")
        found: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadRequest(f"{path} is no JSON: {error}") from error
    listed = cast("list[Any]", found) if isinstance(found, list) else []
    turns = [turn for one in listed if (turn := _first_turn(one)) is not None]
    if not turns:
        raise BadRequest(
            f'{path} has no conversations: a list of {{"conversations": [{{"value": question}}, {{"value": reply}}]}} is wanted'
        )
    drawn = rng.sample(turns, count) if count <= len(turns) else rng.choices(turns, k=count)
    return [
        Prompt(asked=prompt, output_tokens=output_tokens or max(1, len(reply) // CHARS_PER_TOKEN))
        for prompt, reply in drawn
    ]


def arrivals(count: int, rate_per_s: float, rng: random.Random) -> list[float]:
    """Poisson's, in seconds; the first comes at once."""
    found, at_s = [0.0], 0.0
    while len(found) < count:
        at_s += rng.expovariate(rate_per_s)
        found.append(at_s)
    return found


def _first_turn(entry: Any) -> tuple[str, str] | None:
    try:
        prompt, reply = (str(turn["value"]) for turn in entry["conversations"][:2])
    except (TypeError, KeyError, ValueError):
        return None
    fits = prompt and reply and len(prompt) <= PROMPT_CHARS_LIMIT
    return (prompt, reply) if fits else None
