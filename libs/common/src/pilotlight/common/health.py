"""Liveness, readiness and metrics of a service, over HTTP on a Unix socket.

``/healthz`` says that the event loop turns, ``/readyz`` that work can be done or why not;
``/metrics`` is for Prometheus. Try ``curl --unix-socket run/scheduler-4711.sock
http://local/readyz``.
"""

import asyncio
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, generate_latest

from pilotlight.common.unix_socket import listen_unix, sweep
from pilotlight.common.waiting import Backoff, cancel_all, pause

log = structlog.get_logger()

REQUEST_DEADLINE_S = 5.0
MAX_HEAD_BYTES = 16 * 1024
_BACKOFF = Backoff(first_s=1.0, limit_s=30.0)


class Connection(Protocol):
    """What readiness asks of the bus."""

    @property
    def connected(self) -> bool: ...

    @property
    def unwritable(self) -> str | None: ...


class Readiness(Protocol):
    """What readiness asks of the application: why it cannot work, or None."""

    ready: Callable[[], str | None]


class HealthServer:
    """A component that answers three questions, one connection each."""

    def __init__(
        self, path: Path, metrics: CollectorRegistry, bus: Connection, application: Readiness
    ) -> None:
        self.path = path
        self._metrics = metrics
        self._bus = bus
        self._application = application
        self._server: asyncio.Server | None = None
        self._again: asyncio.Task[None] | None = None
        self._rng = random.Random()

    async def start(self) -> None:
        """Listen, and remove the sockets that killed processes left beside ours. Where no socket
        can be made, as on a disk without an inode, that is tried again: the service does not depend
        on it.

        Raises:
            BadRequest: the socket's path is longer than the system takes.
        """
        if self._server is None and self._again is None and not await self._listen():
            self._again = asyncio.create_task(self._listen_at_last(), name="listen for health")

    async def _listen(self) -> bool:
        try:
            self._server = await listen_unix(self.path, self._serve, limit_bytes=MAX_HEAD_BYTES)
            swept = sweep(self.path)
        except OSError as error:
            log.error(
                "nobody can ask how this process is",
                action="health_unheard",
                path=str(self.path),
                error=str(error),
            )
            return False
        if swept:
            log.info("sockets of killed processes removed", action="sockets_swept", sockets=swept)
        return True

    async def _listen_at_last(self) -> None:
        for attempt in count():
            await pause(_BACKOFF.delay_s(attempt, self._rng))
            if await self._listen():
                return

    async def stop(self) -> None:
        """Listen no more, and remove the socket."""
        again, self._again = self._again, None
        if again is not None:
            await cancel_all((again,))
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.path.unlink(missing_ok=True)

    def not_ready(self) -> str | None:
        """Why the service cannot work at the moment, or None when it can."""
        if not self._bus.connected:
            return "NATS cannot be reached"
        return self._bus.unwritable or self._application.ready()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client left, or does not speak HTTP: no answer is possible
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET\n")
        if path == b"/healthz":
            return _response("200 OK", b"ok\n")
        if path == b"/readyz":
            reason = self.not_ready()
            return (
                _response("200 OK", b"ready\n")
                if reason is None
                else _response("503 Service Unavailable", f"{reason}\n".encode())
            )
        if path == b"/metrics":
            return _response(
                "200 OK", generate_latest(self._metrics), "text/plain; version=0.0.4; charset=utf-8"
            )
        return _response("404 Not Found", b"there are /healthz, /readyz and /metrics\n")


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
