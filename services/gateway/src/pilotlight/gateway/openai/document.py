"""The OpenAPI document of the API for inference, made from the very types that requests are decoded
into.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec

from pilotlight.gateway.edge.errors import ErrorResponse
from pilotlight.gateway.schema import batches, messages, ollama, pooling, responses, tokens
from pilotlight.gateway.schema.replies import ChatCompletion, Completion, ModelCard, ModelList
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest

_JSON = "application/json"
_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"
_NAMES = {_EVENTS: "server-sent events", _LINES: "lines of JSON"}


@dataclass(frozen=True, slots=True)
class _Route:
    """One operation."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    answer: type
    request: type | None = None
    stream: str | None = None
    """The media type of its stream; None: it has none."""
    error: type = ErrorResponse
    request_media: str = _JSON
    answer_media: str = _JSON


_MESSAGES_ERROR = messages.MessagesErrorResponse
_ROUTES = (
    _Route(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletion,
        ChatRequest,
        _EVENTS,
    ),
    _Route("post", "/v1/completions", "Continue a prompt.", Completion, CompletionRequest, _EVENTS),
    _Route(
        "post",
        "/v1/embeddings",
        "Vectors of texts.",
        pooling.Embeddings,
        pooling.EmbeddingRequest,
    ),
    _Route(
        "post",
        "/v1/rerank",
        "Rank documents by a query.",
        pooling.Reranked,
        pooling.RerankRequest,
    ),
    _Route(
        "post",
        "/v1/score",
        "How well pairs of texts go together.",
        pooling.Scores,
        pooling.ScoreRequest,
    ),
    _Route(
        "post",
        "/v1/files",
        "Upload a file for a batch.",
        batches.File,
        batches.FileUpload,
        request_media="multipart/form-data",
    ),
    _Route("get", "/v1/files", "A key's files.", batches.FileList),
    _Route("get", "/v1/files/{file_id}", "One file.", batches.File),
    _Route("delete", "/v1/files/{file_id}", "Delete a file.", batches.DeletedFile),
    _Route(
        "get",
        "/v1/files/{file_id}/content",
        "What is in a file.",
        str,
        answer_media="application/octet-stream",
    ),
    _Route(
        "post",
        "/v1/batches",
        "Run the requests of a file when there is time.",
        batches.Batch,
        batches.BatchRequest,
    ),
    _Route("get", "/v1/batches", "A key's batches.", batches.BatchList),
    _Route("get", "/v1/batches/{batch_id}", "One batch.", batches.Batch),
    _Route("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch.", batches.Batch),
    _Route("get", "/v1/models", "Every model.", ModelList),
    _Route("get", "/v1/models/{model}", "One model.", ModelCard),
    _Route(
        "post",
        "/v1/responses",
        "Answer, and keep the answer to go on from.",
        responses.Response,
        responses.ResponsesRequest,
        _EVENTS,
    ),
    _Route("get", "/v1/responses/{response_id}", "A stored response.", responses.Response),
    _Route(
        "delete",
        "/v1/responses/{response_id}",
        "Delete a stored response.",
        responses.DeletedResponse,
    ),
    _Route(
        "get",
        "/v1/responses/{response_id}/input_items",
        "What a stored response was asked.",
        responses.InputItems,
    ),
    _Route(
        "post",
        "/v1/messages",
        "Answer a conversation, in the shapes of Anthropic's API.",
        messages.AnsweredMessage,
        messages.MessagesRequest,
        _EVENTS,
        _MESSAGES_ERROR,
    ),
    _Route(
        "post",
        "/v1/messages/count_tokens",
        "Tokens of a conversation.",
        messages.InputTokens,
        messages.CountRequest,
        None,
        _MESSAGES_ERROR,
    ),
    _Route(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation.",
        tokens.Tokenized,
        tokens.TokenizeRequest,
    ),
    _Route(
        "post",
        "/detokenize",
        "The text of token ids.",
        tokens.Detokenized,
        tokens.DetokenizeRequest,
    ),
    _Route(
        "post",
        "/api/chat",
        "Answer a conversation, in the shapes of Ollama's API.",
        ollama.OllamaAnswer,
        ollama.OllamaChatRequest,
        _LINES,
        ollama.OllamaError,
    ),
    _Route(
        "post",
        "/api/generate",
        "Answer a prompt, likewise.",
        ollama.OllamaAnswer,
        ollama.OllamaGenerateRequest,
        _LINES,
        ollama.OllamaError,
    ),
    _Route(
        "post",
        "/api/embed",
        "Vectors of texts, likewise.",
        ollama.OllamaEmbedded,
        ollama.OllamaEmbedRequest,
        None,
        ollama.OllamaError,
    ),
    _Route(
        "post",
        "/api/embeddings",
        "The vector of one text, as older clients of Ollama's API ask for it.",
        ollama.OllamaVector,
        ollama.OllamaPromptRequest,
        None,
        ollama.OllamaError,
    ),
    _Route(
        "post",
        "/api/show",
        "What a model is and can do.",
        ollama.OllamaShown,
        ollama.OllamaShowRequest,
        None,
        ollama.OllamaError,
    ),
    _Route(
        "post",
        "/api/pull",
        "Whether a model is there; nothing is fetched.",
        ollama.OllamaPulled,
        ollama.OllamaPullRequest,
        _LINES,
        ollama.OllamaError,
    ),
    _Route("get", "/api/tags", "Every model.", ollama.OllamaModels, error=ollama.OllamaError),
    _Route(
        "get",
        "/api/ps",
        "Models that can answer at once.",
        ollama.OllamaModels,
        error=ollama.OllamaError,
    ),
    _Route("get", "/api/version", "The release.", ollama.OllamaVersion, error=ollama.OllamaError),
)


@cache
def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1; no caller changes what it gets."""
    kinds = list(
        dict.fromkeys(
            kind
            for route in _ROUTES
            for kind in (route.request, route.answer, route.error)
            if kind is not None
        )
    )
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in _ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pilotlight: API for inference", "version": version},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: _Route, refs: dict[type, dict[str, Any]]) -> dict[str, Any]:
    def body(kind: type, media: str = _JSON) -> dict[str, Any]:
        return {"content": {media: {"schema": refs[kind]}}}

    answer: dict[str, Any] = {
        "description": "The answer.",
        **body(route.answer, route.answer_media),
    }
    if route.stream is not None:
        answer["description"] = f"The answer; with `stream: true` as {_NAMES[route.stream]}."
        answer["content"][route.stream] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": answer,
            "default": {"description": "An error.", **body(route.error)},
        },
    }
    if route.request is not None:
        described["requestBody"] = {
            "required": True,
            **body(route.request, route.request_media),
        }
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return described
