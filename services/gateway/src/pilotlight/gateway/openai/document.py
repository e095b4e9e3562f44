"""The OpenAPI document of ``/v1``, made from the very types that requests are decoded into."""

from typing import Any

import msgspec

from pilotlight.gateway.edge.errors import ErrorResponse
from pilotlight.gateway.schema.replies import ChatCompletion, Completion, ModelCard, ModelList
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest

_TYPES = (
    ChatRequest,
    ChatCompletion,
    CompletionRequest,
    Completion,
    ModelList,
    ModelCard,
    ErrorResponse,
)


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas, components = msgspec.json.schema_components(
        _TYPES, ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip(_TYPES, schemas, strict=True))

    def body(kind: type) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": refs[kind]}}}

    def operation(summary: str, answer: type, request: type | None = None) -> dict[str, Any]:
        described: dict[str, Any] = {
            "summary": summary,
            "responses": {
                "200": {"description": "The answer.", **body(answer)},
                "default": {"description": "An error.", **body(ErrorResponse)},
            },
        }
        if request is not None:
            described["requestBody"] = {"required": True, **body(request)}
            answered = described["responses"]["200"]
            answered["description"] = "The answer; with `stream: true` as server-sent events."
            answered["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        return described

    named = operation("One model.", ModelCard)
    named["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pilotlight: OpenAI-compatible API", "version": version},
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": {
                "post": operation("Answer a conversation.", ChatCompletion, ChatRequest)
            },
            "/v1/completions": {
                "post": operation("Continue a prompt.", Completion, CompletionRequest)
            },
            "/v1/models": {"get": operation("Every model.", ModelList)},
            "/v1/models/{model}": {"get": named},
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
