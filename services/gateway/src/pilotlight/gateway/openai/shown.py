"""Tokens as answers show them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotlight.text.decoding import TokenDecoder

UNKNOWN_LOGPROB = -9999.0
"""What the API says of a token whose log probability is not known."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of the answer, for requests with log probabilities."""

    text: str
    """Parts of characters are shown as replacement characters."""
    utf8: list[int]
    """Its own bytes: those of all tokens together are the answer's."""
    logprob: float
    offset_chars: int
    top: list["ShownToken"] = field(default_factory=list["ShownToken"])
    """The likeliest tokens in its place."""
    follows: bool = True
    """False of a prompt's first token: before it stands nothing that it could be likely after."""


def shown_token(
    tokenizer: TokenDecoder,
    token_id: int,
    known: float | None,
    offset_chars: int,
    top: Sequence[tuple[int, float]] = (),
) -> ShownToken:
    """A token as it is shown.

    Args:
        tokenizer: the model's.
        token_id: which.
        known: its log probability; None: it is not known.
        offset_chars: where it begins in the text.
        top: the likeliest tokens in its place.
    """
    raw = tokenizer.token_bytes(token_id)
    logprob = UNKNOWN_LOGPROB
    if known is not None and math.isfinite(known):
        logprob = max(known, UNKNOWN_LOGPROB)
    others = [shown_token(tokenizer, other, value, offset_chars) for other, value in top]
    return ShownToken(raw.decode(errors="replace"), list(raw), logprob, offset_chars, others)
