"""Errors in Anthropic's shape."""

import msgspec

from pilotlight.common.errors import CapacityError, PilotlightError, TransientError
from pilotlight.gateway.edge.errors import named_message
from pilotlight.gateway.schema.messages import MessagesError, MessagesErrorResponse
from pilotlight.gateway.surfaces.narrated import named_event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}


def error_body(error: PilotlightError, request_id: str) -> bytes:
    """The body that tells a client what went wrong and what to do."""
    return msgspec.json.encode(MessagesErrorResponse(error=_told(error), request_id=request_id))


def error_event(error: PilotlightError) -> bytes:
    """The last event of a stream that failed."""
    return named_event("error", MessagesErrorResponse(error=_told(error)))


def _told(error: PilotlightError) -> MessagesError:
    message = f"{error.code}: {named_message(error).rstrip('.')}. {error.action}"
    return MessagesError(type=_type(error), message=message)


def _type(error: PilotlightError) -> str:
    if isinstance(error, CapacityError):
        return "rate_limit_error"
    if isinstance(error, TransientError):
        return "overloaded_error"
    return _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
