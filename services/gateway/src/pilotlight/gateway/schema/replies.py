"""Bodies of answers of ``/v1``, in the shapes that the official clients expect."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int = 0
    """As many were found in an engine's prefix cache."""


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)


class TopLogprob(msgspec.Struct, kw_only=True):
    """Log probability of a token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    """Log probability of one chosen token."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a completion choice: parallel lists.

    Each of ``top_logprobs`` has the token itself and the likeliest. The first token of a prompt has
    none, as nothing stands before it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(msgspec.Struct, kw_only=True):
    """What is called, with which arguments: the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the client is to make."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer. With calls of tools the content may be null."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

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


class FunctionDelta(msgspec.Struct, kw_only=True):
    """The name comes with a call's first chunk; arguments come in pieces."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to one call."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What a chunk adds to one answer."""

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


class PlacedToken(msgspec.Struct, kw_only=True):
    """A token that stands in some place of a prompt, or might."""

    logprob: float
    rank: int
    """From 1, the likeliest."""
    decoded_token: str


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer, or what a chunk adds to it."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, PlacedToken] | None] | UnsetType = UNSET
    """By token id; null for the first token."""


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
    root: str
    """The registered model; ``id`` may be an alias of it."""
    task: Literal["generate", "embed", "score"]
    """What it is for."""
    max_model_len: int
    state: Literal["cold", "loading", "ready"]
    expected_s: float | None
    """Seconds until it is ready when it is asked for now; null where that is not known."""


class ModelList(msgspec.Struct, kw_only=True):
    """Response of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
