"""Shapes of ``/v1/chat/completions``."""

from msgspec import UNSET

from pilotlight.gateway.openai.answer import Delta, ShownToken
from pilotlight.gateway.openai.exchange import Shapes
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.openai.types import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from pilotlight.policy.types import RequestId


class ChatShapes(Shapes):
    """Chat completions and their chunks."""

    def __init__(self, request_id: RequestId, model: str, created_unix_s: int, options: Options) -> None:
        self._id = "chatcmpl-" + request_id.removeprefix("req-")
        self._model = model
        self._created = created_unix_s
        self._logprobs = options.logprobs
        self._no_usage = None if options.include_usage else UNSET

    def opening(self) -> ChatChunk:
        return self._chunk([ChatChunkChoice(delta=ChatDelta(role="assistant", content=""))])

    def chunk(self, delta: Delta) -> ChatChunk:
        return self._chunk([ChatChunkChoice(delta=ChatDelta(content=delta.text), logprobs=self._of(delta.tokens))])

    def closing(self, finish_reason: str) -> ChatChunk:
        return self._chunk([ChatChunkChoice(delta=ChatDelta(), finish_reason=finish_reason)])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)

    def whole(self, delta: Delta, finish_reason: str, usage: Usage) -> ChatCompletion:
        message = AssistantMessage(content=delta.text)
        choice = ChatChoice(message=message, logprobs=self._of(delta.tokens), finish_reason=finish_reason)
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=[choice], usage=usage)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=self._no_usage)

    def _of(self, tokens: list[ShownToken]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs(content=[_logprob(token) for token in tokens])


def _logprob(token: ShownToken) -> TokenLogprob:
    top = [TopLogprob(token=other.text, logprob=other.logprob, bytes=other.utf8) for other in token.top]
    return TokenLogprob(token=token.text, logprob=token.logprob, bytes=token.utf8, top_logprobs=top)
