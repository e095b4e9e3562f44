"""Bodies of ``/api/…``, in the shapes of Ollama's API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pilotlight.gateway.schema.pooling import Dimensions
from pilotlight.gateway.schema.requests import (
    MAX_TOOLS,
    FunctionTool,
    Name,
    Penalty,
    Seed,
    Stops,
    Temperature,
)


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How tokens are sampled. What is not named here changes no answer, or is not known."""

    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    num_predict: (
        Annotated[int, Meta(description="Tokens at most; negative: as there is room.")] | None
    ) = None
    stop: Stops | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Literal[0] | None = None
    tfs_z: Literal[1] | None = None
    typical_p: Literal[1] | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    """What is called, with which arguments."""

    name: Name
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call of a tool. Older clients send no id."""

    id: str | UnsetType = UNSET
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Any = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What both ways to ask take."""

    model: Annotated[str, Meta(max_length=256)] = ""
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: Any = None
    """Taken and not heeded: how long an idle instance stays is the model's own setting. None at all
    asks to unload the model, where nothing else is asked."""


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """Body of ``POST /api/chat``."""

    messages: Annotated[
        list[OllamaMessage], Meta(description="Without any the model is loaded, or unloaded.")
    ] = []
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """Body of ``POST /api/generate``."""

    prompt: Annotated[str, Meta(description="An empty one: the model is loaded, or unloaded.")] = ""
    system: str | None = None
    raw: bool = False
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    images: Any = None
    context: Any = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /api/show``."""

    model: Annotated[str, Meta(max_length=256)] = ""


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /api/pull``; ``name`` is what older clients call it."""

    model: Annotated[str, Meta(max_length=256)] = ""
    name: Annotated[str, Meta(max_length=256)] = ""
    stream: bool = True


class OllamaPulled(msgspec.Struct, kw_only=True):
    """Response of ``POST /api/pull``, or a line of it."""

    status: str


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /api/embed``."""

    model: Annotated[str, Meta(max_length=256)] = ""
    input: Annotated[str | list[str], Meta(description="A text, or texts.")]
    truncate: Annotated[
        bool, Meta(description="Longer texts are cut to what the model takes, or refused.")
    ] = True
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = None
    """Taken and not heeded, as ``keep_alive``: nothing of it changes a vector."""
    keep_alive: Any = None


class OllamaPromptRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /api/embeddings``, which Ollama has given up for ``/api/embed``."""

    model: Annotated[str, Meta(max_length=256)] = ""
    prompt: Annotated[str, Meta(min_length=1)]
    options: OllamaOptions | None = None
    keep_alive: Any = None


class OllamaEmbedded(msgspec.Struct, kw_only=True):
    """Response of ``POST /api/embed``. Durations are in ns."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(msgspec.Struct, kw_only=True):
    """Response of ``POST /api/embeddings``."""

    embedding: list[float]


class AnsweredTurn(msgspec.Struct, kw_only=True):
    """The answer, or what a line adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """Response of both ways to ask, and one line of their streams. Durations are in ns."""

    model: str
    created_at: str
    message: AnsweredTurn | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaDetails(msgspec.Struct, kw_only=True):
    """What kind of model it is."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """One model of a list."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    size_vram: int | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    """Response of ``GET /api/tags`` and ``GET /api/ps``."""

    models: list[OllamaModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """Response of ``POST /api/show``."""

    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    """Response of ``GET /api/version``."""

    version: str


class OllamaError(msgspec.Struct, kw_only=True):
    """Body of every response that is not a success."""

    error: str
