"""Shapes of ``/v1/completions``."""

from collections.abc import Sequence

from msgspec import UNSET

from pilotlight.gateway.openai.answer import Delta
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.openai.shapes import Shapes, Whole
from pilotlight.gateway.openai.shown import ShownToken
from pilotlight.gateway.schema.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from pilotlight.policy.ids import RequestId


class CompletionShapes(Shapes):
    """Plain completions, whole and as a stream: the same shape."""

    def __init__(
        self, request_id: RequestId, model: str, created_unix_s: int, options: Options
    ) -> None:
        self._id = "cmpl-" + request_id.removeprefix("req-")
        self._model = model
        self._created = created_unix_s
        self._logprobs = options.logprobs
        self._no_usage = None if options.include_usage else UNSET

    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, delta: Delta) -> Completion:
        return self._event(
            CompletionChoice(index=index, text=delta.text, logprobs=self._of(delta.tokens))
        )

    def closing(self, index: int, finish_reason: str) -> Completion:
        return self._event(CompletionChoice(index=index, text="", finish_reason=finish_reason))

    def usage_chunk(self, usage: Usage) -> Completion:
        return Completion(
            id=self._id, created=self._created, model=self._model, choices=[], usage=usage
        )

    def whole(self, choices: Sequence[Whole], usage: Usage) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(whole) for whole in choices],
            usage=usage,
        )

    def _choice(self, whole: Whole) -> CompletionChoice:
        logprobs = self._of(whole.delta.tokens)
        return CompletionChoice(
            index=whole.index,
            text=whole.delta.text,
            logprobs=logprobs,
            finish_reason=whole.finish_reason,
            prompt_logprobs=UNSET if whole.placed is None else whole.placed,
        )

    def _event(self, choice: CompletionChoice) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=self._no_usage,
        )

    def _of(self, tokens: list[ShownToken]) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob if token.follows else None for token in tokens],
            top_logprobs=[_by_text(token) if token.follows else None for token in tokens],
            text_offset=[token.offset_chars for token in tokens],
        )


def _by_text(token: ShownToken) -> dict[str, float]:
    """The token itself, then the likeliest, as OpenAI and vLLM tell them: with ``logprobs: 0`` it
    is alone. Of several that are shown alike, as parts of characters are, the first.
    """
    shown = {token.text: token.logprob}
    for other in token.top:
        shown.setdefault(other.text, other.logprob)
    return shown
