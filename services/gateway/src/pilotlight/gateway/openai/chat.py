"""Shapes of ``/v1/chat/completions``."""

from collections.abc import Sequence

from msgspec import UNSET

from pilotlight.gateway.openai.answer import Delta
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.openai.shapes import Shapes, Whole
from pilotlight.gateway.openai.shown import ShownToken
from pilotlight.gateway.openai.tools import NO_TOOLS, ToolUse
from pilotlight.gateway.schema.replies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    FunctionDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from pilotlight.policy.ids import RequestId
from pilotlight.text.tools.parser import CallPiece


class ChatShapes(Shapes):
    """Chat completions and their chunks."""

    __slots__ = ("_created", "_logprobs", "_model", "_no_usage", "_request_id", "_tools")

    def __init__(
        self,
        request_id: RequestId,
        model: str,
        created_unix_s: int,
        options: Options,
        tools: ToolUse = NO_TOOLS,
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._created = created_unix_s
        self._logprobs = options.logprobs
        self._tools = tools
        self._no_usage = None if options.include_usage else UNSET

    @property
    def _id(self) -> str:
        return "chatcmpl-" + self._request_id.removeprefix("req-")

    def opening(self, index: int) -> ChatChunk:
        # With tools it is not known yet whether there will be content: no content is null for
        # clients, and not "".
        content = "" if self._tools.dialect is None else UNSET
        return self._chunk(
            ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=content))
        )

    def chunk(self, index: int, delta: Delta) -> ChatChunk:
        content = delta.text if delta.text or not (delta.calls or delta.reasoning) else UNSET
        calls = [self._call_delta(index, piece) for piece in delta.calls] or UNSET
        added = ChatDelta(
            content=content, reasoning_content=delta.reasoning or UNSET, tool_calls=calls
        )
        return self._chunk(
            ChatChunkChoice(index=index, delta=added, logprobs=self._of(delta.tokens))
        )

    def closing(self, index: int, finish_reason: str) -> ChatChunk:
        return self._chunk(
            ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=finish_reason)
        )

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=[], usage=usage
        )

    def whole(self, choices: Sequence[Whole], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(whole) for whole in choices],
            usage=usage,
        )

    def _choice(self, whole: Whole) -> ChatChoice:
        calls = [
            ToolCall(
                id=self._tools.call_id(self._id, whole.index, piece.index),
                function=CalledFunction(name=piece.name or "", arguments=piece.arguments),
            )
            for piece in whole.delta.calls
        ]
        no_content = None if calls or self._tools.forced else ""
        message = AssistantMessage(
            content=whole.delta.text or no_content,
            reasoning_content=whole.delta.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        logprobs = self._of(whole.delta.tokens)
        return ChatChoice(
            index=whole.index, message=message, logprobs=logprobs, finish_reason=whole.finish_reason
        )

    def _call_delta(self, index: int, piece: CallPiece) -> ToolCallDelta:
        if piece.name is None:
            return ToolCallDelta(
                index=piece.index, function=FunctionDelta(arguments=piece.arguments)
            )
        return ToolCallDelta(
            index=piece.index,
            id=self._tools.call_id(self._id, index, piece.index),
            type="function",
            function=FunctionDelta(name=piece.name, arguments=piece.arguments),
        )

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=self._no_usage,
        )

    def _of(self, tokens: list[ShownToken]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs(content=[_logprob(token) for token in tokens])


def _logprob(token: ShownToken) -> TokenLogprob:
    top = [
        TopLogprob(token=other.text, logprob=other.logprob, bytes=other.utf8) for other in token.top
    ]
    return TokenLogprob(token=token.text, logprob=token.logprob, bytes=token.utf8, top_logprobs=top)
