"""One client's connection: uvicorn's, with limits on what comes before a body, with backpressure,
and with an end that the client hears of.

A client may close its side after its request (``shutdown(SHUT_WR)``) and wait for the answer. TCP
says the same, a FIN, of one that is gone altogether. What tells them apart is a byte sent there: a
client that is gone answers with a reset. So while the answer is being made, the first bytes of its
status line, which all answers share, are sent one by one, and comments once it is a stream of
events. When the bytes are out, TCP's keep-alive probes find a client that is gone. (nginx as a
proxy, hypercorn, uvicorn and the context of Go's handlers take a FIN for the end, and half-closing
clients get nothing.)
"""

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import httptools
import structlog
from starlette.responses import Response
from starlette.types import Message
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendEvent,
    HTTPResponseBodyEvent,
    HTTPResponseStartEvent,
)
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.utils import get_remote_addr

from pilotlight.common.waiting import Flag
from pilotlight.gateway.edge.departure import Receiving

log = structlog.get_logger()

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers; a client that sends more is cut off."""
HEAD_DEADLINE_S = 30.0
"""For them to arrive; a connection on which none do is closed."""
LINGER_S = 5.0
"""For a client to read its answer while what it still sends is thrown away."""
FIRST_PROBE_S = 0.2
LAST_PROBE_S = 10.0
"""Pauses between looks whether a client that closed its side is still there: each is twice the one
before."""
STATUS_START = b"HTTP/1.1 "
COMMENT = b":\n\n"
"""An event that is none. It may stand between any two parts of such an answer: each of those is
whole events."""


class Connection(HttpToolsProtocol):
    """Speaks HTTP/1.1 with one client, and HTTP/1.0 without chunks."""

    # In a dict of their own they would take more than the rest of a connection: it has as many
    # attributes as dicts share their keys for.
    __slots__ = (
        "_answer",
        "_closing",
        "_head_bytes",
        "_head_deadline",
        "_in_message",
        "_malformed",
        "_probing",
    )

    def __init__(self, malformed: Callable[[], Response], **given: Any) -> None:
        """``malformed`` makes the answer to what is no HTTP."""
        super().__init__(**given)
        # uvicorn appends to its left and pops. A deque has room for many from the beginning.
        self.pipeline = cast("deque[tuple[RequestResponseCycle, ASGI3Application]]", _Line())
        # uvicorn keeps one wherever logs go anywhere. Ours is of requests, and has their tokens.
        self.access_log = False
        self._malformed = malformed
        self._head_bytes: int | None = 0
        """Of the head that is arriving; None while none is."""
        self._in_message = True
        """A request has begun to arrive, and not ended; or there was none yet."""
        self._head_deadline: asyncio.TimerHandle | None = None
        self._answer: _Answer | None = None
        """To the request whose turn it is; others may be waiting behind it."""
        self._closing: asyncio.TimerHandle | None = None
        """Nothing is read any more; the client may still read."""
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # uvicorn's own would look up the address that the client came to, for each connection anew,
        # and make events for many.
        self.connections.add(self)
        self.transport = transport
        self.scheme = "http"
        self.flow = _Flow(transport)
        self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        for timer in (self._closing, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._answer is not None:
            self._answer.left()

    def data_received(self, data: bytes) -> None:
        if self._closing is not None:
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        if self.parser is None:
            self.parser = _parser(self)
        super().data_received(data)
        if not self._in_message:
            # It knows nothing that a new one does not, and takes 0.9 KB while the answer is made.
            self.parser = None
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()
        elif (
            (newest := self._newest) is not None
            and newest.more_body
            and newest.body
            and not self.transport.is_closing()
        ):
            # The application has not asked for this part yet: the next one can wait in the kernel,
            # with its sender.
            self.flow.pause_reading()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: stay if it waits for an answer to all that it sent."""
        cycle = self._newest
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        self._probe(FIRST_PROBE_S)
        return True

    def on_message_begin(self) -> None:
        self._in_message = True
        self.client = get_remote_addr(self.transport)
        super().on_message_begin()
        # It is the scope's now, which lets it go.
        self.client = None
        if self._head_deadline is None:
            self._head_bytes = 0
            self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        # They are the scope's now, which lets them go.
        self.headers, self.url = [], b""

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless another answer is already on its way."""
        if self._answer is not None and self._answer.under_way:
            self.transport.close()
            return
        response = self._malformed()
        head = [STATUS_LINE[400], b"connection: close\r\n"]
        head += [b"%b: %b\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.linger()

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The request that came last; None before the first."""
        return self.cycle

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        answer = self._answer = _Answer(self, cycle)
        if cycle.scope["http_version"] == "1.0":
            # It knows no interim answers.
            cycle.waiting_for_100_continue = False

        if not cycle.message_event.is_set():
            # Of one that waited for its turn, the body may be there already.
            cycle.message_event = _Event()

        # uvicorn has a coroutine around it, which logs errors: as many requests as wait would each
        # keep it.
        answering = app(cycle.scope, cast("ASGIReceiveCallable", answer), answer.send)
        task = self.loop.create_task(cast("Coroutine[None, None, None]", answering))
        self.tasks.add(task)
        task.add_done_callback(answer.ended)

    def linger(self) -> None:
        """Send nothing more, throw away what comes, close soon."""
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or self._closing is not None:
            return
        if (newest := self._newest) is not None:
            newest.body = bytearray()
        self._closing = self.loop.call_later(LINGER_S, self.transport.close)
        self.flow.resume_reading()
        self.transport.write_eof()

    def _probe(self, pause_s: float) -> None:
        """Look whether a client that closed its side is still there, now and then, until it has its
        answer.
        """
        self._probing = None
        if self.transport.is_closing() or self.cycle.response_complete or self._answer is None:
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self._answer.probe()
        self._probing = self.loop.call_later(pause_s, self._probe, min(2 * pause_s, LAST_PROBE_S))

    def _end_head(self) -> None:
        self._head_bytes = None
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


class _Answer(Receiving):
    """Sends an answer, ended as the client's version knows it, and so that the client can read it
    to its end. Receives its request.
    """

    __slots__ = ("_connection", "_cycle", "_ends_with_connection", "_leave", "_of_events")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
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
        if cycle.scope["http_version"] == "1.0" and b"content-length" not in named:
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


class _Line(list[object]):
    """Requests that wait for their turn, as far as uvicorn needs it."""

    def appendleft(self, item: object) -> None:
        self.insert(0, item)


class _Flow(FlowControl):
    """One that takes little memory."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_writable_event = _Event()
        self._is_writable_event.set()


def _parser(connection: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """As uvicorn makes it."""
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class _Event(Flag, asyncio.Event):
    """uvicorn's events, of which a connection has two, with a flag's way to wait: asyncio's own
    begins with room for 64 tasks, which makes it 0.9 KB.
    """
