"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, with the
taxonomy's status and stable code.
"""

import math
import re

import msgspec
from starlette.responses import Response

from pilotlight.common.errors import DeadlineExceeded, NoWorker, PilotlightError

_encoder = msgspec.json.Encoder()


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong, in OpenAI's words; ``code`` is Pilotlight's stable code."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every response that is not a success."""

    error: ErrorBody


def error_body(error: PilotlightError) -> bytes:
    """The body that tells a client what went wrong and what to do."""
    message = f"{named_message(error).rstrip('.')}. {error.action}"
    return _encoder.encode(
        ErrorResponse(
            error=ErrorBody(
                message=message, type=error.openai_type, param=error.param, code=error.code
            )
        )
    )


def named_message(error: PilotlightError) -> str:
    """What went wrong; where it is a field's fault, the message names it."""
    if error.param is None or re.search(rf"(?<!\w){re.escape(error.param)}(?!\w)", error.message):
        return error.message
    return f"{error.param}: {error.message}"


def error_headers(error: PilotlightError) -> dict[str, str]:
    """Headers that go with an error: whether and when to try again, how to authenticate, which
    encoding is taken.
    """
    headers = {"x-should-retry": str(_retried(error)).lower()}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 415:
        headers["accept-encoding"] = "identity"
    return headers


def _retried(error: PilotlightError) -> bool:
    """Whether a client shall send the request again by itself.

    Official clients do so on 408, 409, 429 and everything from 500, unless this header says
    otherwise. What the error says of a retry holds, but for a deadline: a second try works, is
    billed and most likely ends as the first did. And until there are other workers, a model that
    none can hold stays so.
    """
    return error.retryable and not isinstance(error, DeadlineExceeded | NoWorker)


def error_response(error: PilotlightError) -> Response:
    """The response for an error that came before the first byte."""
    return Response(error_body(error), error.status, error_headers(error), "application/json")
