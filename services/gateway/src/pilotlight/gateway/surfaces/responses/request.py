"""From a request of the Responses API to one of chat completions."""

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.schema.requests import (
    ChatMessage,
    ChatRequest,
    FunctionSpec,
    FunctionTool,
    GivenCall,
    GivenFunction,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedChoice,
    NamedFunction,
    NamedSchema,
    TextPart,
)
from pilotlight.gateway.schema.responses import (
    ChosenTool,
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponseTool,
)

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text"})
_SKIPPED = frozenset({"reasoning"})
"""Items of earlier answers that are not shown to the model again."""


def chat_of(request: ResponsesRequest, before: list[ChatMessage]) -> ChatRequest:
    """The same as a conversation of chat completions, which goes on from ``before``.

    Raises:
        BadRequest: it holds what there is no equivalent of.
    """
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise BadRequest(f"{name} is not supported: leave it out", param=name)
    messages = [*before, *messages_of(items_of(request))]
    if request.instructions:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        max_completion_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning=request.reasoning,
    )
    if request.tools:
        chat.tools = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    choice = request.tool_choice
    chat.tool_choice = (
        NamedChoice(function=NamedFunction(name=choice.name))
        if isinstance(choice, ChosenTool)
        else choice
    )
    _tell_format(request, chat)
    return chat


def items_of(request: ResponsesRequest) -> list[InputItem]:
    """The input as items."""
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    return request.input


def messages_of(items: list[InputItem]) -> list[ChatMessage]:
    """Items as messages: calls become part of the assistant's message before them.

    Raises:
        BadRequest: an item lacks something, or is of a kind that is not taken.
    """
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type in _SKIPPED:
            continue
        if item.type == "function_call":
            call = _call(item, where)
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                last.tool_calls = [*(last.tool_calls or ()), call]
            else:
                messages.append(ChatMessage(role="assistant", tool_calls=[call]))
        elif item.type == "function_call_output":
            if item.call_id is None:
                raise BadRequest("an output says which call it answers", param=f"{where}.call_id")
            content = _content(item.output, f"{where}.output")
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=content))
        elif item.type == "message":
            if item.role is None:
                raise BadRequest("a message has a role", param=f"{where}.role")
            content = _content(item.content, f"{where}.content")
            messages.append(ChatMessage(role=item.role, content=content))
        else:
            raise BadRequest(
                f"items of type {item.type[:64]!r} are not taken: messages, function_call and "
                "function_call_output are",
                param=f"{where}.type",
            )
    return messages


def _call(item: InputItem, where: str) -> GivenCall:
    if item.call_id is None or item.name is None:
        raise BadRequest("a call has a call_id and a name", param=f"{where}.call_id")
    function = GivenFunction(name=item.name, arguments=item.arguments or "{}")
    return GivenCall(id=item.call_id, function=function)


def _content(given: str | list[InputPart] | None, where: str) -> str | list[TextPart]:
    if given is None:
        raise BadRequest("it has no content", param=where)
    if isinstance(given, str):
        return given
    parts: list[TextPart] = []
    for index, part in enumerate(given):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in _TEXTS | {"refusal"}:
            raise BadRequest(
                f"{where}[{index}]: this model takes text only, and no part of type {part.type[:64]!r}",
                param=f"{where}[{index}].type",
            )
        parts.append(TextPart(text=text))
    return parts


def _tool(tool: ResponseTool, index: int) -> FunctionTool:
    if tool.type != "function" or tool.name is None:
        raise BadRequest(
            "only functions that the client runs are known here: type function, name, parameters",
            param=f"tools[{index}].type",
        )
    return FunctionTool(
        function=FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _tell_format(request: ResponsesRequest, chat: ChatRequest) -> None:
    asked = request.text.format if request.text is not None else None
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        chat.response_format = JsonObjectFormat()
        return
    if asked.schema is msgspec.UNSET:
        raise BadRequest("a json_schema has a schema", param="text.format.schema")
    chat.response_format = JsonSchemaFormat(json_schema=NamedSchema(schema=asked.schema))
