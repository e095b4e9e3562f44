"""Liveness, readiness and metrics of a service, over HTTP on a Unix socket.

``/healthz`` says that the event loop turns, ``/readyz`` that work can be done or why not; ``/metrics`` is for Prometheus. Try
``curl --unix-socket run/scheduler-4711.sock http://local/readyz``.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest

from pilotlight.common.unix_socket import listen_unix

REQUEST_DEADLINE_S = 5.0
MAX_HEAD_BYTES = 16 * 1024


class Connection(Protocol):
    """What readiness asks of the bus."""

    @property
    def connected(self) -> bool: ...


class Readiness(Protocol):
    """What readiness asks of the application: why it cannot work, or None."""

    ready: Callable[[], str | None]


class HealthServer:
    """A component that answers three questions, one connection each."""

    def __init__(self, path: Path, metrics: CollectorRegistry, bus: Connection, application: Readiness) -> None:
        self.path = path
        self._metrics = metrics
        self._bus = bus
        self._application = application
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            BadRequest: the socket's path is longer than the system takes.
        """
        if self._server is not None:
            return
        self._server = await listen_unix(self.path, self._serve, limit_bytes=MAX_HEAD_BYTES)

    async def stop(self) -> None:
        """Listen no more, and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.path.unlink(missing_ok=True)

    def not_ready(self) -> str | None:
        """Why the service cannot work at the moment, or None when it can."""
        if not self._bus.connected:
            return "NATS cannot be reached"
        return self._application.ready()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client left, or does not speak HTTP: there is nobody to tell
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
            return _response("200 OK", generate_latest(self._metrics), "text/plain; version=0.0.4; charset=utf-8")
        return _response("404 Not Found", b"there are /healthz, /readyz and /metrics\n")


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
