"""Bodies of ``/v1``: requests are decoded strictly, responses have the shapes that the official clients expect.

Fields that the API knows and this server does not support are declared in ``NotSupported`` with any type, so that a value other
than "off" can be refused by name. Unknown fields are ignored, as clients of other servers send many.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pilotlight.text.stops import MAX_STOP_CHARS, MAX_STOPS

MAX_INT32 = 2**31 - 1

Temperature = Annotated[float, Meta(ge=0, le=2, description="0 is greedy.")]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32, description="0 or -1 switches it off.")]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenLimit = Annotated[int, Meta(ge=1, le=MAX_INT32)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class NotSupported(msgspec.Struct, kw_only=True):
    """Fields of the API that only take the value that switches them off."""

    n: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    web_search_options: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside the text."""

    include_usage: bool = False


class CommonRequest(NotSupported, kw_only=True):
    """What both kinds of completion take."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    max_tokens: TokenLimit | None = None
    ignore_eos: bool | None = None
    user: str | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """A part of a message's content; text is the only kind."""

    text: str


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatRequest(CommonRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A string, a list with one string, token ids, or a list with one list of them."),
    ]
    logprobs: Annotated[int, Meta(ge=0, le=5, description="The chosen token's only, whatever the number.")] | None = None


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(msgspec.Struct, kw_only=True):
    """Log probability of one chosen token."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any] = []


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a completion choice: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """The one choice."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The one choice of a chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion. The usage chunk has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """The one choice; of a chunk too."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/completions``, and one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


class ModelCard(msgspec.Struct, kw_only=True):
    """One model of ``GET /v1/models``."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pilotlight"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Response of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong, in OpenAI's words; ``code`` is Pilotlight's stable code."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every response that is not a success."""

    error: ErrorBody
