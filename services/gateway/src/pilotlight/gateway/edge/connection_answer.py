"""An answer on one client's connection."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

import structlog
from starlette.types import Message
from uvicorn._types import ASGISendEvent, HTTPResponseBodyEvent, HTTPResponseStartEvent
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

from pilotlight.gateway.edge.departure import Receiving

log = structlog.get_logger()

STATUS_START = b"HTTP/1.1 "
_NO_BODY = bytearray()
COMMENT = b":\n\n"
"""An event that is none. It may stand between any two parts of such an answer: each of those is
whole events."""


class Lingering(Protocol):
    """The connection, as far as its answers need it."""

    tasks: set[asyncio.Task[None]]

    def linger(self) -> None:
        """Send nothing more, throw away what comes, close soon."""
        ...


class ConnectionAnswer(Receiving):
    """Sends an answer, ended as the client's version knows it, and so that the client can read it
    to its end. Receives its request.
    """

    __slots__ = (
        "_connection",
        "_cycle",
        "_ends_with_connection",
        "_leave",
        "_of_events",
        "_version",
    )

    def __init__(self, connection: Lingering, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        # The scope lets it go before there is an answer.
        self._version = cycle.scope["http_version"]
        self._leave: Callable[[], None] | None = None
        self._ends_with_connection = False
        self._of_events = False

    def ended(self, task: asyncio.Task[None]) -> None:
        """The application is done with it."""
        cycle = self._cycle
        self._connection.tasks.discard(task)
        # Nothing holds the other through this any more.
        cycle.on_response = _nothing
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an answer met a bug", action="answer_bug", exc_info=error)
        if not cycle.response_complete and not cycle.disconnected:
            cycle.transport.close()

    def __call__(self) -> Awaitable[Message]:
        return cast("Awaitable[Message]", self._cycle.receive())

    def on_leave(self, call: Callable[[], None] | None) -> None:
        self._leave = call
        if self._cycle.disconnected:
            asyncio.get_running_loop().call_soon(self.left)

    def left(self) -> None:
        """The client has gone."""
        self._cycle.disconnected = not self._cycle.response_complete
        if self._leave is not None:
            self._leave()

    @property
    def under_way(self) -> bool:
        """It has begun and not ended."""
        return self._cycle.response_started and not self._cycle.response_complete

    def probe(self) -> None:
        """Send a few bytes that change nothing, if there are any."""
        cycle = self._cycle
        if self.under_way:
            if self._of_events:
                cycle.transport.write(
                    COMMENT
                    if self._ends_with_connection
                    else b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)
                )
        elif not cycle.response_complete:
            begun = (
                cycle.transport if isinstance(cycle.transport, _Begun) else _Begun(cycle.transport)
            )
            begun.begin()
            cycle.transport = begun

    def sends(self, send: object) -> bool:
        return send == self.send

    def body_there(self) -> bytes | None:
        cycle = self._cycle
        if (
            cycle.more_body
            or cycle.disconnected
            or cycle.response_complete
            or cycle.waiting_for_100_continue
        ):
            return None
        return bytes(cycle.body)

    def whole_body(self) -> bytes | None:
        body, cycle = self.body_there(), self._cycle
        if body is None:
            return None
        cycle.flow.resume_reading()
        cycle.message_event.clear()
        # All of it is there: nothing is added any more.
        cycle.body = _NO_BODY
        return body

    def begin(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], data: bytes, *, more: bool
    ) -> bool:
        cycle = self._cycle
        if (
            cycle.response_started
            or not self._flows
            or cycle.scope["method"] != "POST"
            or self._version != "1.1"
            or HEADER_VALUE_RE.search(b"".join([value for _, value in headers]))
        ):
            return False
        head = [STATUS_LINE[status]]
        head += [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        if not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        cycle.response_started = True
        cycle.chunked_encoding = more
        if more:
            kind = (b"content-type", b"text/event-stream")
            self._of_events = any(
                name == kind[0] and value.startswith(kind[1]) for name, value in headers
            )
            head.append(b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))
        else:
            head += (b"\r\n", data)
        cycle.transport.write(b"".join(head))
        if not more:
            self._complete()
        return True

    def go_on(self, data: bytes, *, more: bool) -> bool:
        cycle = self._cycle
        if not cycle.response_started or not cycle.chunked_encoding or not self._flows:
            return False
        part = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        cycle.transport.write(part if more else part + b"0\r\n\r\n")
        if not more:
            self._complete()
        return True

    @property
    def _flows(self) -> bool:
        """What is sent now goes out, and nothing has to be waited for."""
        cycle = self._cycle
        return not (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or cycle.more_body
            or self._ends_with_connection
        )

    def _complete(self) -> None:
        """All is sent."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    async def send(self, message: ASGISendEvent) -> None:
        """Send its head, or a part of its body."""
        if message["type"] == "http.response.start":
            await self._cycle.send(self._head(message))
        elif message["type"] == "http.response.body":
            await self._body(message)
        else:
            await self._cycle.send(message)

    def _head(self, message: HTTPResponseStartEvent) -> HTTPResponseStartEvent:
        cycle, headers = self._cycle, list(message.get("headers", []))
        if cycle.more_body:
            # The request's body is not read to its end: what would come next on this connection is
            # the rest of it.
            headers.append((b"connection", b"close"))
        named = {name.lower(): value for name, value in headers}
        self._of_events = named.get(b"content-type", b"").startswith(b"text/event-stream")
        if self._version == "1.0" and b"content-length" not in named:
            self._ends_with_connection = True
            cycle.chunked_encoding = False
        return {"type": "http.response.start", "status": message["status"], "headers": headers}

    async def _body(self, message: HTTPResponseBodyEvent) -> None:
        cycle = self._cycle
        if self._ends_with_connection:
            cycle.expected_content_length = len(message.get("body", b""))
        lingers = cycle.more_body and not message.get("more_body", False)
        if lingers:
            # uvicorn would close at once. With bytes that are not read that is a reset, which takes
            # the answer with it.
            cycle.keep_alive = True
        await self._cycle.send(message)
        if lingers:
            self._connection.linger()


def _nothing() -> None:
    """What uvicorn calls when an answer is out that was not looked for any more."""


class _Begun(asyncio.Transport):
    """A transport on which the start of the next status line may be out already."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._sent = 0

    def begin(self) -> None:
        """Send one byte more of it, while there is one that all answers share."""
        self._transport.write(STATUS_START[self._sent : self._sent + 1])
        self._sent = min(self._sent + 1, len(STATUS_START))

    def write(self, data: Any) -> None:
        self._transport.write(data[self._sent :])
        self._sent = 0

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()
