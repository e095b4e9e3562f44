"""The HTTP server, in this process's event loop."""

import asyncio
import functools
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import structlog
import uvicorn

from pilotlight.common.errors import PilotlightError, TransientError
from pilotlight.common.fitness import port_error
from pilotlight.common.service import Background
from pilotlight.gateway.edge.connection import Connection
from pilotlight.gateway.edge.cross_origin import CrossOrigin
from pilotlight.gateway.edge.http import STOPPING, STOPPING_RETRY_AFTER_S, Edge

log = structlog.get_logger()

BACKLOG = 2048
ACCEPTING = 16
"""Handles of the loop on the listening socket. libuv takes one connection for each in a turn of the
loop (since 1.45): with one, new clients of a gateway whose turns take a tenth of a second wait for
their turn to be accepted, ten a second, while those that are connected are served at once.
"""
KEEP_ALIVE_S = 75
PROBE_AFTER_S = 60
PROBE_EVERY_S = 15
PROBES = 4
"""TCP's own, of a silent connection: they find clients that are gone without a word."""


class _Server(uvicorn.Server):
    """uvicorn without its own idea of signals, which belong to the process's life
    (``common.service``).
    """

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

    Stopping ends the listening, lets held requests go (another gateway takes them), and gives
    streams ``drain_s`` to end.
    """

    def __init__(
        self,
        app: Edge | CrossOrigin,
        let_go: Callable[[PilotlightError], None],
        background: Background,
        *,
        host: str,
        port: int,
        drain_s: float,
        share_port: bool = False,
    ) -> None:
        """Nothing is listened to yet.

        Args:
            app: answers requests.
            let_go: ends every held request with an error; called when this stops.
            background: owns the serving task.
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            drain_s: seconds that streams may take to end after ``stop``.
            share_port: lets other processes of the same user listen on the port too: the kernel
                spreads connections over them.
        """
        self._app = app
        self._let_go = let_go
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
            listener = socket.create_server(
                (self._host, self._port),
                family=family,
                backlog=BACKLOG,
                reuse_port=self._share_port,
            )
        except OSError as error:
            raise port_error(self._host, self._port, error) from error
        _probe(listener)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            # A class, by its type; uvicorn only calls it.
            http=functools.partial(Connection, self._app.refused),  # pyright: ignore[reportArgumentType] - uvicorn calls it as it would the class
            interface="asgi3",
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
        listeners = [listener, *(listener.dup() for _ in range(ACCEPTING - 1))]
        self._serving = self._background.spawn("serve HTTP", self._server.serve(listeners))
        await self._server.listening.wait()
        log.info("serving HTTP", action="http_listening", host=self._host, port=self._port)

    async def stop(self) -> None:
        """Listen no more; return when every answer is out or ``drain_s`` has passed."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        self._let_go(TransientError(STOPPING, retry_after_s=STOPPING_RETRY_AFTER_S))
        await asyncio.gather(self._serving, return_exceptions=True)
        self._server = self._serving = None


def _probe(listener: socket.socket) -> None:
    """Every connection that is accepted inherits this."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, PROBE_AFTER_S),
        (socket.TCP_KEEPINTVL, PROBE_EVERY_S),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
