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
from collections.abc import Callable, Coroutine
from typing import Any, cast

import httptools
import structlog
from starlette.responses import Response
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
)
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from pilotlight.common.errors import BadRequest, HeadTooLarge, PilotlightError
from pilotlight.common.waiting import Flag
from pilotlight.gateway.edge.connection_answer import ConnectionAnswer

log = structlog.get_logger()

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers; a client that sends more gets 431."""
HEAD_DEADLINE_S = 30.0
"""For them to arrive; a connection on which none do is closed."""
LINGER_S = 5.0
"""For a client to read its answer while what it still sends is thrown away."""
FIRST_PROBE_S = 0.2
LAST_PROBE_S = 10.0
"""Pauses between looks whether a client that closed its side is still there: each is twice the one
before."""
_NO_HEADERS: list[tuple[bytes, bytes]] = []


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
        "_probing",
        "_refused",
    )

    def __init__(self, refused: Callable[[PilotlightError], Response], **given: Any) -> None:
        """``refused`` makes the answer to what is no request."""
        super().__init__(**given)
        # uvicorn appends to its left and pops. A deque has room for many from the beginning.
        self.pipeline = cast("deque[tuple[RequestResponseCycle, ASGI3Application]]", _Line())
        # uvicorn keeps one wherever logs go anywhere. Ours is of requests, and has their tokens.
        self.access_log = False
        self._refused = refused
        self._head_bytes: int | None = 0
        """Of the head that is arriving; None while none is."""
        self._in_message = True
        """A request has begun to arrive, and not ended; or there was none yet."""
        self._head_deadline: asyncio.TimerHandle | None = None
        self._answer: ConnectionAnswer | None = None
        """To the request whose turn it is; others may be waiting behind it."""
        self._closing: asyncio.TimerHandle | None = None
        """Nothing is read any more; the client may still read."""
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
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
            # Each knows the other: Python would have to look for them.
            self._answer = None

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
            self._end_head()
            # What had come of it, which no request gets any more.
            self.headers, self.url, self.parser = [], b"", None
            limit = f"at most {MAX_HEAD_BYTES} bytes are taken"
            self._refuse(HeadTooLarge(f"the request line with its headers is too long: {limit}"))
        elif (
            (newest := self._newest) is not None
            and newest.more_body
            and newest.body
            and not self.transport.is_closing()
        ):
            # The application has not asked for this part yet: the next one can wait in the kernel,
            # with its sender.
            self.flow.pause_reading()
        elif self._head_bytes is not None and self._head_deadline is None:
            # Most heads come at once, and have no time limit.
            self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)

    def eof_received(self) -> bool | None:  # type: ignore[override] - uvicorn's returns None alone
        """The client sends no more: stay if it waits for an answer to all that it sent."""
        cycle = self._newest
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        self._probe(FIRST_PROBE_S)
        return True

    def on_message_begin(self) -> None:
        self._in_message = True
        # Not of the socket, as uvicorn asks: it would be made, and kept, with the address.
        peer = self.transport.get_extra_info("peername")
        self.client = peer[:2] if isinstance(peer, tuple) else None
        super().on_message_begin()
        # It is the scope's now, which lets it go.
        self.client = None
        if self._head_bytes is None:
            self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        # They are the scope's now, which lets them go.
        self.headers, self.url = [], b""

    def on_message_complete(self) -> None:
        self._in_message = False
        # Those that came after the body, which nobody reads.
        self.headers = _NO_HEADERS
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest("this is not HTTP/1.1, or its parts contradict each other"))

    def _refuse(self, error: PilotlightError) -> None:
        """Answer what is no request, unless another answer is already on its way."""
        if self._answer is not None and self._answer.under_way:
            self.transport.close()
            return
        response = self._refused(error)
        head = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
        head += [b"%b: %b\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.linger()

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The request that came last; None before the first."""
        return self.cycle

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        answer = self._answer = ConnectionAnswer(self, cycle)
        if cycle.scope["http_version"] == "1.0":
            # It knows no interim answers.
            cycle.waiting_for_100_continue = False

        if not cycle.message_event.is_set():
            # Of one that waited for its turn, the body may be there already.
            cycle.message_event = _Event()

        # uvicorn has a coroutine around it, which logs errors: as many requests as wait would each
        # keep it.
        answering = app(cycle.scope, cast("ASGIReceiveCallable", answer), answer.send)
        # With a name that all share: each would get, and keep, one of its own.
        task = self.loop.create_task(cast("Coroutine[None, None, None]", answering), name="answer")
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


class _Line(list[object]):
    """Requests that wait for their turn, as far as uvicorn needs it."""

    __slots__ = ()

    def appendleft(self, item: object) -> None:
        self.insert(0, item)


class _Flow(FlowControl):
    """One whose event is there only while nothing may be written: most never need it."""

    _is_writable_event: asyncio.Event

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False

    async def drain(self) -> None:
        if self.write_paused:
            await self._is_writable_event.wait()

    def pause_writing(self) -> None:
        if not self.write_paused:
            self.write_paused = True
            self._is_writable_event = _Event()


def _parser(connection: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """As uvicorn makes it."""
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class _Event(Flag, asyncio.Event):
    """uvicorn's events, of which each request has one, with a flag's way to wait: asyncio's own
    begins with room for 64 tasks, which makes it 0.9 KB.
    """
