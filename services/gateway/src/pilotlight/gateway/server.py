"""The HTTP server, in this process's event loop."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pilotlight.common.errors import TransientError
from pilotlight.common.fitness import port_error
from pilotlight.common.service import Background
from pilotlight.gateway.hold import Hold

log = structlog.get_logger()

BACKLOG = 2048
KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers; whoever sends more is cut off."""
HEAD_DEADLINE_S = 30.0
"""For them to arrive; a connection on which none do is closed."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with limits on what comes before a body: it keeps any amount of headers for any time."""

    _head_bytes: int | None = 0
    """Of the head that is arriving; None while none is."""
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_deadline is None:
            self._head_bytes = 0
            self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _end_head(self) -> None:
        self._head_bytes = None
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


class _Server(uvicorn.Server):
    """uvicorn without its own idea of signals, which belong to the process's life (``common.service``)."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """A component: the last to start, the first to stop.

    Stopping ends the listening, lets held requests go (another gateway takes them), and gives streams ``drain_s`` to end.
    """

    def __init__(
        self, app: ASGIApp, hold: Hold, background: Background, *, host: str, port: int, drain_s: float, share_port: bool = False
    ) -> None:
        """``share_port`` lets other processes of the same user listen on the port too: the kernel spreads connections over them."""
        self._app = app
        self._hold = hold
        self._background = background
        self._host = host
        self._port = port
        self._drain_s = drain_s
        self._share_port = share_port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return self._port

    @property
    def draining(self) -> bool:
        """It was told to stop."""
        return self._server is not None and self._server.should_exit

    async def start(self) -> None:
        """Listen.

        Raises:
            PortTaken: the address cannot be taken.
        """
        if self._server is not None:
            return
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG, reuse_port=self._share_port)
        except OSError as error:
            raise port_error(self._host, self._port, error) from error
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(self._drain_s)),
        )
        self._server = _Server(config)
        self._serving = self._background.spawn("serve HTTP", self._server.serve([listener]))
        await self._server.listening.wait()
        log.info("serving HTTP", action="http_listening", host=self._host, port=self._port)

    async def stop(self) -> None:
        """Listen no more; return when every answer is out or ``drain_s`` has passed."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        self._hold.close(TransientError("this gateway is stopping; send the request again", retry_after_s=1.0))
        await asyncio.gather(self._serving, return_exceptions=True)
        self._server = self._serving = None
