"""From a request of Ollama's API to one of chat completions, or to a plain one."""

import itertools
from collections import deque
from collections.abc import Iterator

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.schema.ollama import (
    OllamaCall,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from pilotlight.gateway.schema.pooling import EmbeddingRequest
from pilotlight.gateway.schema.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GivenCall,
    GivenFunction,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
)

RAW_TOKENS = 128
"""What goes on after a raw prompt at most, where no limit is named."""
LATEST = ":latest"
"""A tag that Ollama's clients add to names."""


def name_of(model: str) -> str:
    """A model's name as it is registered."""
    return model.removesuffix(LATEST)


def chat_of(request: OllamaChatRequest) -> ChatRequest:
    """The same as a conversation of chat completions.

    Raises:
        BadRequest: it holds what there is no equivalent of.
    """
    chat = ChatRequest(
        model=name_of(request.model),
        messages=_messages(request.messages),
        tools=request.tools or None,
    )
    _tell(request, chat)
    _tell_thinking(request, chat)
    return chat


def chat_of_prompt(request: OllamaGenerateRequest) -> ChatRequest:
    """A prompt as a conversation's only turn: the model's template writes it.

    Raises:
        BadRequest: as ``chat_of``.
    """
    _refuse(request)
    messages = [ChatMessage(role="user", content=request.prompt)]
    if request.system:
        messages.insert(0, ChatMessage(role="system", content=request.system))
    chat = ChatRequest(model=name_of(request.model), messages=messages)
    _tell(request, chat)
    _tell_thinking(request, chat)
    return chat


def completion_of(request: OllamaGenerateRequest) -> CompletionRequest:
    """A raw prompt, which no template writes.

    Raises:
        BadRequest: as ``chat_of``.
    """
    _refuse(request)
    if request.system or request.think:
        raise BadRequest("a raw prompt has no system text and no thinking", param="raw")
    plain = CompletionRequest(model=name_of(request.model), prompt=request.prompt)
    plain.max_tokens = RAW_TOKENS
    _tell(request, plain)
    return plain


def embedding_of(request: OllamaEmbedRequest) -> EmbeddingRequest:
    """The same as a request for embeddings."""
    return EmbeddingRequest(
        model=name_of(request.model),
        input=request.input if isinstance(request.input, str) else [*request.input],
        dimensions=request.dimensions,
        truncate_prompt_tokens=-1 if request.truncate else None,
    )


def _tell(request: OllamaRequest, body: ChatRequest | CompletionRequest) -> None:
    body.stream = request.stream
    options = request.options or OllamaOptions()
    body.temperature = options.temperature
    body.top_k, body.top_p, body.min_p = options.top_k, options.top_p, options.min_p
    body.seed, body.stop = options.seed, options.stop
    body.repetition_penalty = options.repeat_penalty
    body.presence_penalty = options.presence_penalty
    body.frequency_penalty = options.frequency_penalty
    if options.num_predict is not None and options.num_predict > 0:
        body.max_tokens = options.num_predict
    if isinstance(request.format, dict):
        body.response_format = JsonSchemaFormat(json_schema=NamedSchema(schema=request.format))
    elif request.format == "json":
        body.response_format = JsonObjectFormat()
    elif request.format:
        raise BadRequest("format is json or a schema", param="format")


def _tell_thinking(request: OllamaRequest, chat: ChatRequest) -> None:
    if isinstance(request.think, bool):
        chat.enable_thinking = request.think
    else:
        chat.reasoning_effort = request.think


def _refuse(request: OllamaGenerateRequest) -> None:
    for name in ("images", "context"):
        if getattr(request, name):
            raise BadRequest(f"{name} is not supported: leave it out", param=name)


def _messages(turns: list[OllamaMessage]) -> list[ChatMessage]:
    """Turns with ids of calls.

    A tool's answer without an id is that of the first open call of its name, or else of the first
    open call.
    """
    numbers = itertools.count()
    open_calls: deque[GivenCall] = deque()
    messages: list[ChatMessage] = []
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.images:
            raise BadRequest("this model takes text only", param=f"{where}.images")
        if turn.role == "tool":
            call_id = turn.tool_call_id or _answered(open_calls, turn.tool_name, where)
            messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=turn.content))
            continue
        message = ChatMessage(role=turn.role, content=turn.content, reasoning_content=turn.thinking)
        if turn.tool_calls:
            message.tool_calls = [_call(call, numbers) for call in turn.tool_calls]
            open_calls.extend(message.tool_calls)
        messages.append(message)
    return messages


def _call(call: OllamaCall, numbers: Iterator[int]) -> GivenCall:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return GivenCall(
        id=call.id or f"call_{next(numbers)}",
        function=GivenFunction(name=call.function.name, arguments=arguments),
    )


def _answered(open_calls: deque[GivenCall], name: str | None, where: str) -> str:
    if not open_calls:
        raise BadRequest("a tool's message follows a call", param=where)
    named = (call for call in open_calls if call.function.name == name)
    call = next(named, open_calls[0])
    open_calls.remove(call)
    return call.id
