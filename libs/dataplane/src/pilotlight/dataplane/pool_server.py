"""The loader's end of the node's Unix socket: supervision connections and leases.

A connection is what it stands for: a worker lives as long as its first one is open, a lease holds
as long as its own is.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog

from pilotlight.common.errors import BadRequest, PilotlightError
from pilotlight.common.messages.codec import read_frame, write_frame
from pilotlight.common.messages.pool import (
    FromWorker,
    Hello,
    Lease,
    LeaseDone,
    LeaseFailed,
    LeaseGranted,
    Relayed,
    WorkerHere,
    WorkerSaid,
)
from pilotlight.common.unix_socket import listen_unix
from pilotlight.common.waiting import cancel_all, within
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.model_fetch import PartsClaim
from pilotlight.dataplane.pool import HostPool

log = structlog.get_logger()

MAX_CONNECTIONS = 1024
FIRST_FRAME_S = 5.0
WRITE_S = 10.0
"""How long a reader may leave a frame unread; its connection ends then, and with it the lease."""


class Supervisor(Protocol):
    """Hears of workers that come and go."""

    def on_hello(self, hello: Hello) -> None:
        """A worker's process is there."""
        ...

    def on_goodbye(self, hello: Hello) -> None:
        """Its connection closed: the process ended, or gave up on this loader."""
        ...


class Reports(Protocol):
    """Takes the reports of workers that give them to their loader."""

    def opened(self, hello: Hello, send: Callable[[Relayed], None]) -> None:
        """A worker is there; ``send`` says what was passed on."""
        ...

    def on_said(self, hello: Hello, said: WorkerSaid | WorkerHere) -> None:
        """It has said something."""
        ...

    def closed(self, hello: Hello) -> None:
        """It is gone."""
        ...


class PoolServer:
    """Serves the workers of one node."""

    def __init__(
        self,
        path: Path,
        pool: HostPool,
        copies: HostCopies,
        supervisor: Supervisor,
        *,
        reports: Reports | None = None,
        write_s: float = WRITE_S,
    ) -> None:
        """Not listening yet.

        Args:
            path: of the socket.
            pool: what is leased.
            copies: what fetches.
            supervisor: hears of workers that come and go.
            reports: takes their reports; None: they report themselves.
            write_s: deadline for a reader.
        """
        self.path = path
        self._reports = reports
        self._pool = pool
        self._copies = copies
        self._supervisor = supervisor
        self._write_s = write_s
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            BadRequest: the socket's path is longer than the system takes.
        """
        if self._server is not None:
            return
        # What a killed loader left there is replaced: the lock on the pool says that there is no
        # other one.
        self._server = await listen_unix(self.path, self._accept)

    async def stop(self) -> None:
        """End every connection: workers notice at once, and look for the next loader."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        await cancel_all(self._connections)
        self.path.unlink(missing_ok=True)

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning(
                "too many connections", action="pool_connections_full", limit=MAX_CONNECTIONS
            )
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="pool connection")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await within(FIRST_FRAME_S, read_frame(reader, FromWorker), "the first frame")
            if isinstance(first, Hello):
                await self._supervise(first, reader, writer)
            elif isinstance(first, Lease):
                await self._lease(first, reader, writer)
        except PilotlightError as error:
            log.warning(
                "connection ended",
                action="pool_connection_refused",
                code=error.code,
                error=error.message,
            )
        except OSError as error:
            log.info("connection broke", action="pool_connection_broke", error=str(error))
        finally:
            writer.close()

    async def _supervise(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._supervisor.on_hello(hello)
        try:
            if self._reports is not None and hello.reports:
                await self._relay(self._reports, hello, reader, writer)
            else:
                await _closed(reader)
        finally:
            self._supervisor.on_goodbye(hello)

    async def _relay(
        self,
        reports: Reports,
        hello: Hello,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        def send(relayed: Relayed) -> None:
            # A worker that does not read has stopped, and one whose connection broke a moment ago
            # is about to be told goodbye: neither needs a word that it is heard.
            if writer.transport.get_write_buffer_size() == 0:
                with suppress(ConnectionResetError):
                    write_frame(writer, relayed)

        reports.opened(hello, send)
        try:
            while (said := await read_frame(reader, FromWorker)) is not None:
                if isinstance(said, WorkerSaid | WorkerHere):
                    reports.on_said(hello, said)
        finally:
            reports.closed(hello)

    async def _lease(
        self, lease: Lease, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            claim = self._copies.claim(
                lease.model,
                lease.parts,
                lease.instance_id,
                leased=True,
                trace_parent=lease.trace_parent,
                priority=lease.priority,
            )
        except BadRequest as error:
            await self._send(writer, LeaseFailed(code=error.code, message=error.message))
            return
        closed = asyncio.create_task(_closed(reader), name=f"lease of {lease.worker_id}")
        pushing = asyncio.create_task(
            self._push(claim, writer), name=f"parts for {lease.worker_id}"
        )
        try:
            await asyncio.wait({closed, pushing}, return_when=asyncio.FIRST_COMPLETED)
            if pushing.done() and pushing.result():
                await closed
        finally:
            # First of all, and whatever else ends this: the connection is closed, so the lease is.
            self._copies.release(claim)
            await cancel_all((closed, pushing))

    async def _push(self, claim: PartsClaim, writer: asyncio.StreamWriter) -> bool:
        """Tell a worker of each part as it becomes ready; whether all of them did."""
        path = str(self._pool.path.absolute())
        await self._send(writer, LeaseGranted(pool_path=path))
        parts = self._copies.ready_parts(claim)
        while True:
            try:
                part = await anext(parts, None)
            except PilotlightError as error:
                await self._send(writer, LeaseFailed(code=error.code, message=error.message))
                return False
            if part is None:
                await self._send(writer, LeaseDone())
                return True
            await self._send(writer, part)

    async def _send(self, writer: asyncio.StreamWriter, message: object) -> None:
        write_frame(writer, message)
        await within(self._write_s, writer.drain(), "a worker's reading of a frame")


async def _closed(reader: asyncio.StreamReader) -> None:
    """Return when the peer closed the connection.

    It has nothing more to say: what it says all the same is a closed one.
    """
    try:
        await reader.read(1)
    except ConnectionError:
        return
