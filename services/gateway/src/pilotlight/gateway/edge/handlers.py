"""How the application's own errors, and its router's, become answers."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from pilotlight.common.errors import (
    InternalError,
    MethodNotAllowed,
    PilotlightError,
    RouteNotFound,
)
from pilotlight.gateway.edge.errors import error_response
from pilotlight.gateway.edge.http import note_error


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler for everything in the taxonomy."""
    assert isinstance(error, PilotlightError)
    note_error(request.scope, error)
    return error_response(error)


async def on_bug(request: Request, _: Exception) -> Response:
    """Exception handler for what should not have happened; ``Edge`` logs it."""
    return await on_error(request, InternalError("this request met a bug"))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for what the router itself raises."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = await on_error(
            request, MethodNotAllowed(f"{request.url.path} does not take {request.method}")
        )
        response.headers.update(allow(request))
        return response
    return await on_error(request, RouteNotFound(f"there is no route {request.url.path[:200]}"))


def allow(request: Request) -> dict[str, str]:
    """The header of a 405: every method of the path, where the router knows those of one route.

    Of several patterns the longest is the path's: ``/models/{name}/warm`` is no model's name.
    """
    found = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    path = max((route.path for route in found), key=len, default="")
    methods = {method for route in found if route.path == path for method in route.methods or ()}
    return {"allow": ", ".join(sorted(methods))}
