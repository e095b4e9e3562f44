"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, with the taxonomy's status and stable code."""

import math

import msgspec
from starlette.responses import Response

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.openai.types import ErrorBody, ErrorResponse

_encoder = msgspec.json.Encoder()


def error_body(error: PilotlightError) -> bytes:
    """The body that tells a client what went wrong and what to do."""
    message = f"{error.message.rstrip('.')}. {error.action}"
    return _encoder.encode(
        ErrorResponse(error=ErrorBody(message=message, type=error.openai_type, param=error.param, code=error.code))
    )


def error_headers(error: PilotlightError) -> dict[str, str]:
    """Headers that go with an error: when to try again, how to authenticate."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: PilotlightError) -> Response:
    """The response for an error that came before the first byte."""
    return Response(error_body(error), error.status, error_headers(error), "application/json")
