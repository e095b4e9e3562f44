"""The HTTP edge: reading bodies within limits, noticing that a client has left, and one way for
everything to fail.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.common.errors import (
    BadRequest,
    BodyTimeout,
    DeadlineExceeded,
    InternalError,
    MethodNotAllowed,
    PilotlightError,
    RouteNotFound,
    TooLarge,
    UnsupportedEncoding,
)
from pilotlight.common.ids import new_request_id
from pilotlight.common.telemetry import current_traceparent, server_span
from pilotlight.common.waiting import cancel_all, within
from pilotlight.gateway.edge import sse
from pilotlight.gateway.edge.bodies import BodyBudget, BodyRoom, room_of
from pilotlight.gateway.edge.errors import error_response
from pilotlight.gateway.edge.measures import HttpMeasures
from pilotlight.policy.bodies import decoded_bytes

log = structlog.get_logger()

MAX_HEADERS = 100
BODY_DEADLINE_S = 60.0
"""For the whole body to arrive."""
SEND_DEADLINE_S = 60.0
"""For a client to take what it was sent; past it the client counts as gone."""
CLIENT_GONE = "client_gone"
CLIENT_GONE_STATUS = 499
"""Counted in the place of an error's code and of a status when the client leaves before the end of
its answer; the status is nginx's."""
_ERROR_CODE = "error_code"

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def read_body(request: Request, limit_bytes: int, owner: str) -> bytes:
    """A request's body.

    It has room in the budget until the answer begins to be made; ``owner`` is whose share of it
    that is.

    Raises:
        UnsupportedEncoding: it is compressed, or encoded in another way.
        TooLarge: it is longer than the limit, or takes more memory than there is for bodies.
        BodiesFull: other bodies leave no room for it now.
        BodyTimeout: it did not arrive in time.
        ClientGone: the client left while sending it.
    """
    _check_encoding(request)
    room = room_of(request.scope)
    announced = request.headers.get("content-length", "")
    if announced.isdigit():
        if int(announced) > limit_bytes:
            raise TooLarge(f"a body of {announced} bytes; at most {limit_bytes} are taken")
        room.take(owner, int(announced))
    try:
        body = await within(
            BODY_DEADLINE_S, _read(request.receive, limit_bytes, room, owner), "the body"
        )
    except DeadlineExceeded as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_DEADLINE_S:g} s") from error
    room.take(owner, decoded_bytes(body))
    return body


async def _read(receive: Receive, limit_bytes: int, room: BodyRoom, owner: str) -> bytes:
    pause_s = room.budget.pause_s
    body = bytearray()
    while True:
        try:
            message = await within(pause_s, receive(), "a part of the body")
        except DeadlineExceeded as error:
            raise BodyTimeout(
                f"no byte of the body arrived for {pause_s:g} s, after {len(body)}"
            ) from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if len(body) + len(part) > limit_bytes:
            raise TooLarge(f"the body is longer than {limit_bytes} bytes")
        room.take(owner, len(body) + len(part))
        body += part
        if not message.get("more_body", False):
            return bytes(body)


def _check_encoding(request: Request) -> None:
    for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        codings = {
            coding.strip().lower()
            for value in request.headers.getlist(name)
            for coding in value.split(",")
        }
        if codings - {plain, ""}:
            raise UnsupportedEncoding(f"{name}: {', '.join(sorted(codings))[:100]} is not taken")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do something for a client, for as long as it is there. Its body must have been read.

    Raises:
        ClientGone: it left; the work was cancelled and has ended.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await cancel_all((working, leaving))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answering(Response):
    """A response that is made while the client waits: cancelled at once when the client leaves."""

    def __init__(self, make: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room_of(scope).release()

        async def work() -> None:
            response = await self._make()
            await _in_time(response(scope, receive, send))

        await while_connected(receive, work())


class EventStream(Response):
    """A stream of server-sent events.

    The status is sent with the first of them; an error after it is an event.
    """

    def __init__(self, events: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room_of(scope).release()
        await while_connected(receive, self._write(scope, send))

    async def _write(self, scope: Scope, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events()) as events:
                async for data in events:
                    if not started:
                        started = True
                        headers = [
                            (name.encode(), value.encode()) for name, value in sse.HEADERS.items()
                        ]
                        await _in_time(
                            send({"type": "http.response.start", "status": 200, "headers": headers})
                        )
                    await _in_time(
                        send({"type": "http.response.body", "body": data, "more_body": True})
                    )
        except Exception as error:
            if not started or isinstance(error, ClientGone):
                raise
            failure = error if isinstance(error, PilotlightError) else _bug(error)
            note_error(scope, failure)
            await _in_time(
                send(
                    {
                        "type": "http.response.body",
                        "body": sse.error_event(failure),
                        "more_body": True,
                    }
                )
            )
        await _in_time(send({"type": "http.response.body", "body": b"", "more_body": False}))


async def _in_time(sending: Awaitable[None]) -> None:
    try:
        await within(SEND_DEADLINE_S, sending, "sending")
    except DeadlineExceeded as error:
        raise ClientGone from error


class Edge:
    """The outermost application: ids, trace, limits on headers, room for the body, counts, and the
    last resort for errors.
    """

    def __init__(
        self, app: ASGIApp, traced: frozenset[str], bodies: BodyBudget, measures: HttpMeasures
    ) -> None:
        self._app = app
        self._traced = traced
        self._bodies = bodies
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] not in self._traced:
            await self._answer(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"][:MAX_HEADERS]
        }
        with server_span(f"{scope['method']} {scope['path']}", headers):
            await self._answer(scope, receive, send)

    def malformed(self) -> Response:
        """The answer to what is no HTTP; it is counted."""
        self._measures.answered("none", "none", 400, BadRequest.code)
        return error_response(
            BadRequest("this is not HTTP/1.1, or its parts contradict each other")
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        trace_parent = current_traceparent()
        own = [(b"x-request-id", request_id.encode())]
        if trace_parent:
            own.append((b"x-trace-id", trace_parent.split("-")[1].encode()))
        status = 0

        async def send_with_ids(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        room = BodyRoom(self._bodies)
        room.put_into(scope)
        try:
            if len(scope["headers"]) > MAX_HEADERS:
                raise BadRequest(
                    f"{len(scope['headers'])} headers; at most {MAX_HEADERS} are taken"
                )
            await self._app(scope, receive, send_with_ids)
        except ClientGone:
            log.debug("client left", action="client_gone", request_id=request_id)
            status = CLIENT_GONE_STATUS
            scope["state"][_ERROR_CODE] = CLIENT_GONE
        except Exception as error:  # noqa: BLE001 - the last resort: a client is always answered
            failure = error if isinstance(error, PilotlightError) else _bug(error)
            note_error(scope, failure)
            if not status:
                await error_response(failure)(scope, receive, send_with_ids)
        finally:
            room.release()
            self._measures.answered(
                _route_of(scope), scope["method"], status, scope["state"].get(_ERROR_CODE, "")
            )


def note_error(scope: Scope, error: PilotlightError) -> None:
    """With which error a request ends, for metrics and records."""
    scope["state"][_ERROR_CODE] = error.code


def error_code_of(scope: Scope) -> str | None:
    """The code that was noted last; None without an error."""
    return scope["state"].get(_ERROR_CODE)


def _route_of(scope: Scope) -> str:
    """The template of the route that a request found: their number is fixed."""
    route = scope.get("route")
    if isinstance(route, Mount):
        return route.path
    path = getattr(route, "path", None)
    return "none" if path is None else scope.get("root_path", "") + path


def _bug(error: Exception) -> InternalError:
    log.error("request failed", action="request_bug", exc_info=error)
    return InternalError("this request met a bug")


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
        response.headers.update(error.headers or {})
        return response
    return await on_error(request, RouteNotFound(f"there is no route {request.url.path[:200]}"))
