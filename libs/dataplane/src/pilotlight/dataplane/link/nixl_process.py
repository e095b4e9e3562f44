"""The loader's side of the process that reads other nodes' memory: its life, and the way to it."""

import asyncio
import itertools
import mmap
import os
import random
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.common.errors import MessageUndecodable, PilotlightError
from pilotlight.common.messages.codec import encode_msgpack
from pilotlight.common.messages.link import Region
from pilotlight.common.waiting import Backoff, cancel_all, pause, within
from pilotlight.dataplane.link.nixl_reads import Reads, UnitRead
from pilotlight.dataplane.link.nixl_wire import (
    MAX_AGENT_BYTES,
    MAX_MESSAGE_BYTES,
    Begin,
    Done,
    Forget,
    FromReader,
    Learn,
    Learned,
    Read,
    Ready,
    Stir,
    Unusable,
    decode,
)
from pilotlight.dataplane.link.thread import LinkThread

log = structlog.get_logger()

COMMAND = (sys.executable, "-m", "pilotlight.dataplane.link.nixl_reader")
SLOTS = 64
"""Units that may be landing at once, of all links together."""
START_S = 120.0
"""For the process to get ready: a network card takes a while for each gigabyte that it registers.
"""
LEARN_S = 10.0
ENDED = "the process that reads has ended"
END_S = 5.0
BACKOFF = Backoff(first_s=1.0, limit_s=60.0)
RDMA_DEVICES = Path("/sys/class/infiniband")


class ReadsMemory(Protocol):
    """What a link needs to read another node's memory."""

    @property
    def generation(self) -> int:
        """Of the process that reads: what one has learned the next one does not know."""
        ...

    async def learn(self, region: Region) -> int:
        """Get ready to read a node's pool, once there is a process: its number for
        ``UnitRead.peer`` and ``forget``.

        Raises:
            NixlFailed: it cannot be read.
        """
        ...

    def forget(self, peer: int) -> None:
        """A node will be read from no more."""
        ...

    def read(self, read: UnitRead) -> None:
        """Begin a read as soon as there is a slot; ``read.on_end`` is called at its end, perhaps
        before this returns.
        """
        ...

    def release(self, read: UnitRead) -> None:
        """As ``Reads.release``."""
        ...


class NixlFailed(Exception):
    """Something cannot be read this way."""


class _Ended(Exception):
    """The process ended, or could not be started."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The host pool's file, for the process that maps it."""

    descriptor: int
    start: int
    """Where images begin."""
    file_bytes: int


@dataclass(slots=True)
class _Run:
    """One process, ready, until its end."""

    sock: socket.socket
    reads: Reads
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timers: dict[int, asyncio.TimerHandle] = field(default_factory=dict[int, asyncio.TimerHandle])
    learning: dict[int, "asyncio.Future[None]"] = field(
        default_factory=dict[int, "asyncio.Future[None]"]
    )

    def say(self, message: object) -> bool:
        """Whether the process could be told."""
        try:
            self.sock.send(encode_msgpack(message))
        except OSError:
            return False
        return True


class NixlProcess:
    """``ReadsMemory`` by a process with NIXL, which also lets other nodes read this host pool.

    For one event loop, but where it says so.
    """

    def __init__(
        self,
        pool: PoolMemory,
        thread: LinkThread,
        *,
        command: Sequence[str] = COMMAND,
        slots: int = SLOTS,
        backoff: Backoff = BACKOFF,
    ) -> None:
        """Nothing is started before ``keep`` runs.

        Args:
            pool: The memory that others may read.
            thread: The one that ``keep`` will run in.
            command: Starts the process that reads; a descriptor's number is added to it.
            slots: Units that may be landing at once, of all links together.
            backoff: Waits before the process is started again.
        """
        self.region: Region | None = None
        """By what others read the pool; None while they cannot. Any thread may look."""
        self.generation = 0
        self._pool = pool
        self._thread = thread
        self._command = tuple(command)
        self._slots = slots
        self._backoff = backoff
        self._run: _Run | None = None
        self._up = asyncio.Event()
        self._peers = itertools.count(1)
        self._rng = random.Random()

    async def keep(self) -> None:
        """Start the process, and start it again when it ends, for ever; where there is no NIXL, say
        so and return.
        """
        failures = 0
        while True:
            generation = self.generation
            try:
                await self._live()
            except _Ended as error:
                log.warning(
                    "nothing goes by NIXL",
                    action="nixl_down",
                    error=str(error),
                    is_final=error.is_final,
                )
                if error.is_final:
                    return
            failures = 0 if self.generation > generation else failures + 1
            await pause(self._backoff.delay_s(failures, self._rng))

    def offset_of(self, file_offset: int) -> int:
        """As ``ReadableMemory.offset_of``."""
        return file_offset - self._pool.start

    def stir(self) -> None:
        """Another node was told where bytes lie. Any thread."""
        self._thread.call(self._say, Stir())

    async def learn(self, region: Region) -> int:
        """As ``ReadsMemory.learn``."""
        await self._up.wait()
        run, peer = self._run, next(self._peers)
        if run is None or not run.say(Learn(peer=peer, agent=region.agent)):
            raise NixlFailed(ENDED)
        learned = run.learning[peer] = asyncio.get_running_loop().create_future()
        try:
            await within(LEARN_S, learned, "getting to know another node's memory")
        except PilotlightError as error:
            raise NixlFailed(error.message) from error
        finally:
            run.learning.pop(peer, None)
        return peer

    def forget(self, peer: int) -> None:
        """As ``ReadsMemory.forget``."""
        self._say(Forget(peer=peer))

    def read(self, read: UnitRead) -> None:
        """As ``ReadsMemory.read``."""
        if self._run is None:
            read.end(ENDED)
            return
        self._run.reads.add(read)
        self._pump(self._run)

    def release(self, read: UnitRead) -> None:
        """As ``ReadsMemory.release``."""
        read.is_wanted = False
        if self._run is not None:
            self._run.reads.release(read)
            self._pump(self._run)

    def _say(self, message: object) -> None:
        if self._run is not None:
            self._run.say(message)

    def _pump(self, run: _Run) -> None:
        """Begin the reads for which there are slots."""
        loop = asyncio.get_running_loop()
        while (begun := run.reads.next()) is not None:
            number, read = begun
            offset = read.slot * UNIT_BYTES
            asked = Read(
                number=number,
                peer=read.peer,
                address=read.address,
                offset=offset,
                size_bytes=read.size_bytes,
            )
            run.timers[number] = loop.call_later(read.deadline_s, self._on_late, run, number)
            if not run.say(asked):
                # It takes no more messages, or it is gone, which is heard of as well.
                run.ended.set()
                return

    def _on_late(self, run: _Run, number: int) -> None:
        run.reads.late(number)
        self._check(run)

    def _check(self, run: _Run) -> None:
        if run.reads.is_spent:
            run.ended.set()

    async def _live(self) -> None:
        """One process, from its start to its end.

        Raises:
            _Ended: it did, or there is no NIXL.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        landing = os.memfd_create("pilotlight-landing", os.MFD_CLOEXEC)
        # Opened anew: the lock on the pool is to end with this process, even while others have the
        # file open.
        pool = os.open(f"/proc/self/fd/{self._pool.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        process: subprocess.Popen[bytes] | None = None
        try:
            os.ftruncate(landing, self._slots * UNIT_BYTES)
            ours.setblocking(False)
            process = self._start(theirs.fileno(), landing, pool)
            theirs.close()
            await self._serve(ours, pool, landing)
        except (OSError, PilotlightError) as error:
            raise _Ended(str(error)) from error
        finally:
            for descriptor in (pool, landing):
                os.close(descriptor)
            ours.close()
            theirs.close()
            if process is not None:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, END_S)

    def _start(self, *descriptors: int) -> "subprocess.Popen[bytes]":
        """Not in a thread: a cancelled caller would not know what was started."""
        return subprocess.Popen(
            [*self._command, str(descriptors[0])], pass_fds=descriptors, stdin=subprocess.DEVNULL
        )

    async def _serve(self, sock: socket.socket, pool: int, landing: int) -> None:
        landing_bytes = self._slots * UNIT_BYTES
        begin = Begin(
            name=uuid.uuid4().hex,
            pool_descriptor=pool,
            pool_start=self._pool.start,
            pool_bytes=self._pool.file_bytes,
            is_writable=has_rdma(),
            landing_descriptor=landing,
            landing_bytes=landing_bytes,
        )
        sock.send(encode_msgpack(begin))
        ready = await within(START_S, _hear(sock, Ready | Unusable), "starting NIXL")
        if isinstance(ready, Unusable):
            raise _Ended(ready.reason, is_final=ready.is_final)
        if len(ready.agent) > MAX_AGENT_BYTES:
            raise _Ended(
                f"NIXL says {len(ready.agent)} bytes of this host; a link takes {MAX_AGENT_BYTES}",
                is_final=True,
            )
        run = self._run = _Run(
            sock, Reads(memoryview(mmap.mmap(landing, landing_bytes)), self._slots)
        )
        self.generation += 1
        self.region = Region(
            agent=ready.agent,
            address=ready.address,
            size_bytes=self._pool.file_bytes - self._pool.start,
        )
        self._up.set()
        log.info("bytes can go by NIXL", action="nixl_up")
        hearing = asyncio.create_task(self._hear_for_ever(run), name="NIXL")
        spent = asyncio.create_task(run.ended.wait(), name="NIXL's end")
        try:
            await asyncio.wait({hearing, spent}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                hearing.result()
            raise _Ended(f"{run.reads.out_of_use} of {self._slots} reads came to no end")
        finally:
            self._run = self.region = None
            self._up.clear()
            await cancel_all((hearing, spent))
            _end(run)

    async def _hear_for_ever(self, run: _Run) -> None:
        while True:
            message = await _hear(run.sock, FromReader)
            match message:
                case Done():
                    run.timers.pop(message.number).cancel()
                    run.reads.done(message.number, message.error)
                    self._pump(run)
                    self._check(run)
                case Learned():
                    _on_learned(run, message)
                case _:
                    raise MessageUndecodable(
                        f"the process that reads says {type(message).__name__} again"
                    )


def has_rdma(devices: Path = RDMA_DEVICES) -> bool:
    """Whether this host has a network card whose memory accesses need no processor."""
    return devices.is_dir() and any(devices.iterdir())


def takes_nixl(transport: str, devices: Path = RDMA_DEVICES) -> bool:
    """Whether bytes are to go by NIXL, as the setting says: ``tcp``, ``nixl``, or ``auto``, where
    there is an RDMA device.
    """
    return transport == "nixl" or (transport == "auto" and has_rdma(devices))


async def _hear(sock: socket.socket, as_type: Any) -> Any:
    data = await asyncio.get_running_loop().sock_recv(sock, MAX_MESSAGE_BYTES)
    if not data:
        raise _Ended(ENDED)
    return decode(data, as_type)


def _on_learned(run: _Run, message: Learned) -> None:
    learned = run.learning.get(message.peer)
    if learned is not None and not learned.done():
        if message.error:
            learned.set_exception(NixlFailed(message.error))
        else:
            learned.set_result(None)


def _end(run: _Run) -> None:
    for timer in run.timers.values():
        timer.cancel()
    for learned in run.learning.values():
        if not learned.done():
            learned.set_exception(NixlFailed(ENDED))
    run.reads.end(ENDED)
