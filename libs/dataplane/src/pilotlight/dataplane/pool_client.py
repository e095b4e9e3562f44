"""A worker's end of the node's Unix socket.

A worker outlives its loader: both connections are made again when they break, for as long as the
grace lasts. A restarted loader adopts the pool's file, so what was mapped stays valid.
"""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import (
    MessageUndecodable,
    PilotlightError,
    SourceUnavailable,
    error_of,
)
from pilotlight.common.messages.codec import frame, read_frame, write_frame
from pilotlight.common.messages.pool import (
    RETURN_S,
    FromLoader,
    Hello,
    Lease,
    LeaseDone,
    LeaseFailed,
    LeaseGranted,
    PartReady,
)
from pilotlight.common.waiting import Backoff, cancel_all, pause, within
from pilotlight.dataplane.report_connection import ReportConnection, ReportRelay, relay_reports
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import InstanceId, WorkerId
from pilotlight.policy.model import Model

log = structlog.get_logger()

GRACE_S = 60.0
"""How long a worker lives without a loader."""
CONNECT_S = 5.0
GRANT_S = 5.0
"""From the request for a lease to its grant; fetching comes after it."""


class PoolClient:
    """Connects one worker to its node's loader."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        grace_s: float = GRACE_S,
        rng: random.Random | None = None,
    ) -> None:
        self._path = path
        self.clock = clock
        self._grace_s = grace_s
        self._rng = rng or random.Random()
        self._backoff = Backoff(first_s=0.02, limit_s=1.0)
        self.connected = asyncio.Event()
        """Set while the loader knows of this worker."""

    async def hello(
        self, worker_id: WorkerId, pid: int | None = None, relay: ReportRelay | None = None
    ) -> None:
        """Keep the supervision connection; return when there has been no loader for the grace: the
        worker is then on its own and should end.

        ``relay`` uses the connection for reports.
        """
        hello = Hello(
            worker_id=worker_id,
            pid=pid if pid is not None else os.getpid(),
            reports=relay is not None,
        )
        while True:
            try:
                reader, writer = await self._connect()
            except SourceUnavailable as error:
                log.warning("no loader", action="loader_gone", error=error.message)
                return
            try:
                write_frame(writer, hello)
                await within(CONNECT_S, writer.drain(), "greeting the loader")
                self.connected.set()
                if relay is None:
                    await reader.read(1)
                else:
                    await relay_reports(reader, ReportConnection(writer), relay)
            except (PilotlightError, OSError) as error:
                log.info(
                    "connection to the loader broke",
                    action="loader_connection_broke",
                    error=str(error),
                )
            finally:
                self.connected.clear()
                writer.close()
            # A loader that accepts and closes at once must not be asked in a tight loop.
            await pause(self._backoff.delay_s(0, self._rng))

    def lease(
        self,
        worker_id: WorkerId,
        instance_id: InstanceId,
        model: Model,
        parts: tuple[int, ...],
        trace_parent: str = "",
        priority: FetchPriority = FetchPriority.COLD_START,
    ) -> "Coroutine[Any, Any, PoolLease]":
        """Ask for parts of a model, before this is awaited if the loader takes it at once; returns
        when the lease is granted.

        Args:
            worker_id: Who asks.
            instance_id: For which the parts are.
            model: The model.
            parts: Their numbers, from 0.
            trace_parent: The trace that the fetch belongs to; empty: none.
            priority: How much it matters that they come soon.

        Raises:
            SourceUnavailable: there is no loader within the grace.
            PilotlightError: the loader refused.
        """
        request = Lease(
            worker_id=worker_id,
            instance_id=instance_id,
            model=model,
            parts=parts,
            trace_parent=trace_parent,
            priority=priority,
        )
        return self._leased(request, self._asked_at_once(request))

    async def _leased(self, request: Lease, asked: socket.socket | None) -> "PoolLease":
        reader, writer, granted = await self.ask(request, asked)
        try:
            return PoolLease(self, request, reader, writer, granted)
        except SourceUnavailable:
            writer.close()
            raise

    def _asked_at_once(self, request: Lease) -> socket.socket | None:
        """A connection to the loader that has the request: no turn of the loop comes before it.
        None where there is no loader now, or it is busy.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(str(self._path))
            said = frame(request)
            if connection.send(said) == len(said):
                return connection
        except OSError:
            pass  # Those who wait for a loader find out.
        connection.close()
        return None

    async def ask(
        self, request: Lease, asked: socket.socket | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, LeaseGranted]:
        """A new connection on which a lease is granted; the first one tried is that on which it was
        ``asked`` for already. Raises what ``lease`` raises.
        """
        until_s = self.clock.monotonic_s() + self._grace_s
        while self.clock.monotonic_s() <= until_s:
            has, asked = asked, None
            reader, writer = await (self._connect() if has is None else _streams(has))
            try:
                if has is None:
                    write_frame(writer, request)
                answer = await within(
                    GRANT_S, read_frame(reader, FromLoader), "the grant of a lease"
                )
                if isinstance(answer, LeaseGranted):
                    return reader, writer, answer
                if isinstance(answer, LeaseFailed):
                    raise error_of(answer.code, answer.message)
            except (OSError, MessageUndecodable) as error:
                log.info(
                    "connection to the loader broke",
                    action="lease_connection_broke",
                    error=str(error),
                )
            except BaseException:
                writer.close()
                raise
            writer.close()
            await pause(self._backoff.delay_s(0, self._rng))
        raise SourceUnavailable(f"the loader at {self._path} grants no lease")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, trying again until the grace is over.

        Raises:
            SourceUnavailable: it is over.
        """
        until_s = self.clock.monotonic_s() + self._grace_s
        attempt = 0
        while True:
            try:
                return await within(
                    CONNECT_S, asyncio.open_unix_connection(self._path), "connecting to the loader"
                )
            except (OSError, PilotlightError) as error:
                if self.clock.monotonic_s() >= until_s:
                    raise SourceUnavailable(
                        f"no loader at {self._path} for {self._grace_s:g} s: {error}"
                    ) from error
            await pause(self._backoff.delay_s(attempt, self._rng))
            attempt += 1


async def _streams(
    connection: socket.socket,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(sock=connection)


class PoolLease:
    """Parts of a model that stay in the pool until the lease is closed.

    ::

        async with await client.lease(worker_id, instance_id, model, parts) as lease:
            async for part in lease:
                ...  # copy it
    """

    def __init__(
        self,
        client: PoolClient,
        request: Lease,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        granted: LeaseGranted,
    ) -> None:
        self.pool_path = granted.pool_path
        """The file to map. Offsets of tensors count from its start."""
        self.done = False
        """Every part has been delivered."""
        self._client = client
        self._request = request
        self._reader = reader
        self._writer = writer
        self._inode = _inode_of(granted.pool_path)
        self._clock = client.clock
        self._delivered: dict[int, int] = {}
        """Parts that were told, and the serial number of each one's image."""
        self._unconfirmed: set[int] = set()
        """Those among them of which a loader that came back has not said yet that it kept them."""
        self._broken_s = 0.0
        # A lease has as many frames as parts, and a loader that restarts says each of them again.
        self._frames: asyncio.Queue[PartReady | LeaseDone | PilotlightError] = asyncio.Queue(
            len(request.parts) + 2
        )
        self._keeping = asyncio.create_task(self._keep(), name=f"lease for {request.instance_id}")
        # However that ends: ``close`` may be cancelled while it waits for it.
        self._keeping.add_done_callback(lambda _: self._writer.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[PartReady]:
        return self._parts()

    @property
    def intact(self) -> bool:
        """Whether the parts have stayed in the pool since they were ready.

        Ask after copying the last one.
        """
        kept = not self._unconfirmed or self._clock.monotonic_s() < self._broken_s + RETURN_S
        return kept and not self._keeping.done()

    async def close(self) -> None:
        """End the lease: the parts may be dropped from now on.

        It ends also when this is cancelled.
        """
        await cancel_all((self._keeping,))

    async def _parts(self) -> AsyncIterator[PartReady]:
        """Each part as it becomes ready, in execution order; ends after the last.

        Raises:
            PilotlightError: a part cannot be had, as the loader says.
            SourceUnavailable: the loader is gone, or has another pool now.
        """
        while not self.done:
            received = await self._frames.get()
            if isinstance(received, PilotlightError):
                raise received
            if isinstance(received, LeaseDone):
                self.done = True
            else:
                yield received

    async def _keep(self) -> None:
        """Receive frames; hold the connection until the lease is closed, making it again when the
        loader restarts.
        """
        complete = False
        try:
            while True:
                received = await self._receive()
                if isinstance(received, LeaseFailed):
                    raise error_of(received.code, received.message)
                if isinstance(received, PartReady) and received.part not in self._delivered:
                    self._delivered[received.part] = received.serial
                    self._frames.put_nowait(received)
                elif isinstance(received, PartReady):
                    self._confirm(received)
                elif isinstance(received, LeaseDone) and not complete:
                    complete = True
                    self._frames.put_nowait(received)
                elif received is None:
                    await self._renew()
        except PilotlightError as error:
            self._frames.put_nowait(error)

    async def _receive(self) -> FromLoader | None:
        """The next frame; None when the connection broke."""
        try:
            return await read_frame(self._reader, FromLoader)
        except (OSError, MessageUndecodable):
            return None

    def _confirm(self, again: PartReady) -> None:
        if again.serial != self._delivered[again.part]:
            raise SourceUnavailable(
                f"the loader came back without part {again.part}: it was given up and is in the pool anew"
            )
        self._unconfirmed.discard(again.part)

    async def _renew(self) -> None:
        self._writer.close()
        if not self._unconfirmed:
            self._broken_s = self._clock.monotonic_s()
        self._unconfirmed = set(self._delivered)
        self._reader, self._writer, granted = await self._client.ask(self._request)
        if (granted.pool_path, _inode_of(granted.pool_path)) != (self.pool_path, self._inode):
            raise SourceUnavailable(
                "the loader came back with another host pool: what was mapped is not kept any more"
            )
        log.info("lease renewed", action="lease_renewed", instance_id=self._request.instance_id)


def _inode_of(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError as error:
        raise SourceUnavailable(
            f"the host pool {path} cannot be found: {error.strerror}"
        ) from error
