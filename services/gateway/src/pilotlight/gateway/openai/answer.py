"""An answer while it comes: tokens to text, stop strings, what is billed."""

import math
from dataclasses import dataclass, field, replace

from pilotlight.gateway.catalog import ModelText
from pilotlight.gateway.openai.types import Usage
from pilotlight.gateway.token_log import Token
from pilotlight.policy.types import FinishReason
from pilotlight.text.stream import OutputText

UNKNOWN_LOGPROB = -9999.0
"""What the API says of a token whose log probability is not known."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of the answer, for those who asked for log probabilities."""

    text: str
    utf8: list[int] | None
    """None for a token that is only a part of a character."""
    logprob: float
    offset_chars: int
    top: list["ShownToken"] = field(default_factory=list["ShownToken"])
    """The likeliest tokens in its place."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What some tokens added to an answer."""

    text: str
    tokens: list[ShownToken] = field(default_factory=list[ShownToken])


class Answer:
    """One answer. ``finish_reason`` is set when it is complete; what comes after a stop string is dropped and not billed."""

    def __init__(self, text: ModelText, stops: tuple[str, ...], prompt_tokens: int, *, logprobs: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = text.tokenizer
        self._output = OutputText(text.tokenizer, stops)
        self._logprobs = logprobs
        self._chars = 0

    def feed(self, tokens: list[Token]) -> Delta:
        """Add tokens."""
        if not self._logprobs:
            return Delta(self._text_of([token.token_id for token in tokens]))
        texts: list[str] = []
        shown: list[ShownToken] = []
        for token in tokens:
            if self.finish_reason is not None:
                break
            shown.append(self._shown(token))
            texts.append(self._text_of([token.token_id]))
        return Delta("".join(texts), shown)

    def finish(self, finish: FinishReason) -> Delta:
        """The engine has ended it: what was held back."""
        if self.finish_reason is not None:
            return Delta("")
        last = self._output.finish()
        self.finish_reason = "stop" if last.stop is not None or finish is FinishReason.STOP else "length"
        return Delta(last.text)

    @property
    def usage(self) -> Usage:
        """What is billed so far."""
        total = self.prompt_tokens + self.output_tokens
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.output_tokens, total_tokens=total)

    def _text_of(self, token_ids: list[int]) -> str:
        delta = self._output.feed(token_ids)
        self.output_tokens += delta.used_tokens
        self._chars += len(delta.text)
        if delta.stop is not None:
            self.finish_reason = "stop"
        return delta.text

    def _shown(self, token: Token) -> ShownToken:
        top = [self._shown_alone(token_id, logprob) for token_id, logprob in token.top]
        return replace(self._shown_alone(token.token_id, token.logprob), top=top)

    def _shown_alone(self, token_id: int, known: float | None) -> ShownToken:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        utf8 = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        logprob = UNKNOWN_LOGPROB
        if known is not None and math.isfinite(known):
            logprob = max(known, UNKNOWN_LOGPROB)
        return ShownToken(text, utf8, logprob, self._chars)
