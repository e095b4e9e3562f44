"""From a request of the Messages API to one of chat completions."""

from collections.abc import Iterable

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.schema.messages import (
    CountRequest,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
)
from pilotlight.gateway.schema.requests import (
    ChatMessage,
    ChatRequest,
    FunctionSpec,
    FunctionTool,
    GivenCall,
    GivenFunction,
    JsonSchemaFormat,
    NamedChoice,
    NamedFunction,
    NamedSchema,
    TextPart,
)

_NOT_TAKEN = ("container", "context_management", "mcp_servers")
"""Fields that would change the answer: null or empty alone."""


def chat_of(request: CountRequest) -> ChatRequest:
    """The same as a conversation of chat completions.

    Raises:
        BadRequest: it holds what there is no equivalent of.
    """
    chat = ChatRequest(model=request.model, messages=_messages(request))
    _tell_tools(request, chat)
    # An answer that the client has begun is gone on with.
    last = request.messages[-1]
    chat.continue_final_message = last.role == "assistant" and not chat.messages[-1].tool_calls
    if request.output_config is not None:
        if request.output_config.effort is not None:
            chat.reasoning_effort = request.output_config.effort
        if request.output_config.format is not None:
            schema = NamedSchema(schema=request.output_config.format.schema)
            chat.response_format = JsonSchemaFormat(json_schema=schema)
    if request.thinking is not None and request.thinking.type != "adaptive":
        chat.enable_thinking = request.thinking.type == "enabled"
    if isinstance(request, MessagesRequest):
        _tell_sampling(request, chat)
    return chat


def _tell_sampling(request: MessagesRequest, chat: ChatRequest) -> None:
    for name in _NOT_TAKEN:
        if getattr(request, name):
            raise BadRequest(f"{name} is not supported: leave it out", param=name)
    chat.max_tokens = request.max_tokens
    chat.stream = request.stream
    chat.stop = request.stop_sequences or None
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k


def _tell_tools(request: CountRequest, chat: ChatRequest) -> None:
    if request.tools:
        chat.tools = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    match choice.type:
        case "tool":
            if choice.name is None:
                raise BadRequest("a tool is chosen by its name", param="tool_choice.name")
            chat.tool_choice = NamedChoice(function=NamedFunction(name=choice.name))
        case "any":
            chat.tool_choice = "required"
        case "auto" | "none":
            chat.tool_choice = choice.type


def _tool(tool: ToolSpec, index: int) -> FunctionTool:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise BadRequest(
            "only tools that the client runs are known here: name, description, input_schema",
            param=f"tools[{index}]",
        )
    return FunctionTool(
        function=FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
    )


def _messages(request: CountRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if request.system:
        system = request.system
        content = system if isinstance(system, str) else _parts(system)
        messages.append(ChatMessage(role="system", content=content))
    for index, message in enumerate(request.messages):
        messages += _turn(message, f"messages[{index}]")
    return messages


def _turn(message: InputMessage, where: str) -> list[ChatMessage]:
    """One turn. What tools answered become messages of their own, before the turn's text."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    texts: list[TextPart] = []
    calls: list[GivenCall] = []
    results: list[ChatMessage] = []
    for block in message.content:
        match block:
            case TextBlock(text=text):
                texts.append(TextPart(text=text))
            case ToolUseBlock():
                calls.append(_call(block))
            case ToolResultBlock():
                results.append(_result(block))
            case ThinkingBlock() | RedactedThinkingBlock():
                continue
    if calls and message.role != "assistant":
        raise BadRequest("only the assistant calls tools", param=f"{where}.content")
    if results and message.role != "user":
        raise BadRequest("what tools answer comes from the user", param=f"{where}.content")
    if calls:
        return [ChatMessage(role="assistant", content=texts or None, tool_calls=calls)]
    if texts or not results:
        return [*results, ChatMessage(role=message.role, content=texts)]
    return results


def _call(block: ToolUseBlock) -> GivenCall:
    arguments = msgspec.json.encode(block.input).decode()
    return GivenCall(id=block.id, function=GivenFunction(name=block.name, arguments=arguments))


def _result(block: ToolResultBlock) -> ChatMessage:
    content = block.content if isinstance(block.content, str) else _parts(block.content)
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)


def _parts(blocks: Iterable[TextBlock]) -> list[TextPart]:
    return [TextPart(text=block.text) for block in blocks]
