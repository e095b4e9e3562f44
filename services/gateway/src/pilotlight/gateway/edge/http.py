"""The HTTP edge: reading bodies within limits, noticing that a client has left, and one way for
everything to fail.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pilotlight.common.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    PilotlightError,
    TransientError,
)
from pilotlight.common.ids import new_request_id
from pilotlight.common.telemetry import annotate, server_span
from pilotlight.common.waiting import within
from pilotlight.gateway.edge import sse
from pilotlight.gateway.edge.bodies import BodyBudget, BodyRoom, room_of
from pilotlight.gateway.edge.client_headers import Header, SendWithIds
from pilotlight.gateway.edge.departure import ClientGone, Connected, Receiving
from pilotlight.gateway.edge.errors import error_response
from pilotlight.gateway.edge.measures import HttpMeasures
from pilotlight.gateway.edge.refusals import Refusals

log = structlog.get_logger()

MAX_HEADERS = 100
SEND_DEADLINE_S = 60.0
"""For a client to take what it was sent; past it the client counts as gone."""
STOPPING = "this gateway is stopping; send the request again"
STOPPING_RETRY_AFTER_S = 1.0
CLIENT_GONE = "client_gone"
CLIENT_GONE_STATUS = 499
"""Counted in the place of an error's code and of a status when the client leaves before the end of
its answer; the status is nginx's."""
_ERROR_CODE = "error_code"
_KEPT = ("type", "method", "root_path", "state", "route")
"""Of the scope, what is still read when the answer is made, where it is not empty."""
_NOTHING = nullcontext()
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
STREAM_HEADERS = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]


class Answering:
    """A response that is made while the client waits: cancelled at once when the client leaves.

    No ``Response`` of Starlette's, for it has no headers yet: they would be made, and kept.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Awaitable[Response]]) -> None:
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _read_no_more(scope)
        with Connected(receive):
            response = await self._make()
            if not _sent_at_once(response, send):
                await _in_time(response(scope, receive, send))


Write = Callable[[bytes], Awaitable[None]]
"""Sends some events of a stream.

Raises ``ClientGone`` when the client does not take them.
"""


class EventStream(ABC):
    """A stream of server-sent events.

    The status is sent with the first of them; an error after it is an event. One object with all
    that it needs: of streams that wait there are many.
    """

    __slots__ = ("_headers", "_own", "_send", "_started", "_within")

    def __init__(
        self,
        *,
        within: AbstractContextManager[None] = _NOTHING,
        headers: Sequence[Header] = STREAM_HEADERS,
    ) -> None:
        """Make it; nothing is sent yet.

        Args:
            within: is around the making of the events.
            headers: of the answer.
        """
        self._within = within
        self._headers = headers
        self._started = False

    @abstractmethod
    def make(self) -> Awaitable[None]:
        """Write the events, but those that ``last`` gives."""

    def last(self) -> bytes:
        """The events at the end, which ``make`` has not written."""
        return b""

    def error_event(self, error: PilotlightError) -> bytes:
        """How an error looks that comes after the first event."""
        return sse.error_event(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _read_no_more(scope)
        self._send = send
        self._own = send if isinstance(send, SendWithIds) else None
        with Connected(receive):
            try:
                with self._within:
                    await self.make()
                last = self.last()
            except Exception as error:
                if not self._started or isinstance(error, ClientGone):
                    raise
                last = self.error_event(noted(scope, error))
            await self._end(last)

    async def write(self, data: bytes) -> None:
        """As ``Write``: some events, and the head with the first."""
        own = self._own
        if not self._started:
            self._started = True
            if own is not None and own.begin(200, self._headers, data, more=True):
                return
            await _in_time(
                self._send(
                    {"type": "http.response.start", "status": 200, "headers": list(self._headers)}
                )
            )
        elif own is not None and own.go_on(data, more=True):
            return
        await _in_time(self._send({"type": "http.response.body", "body": data, "more_body": True}))

    async def _end(self, data: bytes) -> None:
        """Write the last of them, which may be empty."""
        if self._started and self._own is not None and self._own.go_on(data, more=False):
            return
        if data:
            await self.write(data)
        end = {"type": "http.response.body", "body": b"", "more_body": False}
        await _in_time(self._send(end))


class WrittenEvents(EventStream):
    """A stream of what a function writes."""

    __slots__ = ("_error_event", "_make")

    def __init__(
        self,
        make: Callable[[Write], Awaitable[None]],
        *,
        headers: Sequence[Header] = STREAM_HEADERS,
        error_event: Callable[[PilotlightError], bytes] = sse.error_event,
    ) -> None:
        """As ``EventStream``.

        Args:
            make: writes the events.
            headers: of the answer.
            error_event: how an error looks that comes after the first event.
        """
        super().__init__(headers=headers)
        self._make = make
        self._error_event = error_event

    def make(self) -> Awaitable[None]:
        return self._make(self.write)

    def error_event(self, error: PilotlightError) -> bytes:
        return self._error_event(error)


def _sent_at_once(response: Response, send: Send) -> bool:
    """Whether nothing had to be waited for."""
    return (
        isinstance(send, SendWithIds)
        and type(response) is Response
        and response.background is None
        and send.begin(response.status_code, response.raw_headers, bytes(response.body), more=False)
    )


def _read_no_more(scope: Scope) -> None:
    """Let go of what only the making of an answer's way needed: a request may wait for long."""
    room_of(scope).release()
    kept = {name: scope[name] for name in _KEPT if scope.get(name)}
    # Not the same, emptied: what stands before this application may still look at them.
    kept["headers"] = ()
    scope.clear()
    scope.update(kept)


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
        self,
        app: ASGIApp,
        direct: Sequence[Route],
        traced: Collection[str],
        bodies: BodyBudget,
        measures: HttpMeasures,
    ) -> None:
        """Knows its routes already.

        Args:
            app: answers what has no way of its own.
            direct: their POSTs go to the route's handler straight, past the application and its
                layers.
            traced: paths whose requests have a span.
            bodies: memory for bodies.
            measures: counts answers.
        """
        self._app = app
        self._direct = {route.path: route for route in direct}
        self._traced = frozenset(traced)
        self._bodies = bodies
        self._measures = measures
        self._refusals = Refusals()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        assert scope["type"] == "http", "the server takes no other"
        return self._answer(scope, receive, send)

    def _again(self, scope: Scope, receive: Receiving, send: Send) -> bool:
        """Whether a refusal that stands was all that there is to tell."""
        route = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
        refusal = None if route is None else self._refusals.again(scope, receive)
        if route is None or refusal is None:
            return False
        scope["state"]["request_id"] = new_request_id()
        sender = SendWithIds(send, scope, receive)
        response = error_response(refusal.error)
        if not _sent_at_once(response, sender):
            return False
        refusal.counted()
        self._measures.answered(route.path, "POST", response.status_code, refusal.error.code)
        return True

    def refused(self, error: PilotlightError) -> Response:
        """The answer to what is no request of HTTP; it is counted."""
        self._measures.answered("none", "none", error.status, error.code)
        return error_response(error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refusals.put_into(scope)
        if (
            isinstance(receive, Receiving)
            and receive.sends(send)
            and self._again(scope, receive, send)
        ):
            return
        with (
            server_span(_span_name(scope), _trace_headers(scope))
            if scope["path"] in self._traced
            else _NOTHING
        ):
            request_id = new_request_id()
            scope.setdefault("state", {})["request_id"] = request_id
            annotate(request_id=request_id)
            own = isinstance(receive, Receiving) and receive.sends(send)
            sender = SendWithIds(send, scope, cast("Receiving", receive) if own else None)
            room = BodyRoom(self._bodies)
            room.put_into(scope)
            try:
                if len(scope["headers"]) > MAX_HEADERS:
                    raise BadRequest(
                        f"{len(scope['headers'])} headers; at most {MAX_HEADERS} are taken"
                    )
                route = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
                if route is None:
                    await self._app(scope, receive, sender)
                else:
                    scope["route"] = route
                    response = await route.endpoint(Request(scope, receive, sender))
                    await response(scope, receive, sender)
            except ClientGone:
                log.debug("client left", action="client_gone", request_id=request_id)
                sender.status = CLIENT_GONE_STATUS
                scope["state"][_ERROR_CODE] = CLIENT_GONE
            except asyncio.CancelledError:
                # The server stops, and has waited for as long as it may.
                if sender.status:
                    raise
                failure = TransientError(STOPPING, retry_after_s=STOPPING_RETRY_AFTER_S)
                note_error(scope, failure)
                await error_response(failure)(scope, receive, sender)
            except Exception as error:  # noqa: BLE001 - the last resort: a client is always answered
                await _answer_error(error, scope, receive, sender)
            finally:
                room.release()
                code = scope["state"].get(_ERROR_CODE, "")
                self._measures.answered(_route_of(scope), scope["method"], sender.status, code)


async def _answer_error(
    error: Exception, scope: Scope, receive: Receive, sender: SendWithIds
) -> None:
    """Tell what went wrong, where nothing was told yet. In a frame of its own: one that an error
    has come through, and that keeps it, is kept by it.
    """
    failure = noted(scope, error)
    if not sender.status:
        response = error_response(failure)
        if not _sent_at_once(response, sender):
            await response(scope, receive, sender)


def _span_name(scope: Scope) -> str:
    """One text for all that wait."""
    return sys.intern(f"{scope['method']} {scope['path']}")


def _trace_headers(scope: Scope) -> dict[str, str]:
    """The context of the client's trace, if it sends one."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"][:MAX_HEADERS]
        if name in _TRACE_HEADERS
    }


def note_error(scope: Scope, error: PilotlightError) -> None:
    """With which error a request ends, for metrics and records."""
    scope["state"][_ERROR_CODE] = error.code


def noted(scope: Scope, error: Exception) -> PilotlightError:
    """What a client is told of an error, noted; one that is not of the taxonomy is a bug."""
    failure = error if isinstance(error, PilotlightError) else _bug(error)
    note_error(scope, failure)
    return failure


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
