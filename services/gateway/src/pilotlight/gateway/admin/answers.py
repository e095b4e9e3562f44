"""How the admin API says that something went wrong."""

import structlog
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pilotlight.common.errors import (
    BadRequest,
    InternalError,
    MethodNotAllowed,
    PilotlightError,
    RouteNotFound,
    UnprocessableInput,
)
from pilotlight.gateway.edge.departure import ClientGone
from pilotlight.gateway.edge.errors import error_headers, named_message
from pilotlight.gateway.edge.handlers import allow
from pilotlight.gateway.edge.http import CLIENT_GONE_STATUS, note_error

log = structlog.get_logger()


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for everything in the taxonomy."""
    assert isinstance(error, PilotlightError)
    if error.status >= 500 and not error.retryable:
        log.error(
            "admin request failed", action="admin_failed", code=error.code, error=error.message
        )
    note_error(request.scope, error)
    body = {
        "code": error.code,
        "message": named_message(error),
        "param": error.param,
        "what_to_do": error.action,
    }
    return JSONResponse({"error": body}, error.status, headers=error_headers(error))


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for bodies and parameters that are not what the route takes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return await on_error(request, BadRequest("the body is not valid JSON"))
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "path", "query"))
    message = f"{where or 'body'}: {first['msg']}"
    if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        message = "body: send a JSON object, and say so: `Content-Type: application/json`"
    return await on_error(request, UnprocessableInput(message, param=where or None))


async def on_bug(request: Request, error: Exception) -> Response:
    """What should not have happened; the gateway's edge logs it, too."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE_STATUS)
    return await on_error(request, InternalError("this request met a bug"))


async def on_http(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for what the router itself raises."""
    assert isinstance(error, HTTPException)
    kind = {404: RouteNotFound, 405: MethodNotAllowed}.get(error.status_code, BadRequest)
    answer = await on_error(request, kind() if kind is not BadRequest else kind(str(error.detail)))
    answer.headers.update(allow(request) if kind is MethodNotAllowed else error.headers or {})
    return answer
