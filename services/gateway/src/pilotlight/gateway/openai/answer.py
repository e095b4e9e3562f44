"""An answer while it comes: tokens to text, stop strings, what is billed."""

from collections.abc import Sequence

import msgspec

from pilotlight.gateway.openai.echo import NOTHING_TOLD, PromptTelling, ToldPrompt, told_prompt
from pilotlight.gateway.openai.reasoning import NO_REASONING, ReasoningUse
from pilotlight.gateway.openai.shown import ShownToken, shown_token
from pilotlight.gateway.openai.tools import NO_TOOLS, ToolUse
from pilotlight.gateway.serving.token_log import PromptRead, Token
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.policy.request import FinishReason
from pilotlight.text.stream import OutputText
from pilotlight.text.tools.parser import CallPiece, merged_pieces


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What some tokens added to an answer."""

    text: str
    tokens: list[ShownToken] = msgspec.field(default_factory=list[ShownToken])
    calls: tuple[CallPiece, ...] = ()
    """What was added to calls of tools, at most once for each."""
    reasoning: str = ""
    """What the model thinks before it answers."""


NOTHING_NEW = Delta("")


class Answer:
    """One answer.

    ``finish_reason`` is set when it is complete; what comes after a stop string is dropped and not
    billed.
    """

    __slots__ = (
        "_chars",
        "_kept_ids",
        "_logprobs",
        "_output",
        "_reasoning",
        "_telling",
        "_tokenizer",
        "_tools",
        "cached_tokens",
        "finish_reason",
        "output_tokens",
        "reasoning_tokens",
        "stop",
        "told",
    )

    def __init__(
        self,
        text: ModelText,
        stops: tuple[str, ...],
        tools: ToolUse = NO_TOOLS,
        reasoning: ReasoningUse = NO_REASONING,
        *,
        logprobs: bool,
        include_stop: bool = False,
        telling: PromptTelling = NOTHING_TOLD,
    ) -> None:
        """Begin an answer.

        Args:
            text: the model's.
            stops: strings that end it.
            tools: how calls of tools are read.
            reasoning: how reasoning is read.
            logprobs: tokens are shown.
            include_stop: the text ends with the stop string.
            telling: what is said of the prompt before.
        """
        self.output_tokens = 0
        """What is billed so far."""
        self.reasoning_tokens = 0
        """Of them, those that the model thought with."""
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        """Of the prompt, those that an engine had computed before."""
        self.told: ToldPrompt | None = None
        """What is said of the prompt, as soon as its engine has read it."""
        self.stop: str | None = None
        """The stop string that ended it."""
        self._tokenizer = text.tokenizer
        self._kept_ids = tools.kept_ids
        self._output: OutputText | None = None
        """Without stop strings, which are checked now, it is made with the first token: answers
        wait."""
        if stops:
            self._output = OutputText(
                text.tokenizer, stops, tools.kept_ids, include_stop=include_stop
            )
        self._tools = tools.parser()
        self._reasoning = reasoning.parser()
        self._logprobs = logprobs
        self._telling = telling
        self._chars = len(telling.text)

    def read(self, read: PromptRead | None) -> Delta:
        """An engine has read the prompt: what is said of it.

        Raises:
            BadRequest: the engine does not know what is to be said.
        """
        if read is not None:
            self.cached_tokens = read.cached_tokens
        self.told = told_prompt(self._telling, read, self._tokenizer)
        return Delta(self.told.text, self.told.tokens)

    def feed(self, tokens: list[Token]) -> Delta:
        """Add tokens."""
        if self._telling.silent:
            self.finish_reason = "length"
            return Delta("")
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
        last = self._text.finish()
        self.stop = last.stop
        if self._telling.silent:
            finish = FinishReason.LENGTH
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
        return msgspec.structs.replace(delta, reasoning=reasoning) if reasoning else delta

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

    @property
    def _text(self) -> OutputText:
        if self._output is None:
            self._output = OutputText(self._tokenizer, (), self._kept_ids)
        return self._output

    def _text_of(self, token_ids: list[int]) -> str:
        delta = self._text.feed(token_ids)
        self.output_tokens += delta.used_tokens
        self._chars += len(delta.text)
        if delta.stop is not None:
            self.finish_reason, self.stop = "stop", delta.stop
        return delta.text

    def _shown(self, token: Token) -> ShownToken:
        return shown_token(self._tokenizer, token.token_id, token.logprob, self._chars, token.top)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Several in one."""
    said = [delta for delta in deltas if delta != NOTHING_NEW]
    if len(said) < 2:
        return said[0] if said else NOTHING_NEW
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        merged_pieces(piece for delta in deltas for piece in delta.calls),
        "".join(delta.reasoning for delta in deltas),
    )
