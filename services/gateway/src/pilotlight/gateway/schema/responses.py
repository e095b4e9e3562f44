"""Bodies of ``/v1/responses``, in the shapes of OpenAI's Responses API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pilotlight.gateway.schema.requests import (
    MAX_TOOLS,
    ModelName,
    Name,
    Temperature,
    TokenLimit,
    TopP,
)

MAX_METADATA = 16
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=MAX_METADATA)]


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message's content; text is the only kind that is taken."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of the input: which members it has follows from its type."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: Any = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs; others are not known here."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, kw_only=True):
    """This function must be called."""

    type: Literal["function"]
    name: Name


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class ResponseText(msgspec.Struct, kw_only=True):
    """How the answer's text is to be."""

    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/responses``."""

    model: ModelName = ""
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: (
        Annotated[bool, Meta(description="Keep it, to go on from it; by default true.")] | None
    ) = None
    stream: bool | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: Any = None
    metadata: Metadata | None = None
    user: str | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    conversation: Any = None
    prompt: Any = None


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    """Text of the answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True):
    """What the model thought."""

    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A text."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call that the client is to make."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What the model thought before it answered."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    status: ItemStatus


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Of the answer's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct, kw_only=True):
    """Why an answer ends early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Why there is no answer."""

    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/responses``, and of reading it again."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Any
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Literal["none", "auto", "required"] | ChosenTool
    tools: list[ResponseTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Response of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(msgspec.Struct, kw_only=True):
    """Response of ``GET /v1/responses/{id}/input_items``."""

    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None = None
    last_id: str | None = None
    has_more: Literal[False] = False
