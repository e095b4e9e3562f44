"""The engine as a child process, over a Unix socketpair.

A busy Python thread beside a step of a few milliseconds doubles it; a busy process does not. A crash in native code ends the child
alone: this side notices at once, because the socket closes with the last process that has it.
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from pilotlight.common.errors import DeadlineExceeded, EngineFailed, PilotlightError
from pilotlight.common.messages.codec import frame, read_frame
from pilotlight.common.messages.engine import (
    Abort,
    EngineUp,
    FromEngine,
    LoadStage,
    PlacePart,
    Run,
    Shutdown,
    ToEngine,
    UnloadStage,
)
from pilotlight.common.waiting import within
from pilotlight.worker.engine_client import EngineDied, EngineEvent

log = structlog.get_logger()

START_DEADLINE_S = 60.0
"""Importing torch from a cold disk takes most of it."""
COMMAND_DEADLINE_S = 5.0
"""For handing a command over; a child that reads nothing for this long hangs."""
STOP_DEADLINE_S = 3.0
REAP_DEADLINE_S = 2.0
END_GRACE_S = 1.0
"""From the close of its socket to the process's end; then it is killed."""
MAX_EVENTS = 1024
"""Events that wait to be worked on; past it the child waits."""
MAX_LOG_BYTES = 8 * 1024 * 1024
"""A log that is longer is begun anew when the next child starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """How to start an engine child."""

    threads: int
    log_path: Path
    """Its standard output and error: never an inherited pipe, which a grandchild would hold open."""
    faults: str = ""
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class _Child:
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class ProcessEngine:
    """``EngineClient`` whose engine is ``python -m pilotlight.worker.child``."""

    def __init__(self, options: ChildOptions) -> None:
        self._options = options
        self._events: asyncio.Queue[EngineEvent | None] = asyncio.Queue(MAX_EVENTS)
        self._child: _Child | None = None
        self._up: EngineUp | None = None
        self._reading: asyncio.Task[None] | None = None
        self._kill_reason = ""
        self._stopping = False

    @property
    def alive(self) -> bool:
        return self._up is not None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._child.process.pid if self._child else None

    async def start(self) -> EngineUp:
        if self._up is not None:
            return self._up
        if self._stopping:
            raise EngineFailed("the engine was stopped for good")
        if self._reading is not None:
            await self._reading
        self._kill_reason = ""
        self._child = child = await _spawn(self._options)
        try:
            first: FromEngine | None = await within(START_DEADLINE_S, read_frame(child.reader, FromEngine), "the engine's start")
        except PilotlightError as error:
            await self._bury(child)
            raise EngineFailed(f"the engine did not start: {error.message} See {self._options.log_path}.") from error
        except OSError:
            first = None
        if not isinstance(first, EngineUp):
            status = await self._bury(child)
            raise EngineFailed(f"the engine ended at its start with status {status}. See {self._options.log_path}.")
        self._up = first
        self._reading = asyncio.create_task(self._read(child), name="engine events")
        log.info("engine started", action="engine_started", pid=first.pid, device=first.device_name)
        return first

    async def load_stage(self, command: LoadStage) -> None:
        await self._send(command)

    async def place_part(self, command: PlacePart) -> None:
        await self._send(command)

    async def unload_stage(self, command: UnloadStage) -> None:
        await self._send(command)

    async def run(self, command: Run) -> None:
        await self._send(command)

    async def abort(self, command: Abort) -> None:
        await self._send(command)

    async def events(self) -> AsyncIterator[EngineEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def kill(self, reason: str) -> None:
        if self._child is not None:
            self._kill_reason = reason
            _kill_group(self._child.process)

    async def stop(self) -> None:
        self._stopping = True
        child, reading = self._child, self._reading
        if child is not None:
            try:
                child.writer.write(frame(Shutdown()))
                await within(STOP_DEADLINE_S, child.process.wait(), "the engine's end")
            except (DeadlineExceeded, OSError):
                log.warning("engine killed: it did not end in time", action="engine_stop_killed", pid=child.process.pid)
                _kill_group(child.process)
        if reading is not None:
            self._reading = None
            # Its reader of events may have left already: what waits is of no use to anybody then.
            self._drain_events()
            await reading
        self._drain_events()
        self._events.put_nowait(None)

    def _drain_events(self) -> None:
        while not self._events.empty():
            self._events.get_nowait()

    async def _send(self, command: ToEngine) -> None:
        child = self._child
        if child is None or self._up is None:
            raise EngineFailed("the engine is not running")
        try:
            child.writer.write(frame(command))
            await within(COMMAND_DEADLINE_S, child.writer.drain(), "handing a command to the engine")
        except DeadlineExceeded as error:
            await self.kill(f"it took no command for {COMMAND_DEADLINE_S:g} s")
            raise EngineFailed(error.message) from error
        except OSError as error:
            raise EngineFailed(f"the engine is gone: {error}") from error

    async def _read(self, child: _Child) -> None:
        """Pass frames on until the child ends, whichever way, and say so."""
        reason = ""
        try:
            while (event := await read_frame(child.reader, FromEngine)) is not None:
                await self._events.put(event)
        except PilotlightError as error:
            reason = error.message
        except OSError as error:
            reason = str(error)
        status = await self._bury(child)
        if self._stopping:
            return
        reason = self._kill_reason or reason or f"it ended with status {status}"
        log.error("engine ended", action="engine_died", pid=child.process.pid, reason=reason)
        await self._events.put(EngineDied(reason=reason))

    async def _bury(self, child: _Child) -> int | None:
        """Make sure that it is dead, and leave nothing of it behind."""
        self._up = None
        self._child = None
        child.writer.close()
        with suppress(DeadlineExceeded):
            # It ends by itself, and then its status says why.
            await within(END_GRACE_S, child.process.wait(), "the engine's own end")
        _kill_group(child.process)
        try:
            return await within(REAP_DEADLINE_S, child.process.wait(), "reaping the engine")
        except DeadlineExceeded:
            log.error("engine cannot be reaped", action="engine_unreaped", pid=child.process.pid)
            return None


async def _spawn(options: ChildOptions) -> _Child:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        arguments = {
            "--fd": theirs.fileno(),
            "--parent": os.getpid(),
            "--threads": options.threads,
            "--log-level": options.log_level,
        }
        flat = [str(word) for pair in arguments.items() for word in pair]
        options.log_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(options.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as output:
            if output.tell() > MAX_LOG_BYTES:
                output.truncate(0)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pilotlight.worker.child",
                *flat,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env=_child_environment(options),
            )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return _Child(process, reader, writer)


def _child_environment(options: ChildOptions) -> dict[str, str]:
    """The parent's, without our settings and the object store's: the child has no use for credentials."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PILOTLIGHT_", "AWS_"))}
    return {
        **inherited,
        "PILOTLIGHT_FAULTS": options.faults,
        "OMP_NUM_THREADS": str(options.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _kill_group(process: Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        # Its own session makes its process id that of its group.
        os.killpg(process.pid, signal.SIGKILL)
