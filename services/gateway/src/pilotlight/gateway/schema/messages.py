"""Bodies of ``/v1/messages``, in the shapes of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pilotlight.gateway.schema.requests import MAX_TOOLS, ModelName, Name, StopString, TokenLimit


class TextBlock(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """Text."""

    text: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A call of a tool."""

    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True):
    """What a tool answered."""

    tool_use_id: Name
    content: str | list[TextBlock] = ""
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True):
    """What the model thought in an earlier turn: it is not shown to it again."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(
    msgspec.Struct, tag_field="type", tag="redacted_thinking", kw_only=True
):
    """Likewise, unreadable."""

    data: str = ""


InputBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class ToolSpec(msgspec.Struct, kw_only=True):
    """A tool that the client runs; others are not known here."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks before it answers, where its template knows a switch."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the answer must look like."""

    format: OutputFormat | None = None
    effort: Any = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: ModelName = ""
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: TokenLimit
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None


class InputTokens(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of a request."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnswerText(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """Text of the answer."""

    text: str
    citations: None = None


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A call that the client is to make."""

    id: str
    name: str
    input: dict[str, Any]


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True):
    """What the model thought before it answered."""

    thinking: str
    signature: str = ""


AnswerBlock = AnswerThinking | AnswerText | AnswerToolUse


class AnsweredMessage(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/messages``."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessagesError(msgspec.Struct, kw_only=True):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every response that is not a success; also the event of a stream that fails."""

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str | UnsetType = UNSET
