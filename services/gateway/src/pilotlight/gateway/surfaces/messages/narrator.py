"""An answer as a message of Anthropic's API, and as the events of its streams."""

from typing import Literal

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.openai.api import Conversed
from pilotlight.gateway.schema.messages import (
    AnswerBlock,
    AnsweredMessage,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    MessageUsage,
)
from pilotlight.gateway.surfaces.blocks import Block, Change
from pilotlight.gateway.surfaces.messages.errors import error_event
from pilotlight.gateway.surfaces.narrated import Narrator, arguments_of, named_event

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_REASONS: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageNarrator(Narrator):
    """Tells one answer."""

    def __init__(self, conversed: Conversed, request_id: str) -> None:
        super().__init__()
        self._conversed = conversed
        self._id = "msg_" + request_id.removeprefix("req-")

    def opening(self) -> bytes:
        started = {"type": "message_start", "message": self._message([])}
        return named_event("message_start", started) + named_event("ping", {"type": "ping"})

    def change(self, change: Change) -> bytes:
        index = change.block.index
        match change.what:
            case "opened":
                block = self._block(change.block)
                return _event("content_block_start", index=index, content_block=block)
            case "added":
                return _event(
                    "content_block_delta", index=index, delta=_delta(change.block, change.text)
                )
            case "closed":
                return _event("content_block_stop", index=index)

    def failed(self, error: PilotlightError) -> bytes:
        return error_event(error)

    async def closing(self, finish_reason: str) -> bytes:
        message = self._ended(finish_reason)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        usage = {"output_tokens": message.usage.output_tokens}
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    async def whole(self, finish_reason: str) -> AnsweredMessage:
        return self._ended(finish_reason)

    def _ended(self, finish_reason: str) -> AnsweredMessage:
        message = self._message([self._block(block, whole=True) for block in self.blocks.all])
        stop = self._conversed.exchange.answer.stop
        message.stop_sequence = stop
        message.stop_reason = (
            "stop_sequence"
            if stop is not None and finish_reason == "stop"
            else _REASONS.get(finish_reason, "end_turn")
        )
        return message

    def _message(self, content: list[AnswerBlock]) -> AnsweredMessage:
        usage = self._conversed.exchange.usage()
        cached_tokens = usage.prompt_tokens_details.cached_tokens
        return AnsweredMessage(
            id=self._id,
            model=self._conversed.entry.model.name,
            content=content,
            usage=MessageUsage(
                input_tokens=usage.prompt_tokens - cached_tokens,
                output_tokens=usage.completion_tokens,
                cache_read_input_tokens=cached_tokens,
            ),
        )

    def _block(self, block: Block, *, whole: bool = False) -> AnswerBlock:
        text = block.text if whole else ""
        match block.kind:
            case "text":
                return AnswerText(text=text)
            case "reasoning":
                return AnswerThinking(thinking=text)
            case "call":
                call_id = self._conversed.tools.call_id(self._id, 0, block.call)
                return AnswerToolUse(id=call_id, name=block.name, input=arguments_of(text))


def _delta(block: Block, text: str) -> dict[str, str]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _event(kind: str, **members: object) -> bytes:
    return named_event(kind, {"type": kind, **members})
