"""An answer as a response of the Responses API, and as the events of its streams."""

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.edge.errors import named_message
from pilotlight.gateway.openai.api import Conversed
from pilotlight.gateway.schema.requests import ChatMessage, GivenCall, GivenFunction
from pilotlight.gateway.schema.responses import (
    Incomplete,
    InputDetails,
    ItemStatus,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Response,
    ResponseFailure,
    ResponseFormat,
    ResponsesRequest,
    ResponseText,
    ResponseUsage,
)
from pilotlight.gateway.surfaces.blocks import Block, Change
from pilotlight.gateway.surfaces.narrated import Narrator, named_event

Keep = Callable[[Response, ChatMessage], Awaitable[bool]]
"""Stores a response and the message that it is; whether it is stored."""
_PREFIXES = {"text": "msg", "call": "fc", "reasoning": "rs"}


class ResponseNarrator(Narrator):
    """Tells one answer, and has it stored before it says that it is complete."""

    def __init__(
        self,
        conversed: Conversed,
        request: ResponsesRequest,
        request_id: str,
        created_at: int,
        keep: Keep,
    ) -> None:
        """Begin.

        Args:
            conversed: what is answered.
            request: what the client asked for, which the response repeats.
            request_id: the ids of the response and its items follow from it.
            created_at: the time of day, in seconds.
            keep: stores the response, where the client does not say otherwise.
        """
        super().__init__()
        self._conversed = conversed
        self._request = request
        self._suffix = request_id.removeprefix("req-")
        self._created_at = created_at
        self._keep = keep
        self._number = 0

    @property
    def response_id(self) -> str:
        """The response's id."""
        return f"resp_{self._suffix}"

    def opening(self) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def change(self, change: Change) -> bytes:
        block = change.block
        match change.what:
            case "opened":
                return self._opened(block)
            case "added":
                kind = {
                    "text": "output_text",
                    "call": "function_call_arguments",
                    "reasoning": "reasoning_text",
                }[block.kind]
                extra: dict[str, object] = {"logprobs": []} if block.kind == "text" else {}
                return self._event(
                    f"response.{kind}.delta", **self._place(block), delta=change.text, **extra
                )
            case "closed":
                return self._closed(block)

    async def closing(self, finish_reason: str) -> bytes:
        response = await self.whole(finish_reason)
        return self._event(f"response.{response.status}", response=response)

    async def whole(self, finish_reason: str) -> Response:
        cut = finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response.incomplete_details = Incomplete() if cut else None
        response.output = [self._item(block, "completed") for block in self.blocks.all]
        usage = self._conversed.exchange.usage()
        reasoning_tokens = self._conversed.exchange.answer.reasoning_tokens
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        if response.store:
            response.store = await self._keep(response, self._message())
        return response

    def failed(self, error: PilotlightError) -> bytes:
        """The last events of a stream that failed."""
        response = self._response("failed")
        message = f"{named_message(error).rstrip('.')}. {error.action}"
        response.error = ResponseFailure(code=error.code, message=message)
        return self._event("response.failed", response=response) + self._event(
            "error", code=error.code, message=message, param=error.param
        )

    def _message(self) -> ChatMessage:
        """The answer as the next request's template is shown it."""
        calls = [
            GivenCall(
                id=self._call_id(block),
                function=GivenFunction(name=block.name, arguments=block.text),
            )
            for block in self.blocks.all
            if block.kind == "call"
        ]
        text = "".join(block.text for block in self.blocks.all if block.kind == "text")
        return ChatMessage(
            role="assistant", content=text or (None if calls else ""), tool_calls=calls or None
        )

    def _opened(self, block: Block) -> bytes:
        item = self._item(block, "in_progress", empty=True)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._event(
            "response.content_part.added", **self._place(block), part=_part(block, "")
        )

    def _closed(self, block: Block) -> bytes:
        place, text = self._place(block), block.text
        match block.kind:
            case "call":
                done = self._event(
                    "response.function_call_arguments.done",
                    **place,
                    name=block.name,
                    arguments=text,
                )
            case "text":
                done = self._event("response.output_text.done", **place, text=text, logprobs=[])
            case "reasoning":
                done = self._event("response.reasoning_text.done", **place, text=text)
        if block.kind != "call":
            done += self._event("response.content_part.done", **place, part=_part(block, text))
        item = self._item(block, "completed")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, object]:
        place: dict[str, object] = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item(self, block: Block, status: ItemStatus, *, empty: bool = False) -> OutputItem:
        text, item_id = "" if empty else block.text, self._item_id(block)
        match block.kind:
            case "text":
                content = [] if empty else [OutputText(text=text)]
                return OutputMessage(id=item_id, status=status, content=content)
            case "call":
                return OutputCall(
                    id=item_id,
                    call_id=self._call_id(block),
                    name=block.name,
                    arguments=text,
                    status=status,
                )
            case "reasoning":
                thought = [] if empty else [ReasoningText(text=text)]
                return OutputReasoning(id=item_id, content=thought, status=status)

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._suffix}_{block.index}"

    def _call_id(self, block: Block) -> str:
        return self._conversed.tools.call_id(self.response_id, 0, block.call)

    def _response(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"]
    ) -> Response:
        request = self._request
        return Response(
            id=self.response_id,
            created_at=self._created_at,
            status=status,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=self._conversed.entry.model.name,
            output=[],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning=request.reasoning or {"effort": None, "summary": None},
            store=request.store is not False,
            temperature=1.0 if request.temperature is None else request.temperature,
            text=request.text or ResponseText(format=ResponseFormat()),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
            metadata=request.metadata or {},
        )

    def _event(self, kind: str, **members: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **members})


def _part(block: Block, text: str) -> msgspec.Struct:
    return OutputText(text=text) if block.kind == "text" else ReasoningText(text=text)
