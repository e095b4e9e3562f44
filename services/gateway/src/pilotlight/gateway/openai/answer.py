"""An answer while it comes: tokens to text, stop strings, what is billed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pilotlight.gateway.openai.reasoning import NO_REASONING, ReasoningUse
from pilotlight.gateway.openai.tools import NO_TOOLS, ToolUse
from pilotlight.gateway.serving.token_log import Token
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.policy.request import FinishReason
from pilotlight.text.stream import OutputText
from pilotlight.text.tools.parser import CallPiece, merged_pieces

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


@dataclass(frozen=True, slots=True)
class Delta:
    """What some tokens added to an answer."""

    text: str
    tokens: list[ShownToken] = field(default_factory=list[ShownToken])
    calls: tuple[CallPiece, ...] = ()
    """What was added to calls of tools, at most once for each."""
    reasoning: str = ""
    """What the model thinks before it answers."""


class Answer:
    """One answer.

    ``finish_reason`` is set when it is complete; what comes after a stop string is dropped and not
    billed.
    """

    def __init__(
        self,
        text: ModelText,
        stops: tuple[str, ...],
        tools: ToolUse = NO_TOOLS,
        reasoning: ReasoningUse = NO_REASONING,
        *,
        logprobs: bool,
        include_stop: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            text: the model's.
            stops: strings that end it.
            tools: how calls of tools are read.
            reasoning: how reasoning is read.
            logprobs: tokens are shown.
            include_stop: the text ends with the stop string.
        """
        self.output_tokens = 0
        """What is billed so far."""
        self.reasoning_tokens = 0
        """Of them, those that the model thought with."""
        self.finish_reason: str | None = None
        self.stop: str | None = None
        """The stop string that ended it."""
        self._tokenizer = text.tokenizer
        self._output = OutputText(text.tokenizer, stops, tools.kept_ids, include_stop=include_stop)
        self._tools = tools.parser()
        self._reasoning = reasoning.parser()
        self._logprobs = logprobs
        self._chars = 0

    def feed(self, tokens: list[Token]) -> Delta:
        """Add tokens."""
        if not self._logprobs and self._tools is None and self._reasoning is None:
            return Delta(self._text_of([token.token_id for token in tokens]))
        deltas: list[Delta] = []
        for token in tokens:
            if self.finish_reason is not None:
                break
            shown = [self._shown(token)] if self._logprobs else []
            self.reasoning_tokens += self._reasoning is not None and self._reasoning.thinking
            deltas.append(self._delta(self._text_of([token.token_id]), shown))
        return joined(deltas)

    def finish(self, finish: FinishReason) -> Delta:
        """The engine has ended it: what was held back."""
        if self.finish_reason is not None:
            return Delta("")
        last = self._output.finish()
        self.stop = last.stop
        self.finish_reason = (
            "stop" if last.stop is not None or finish is FinishReason.STOP else "length"
        )
        return self._delta(last.text, [])

    def _delta(self, text: str, shown: list[ShownToken]) -> Delta:
        """New text, apart into reasoning, content and calls."""
        reasoning = ""
        if self._reasoning is not None:
            thought = self._reasoning.feed(text)
            reasoning, text = thought.reasoning, thought.content
            if self.finish_reason is not None:
                last = self._reasoning.finish()
                reasoning, text = reasoning + last.reasoning, text + last.content
        delta = self._parsed(text, shown)
        return replace(delta, reasoning=reasoning) if reasoning else delta

    def _parsed(self, text: str, shown: list[ShownToken]) -> Delta:
        """What follows the reasoning, apart into content and calls."""
        if self._tools is None:
            return Delta(text, shown)
        parsed = self._tools.feed(text)
        delta = Delta(parsed.content, shown, parsed.calls)
        if self._tools.ended and self.finish_reason is None:
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            rest = self._tools.finish()
            delta = joined([delta, Delta(rest.content, [], rest.calls)])
            if self.finish_reason == "stop" and self._tools.called:
                self.finish_reason = "tool_calls"
        return delta

    def _text_of(self, token_ids: list[int]) -> str:
        delta = self._output.feed(token_ids)
        self.output_tokens += delta.used_tokens
        self._chars += len(delta.text)
        if delta.stop is not None:
            self.finish_reason, self.stop = "stop", delta.stop
        return delta.text

    def _shown(self, token: Token) -> ShownToken:
        top = [self._shown_alone(token_id, logprob) for token_id, logprob in token.top]
        return replace(self._shown_alone(token.token_id, token.logprob), top=top)

    def _shown_alone(self, token_id: int, known: float | None) -> ShownToken:
        raw = self._tokenizer.token_bytes(token_id)
        logprob = UNKNOWN_LOGPROB
        if known is not None and math.isfinite(known):
            logprob = max(known, UNKNOWN_LOGPROB)
        return ShownToken(raw.decode(errors="replace"), list(raw), logprob, self._chars)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Several in one."""
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        merged_pieces(piece for delta in deltas for piece in delta.calls),
        "".join(delta.reasoning for delta in deltas),
    )
