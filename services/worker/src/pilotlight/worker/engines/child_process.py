"""One engine child: its process, its socket, its end. ``engines.process`` speaks with it."""

import asyncio
import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import structlog

from pilotlight.common.envelope import Timed
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.messages.codec import write_frame
from pilotlight.common.messages.engine import EngineUp, Promote
from pilotlight.common.waiting import within
from pilotlight.worker.engine_child.slate import Slate
from pilotlight.worker.engines.child_ahead import ChildAhead
from pilotlight.worker.engines.child_command import ChildOptions, prepared

log = structlog.get_logger()

REAP_DEADLINE_S = 2.0
END_GRACE_S = 1.0
"""From the close of its socket to the process's end; then it is killed."""


class Process(Protocol):
    """A child's process. ``asyncio.subprocess.Process`` is one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Child:
    """A child, and this end of its socket."""

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    slate: Slate
    """What it does at this moment, in its own words."""


async def spawn(options: ChildOptions, *, spare: bool = False) -> Child:
    """Start a child; ``spare`` has it import what an engine needs, and then wait to be promoted.

    Raises:
        OSError: no process can be started.
    """
    with ExitStack() as on_failure, ExitStack() as always:
        ours, slate_fd, command, how = prepared(
            options, ("--spare",) if spare else (), on_failure, always
        )
        process = await asyncio.create_subprocess_exec(*command, **how)
        slate = Slate(slate_fd)
        on_failure.pop_all()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return Child(process, reader, writer, slate)


async def begun(options: ChildOptions, ahead: ChildAhead | None) -> Child:
    """A child: the one that was started ahead, if it fits, else one that is started now.

    Raises:
        OSError: no process can be started.
    """
    if ahead is not None:
        if ahead.fits(options):
            child = await _connected(ahead)
            # One that is gone already says so as any other that ends at its start.
            write_frame(child.writer, Timed(Promote(cuda_devices=options.cuda_devices)))
            return child
        log.warning(
            "the engine that was started ahead is not what the settings say",
            action="engine_ahead_unfit",
            pid=ahead.pid,
        )
        await end_ahead(ahead)
    return await spawn(options)


async def end_ahead(ahead: ChildAhead) -> None:
    """Nobody takes it. It is killed: it may be importing, and has nothing to give back."""
    child = await _connected(ahead)
    kill_group(child.process)
    await bury(child)


async def _connected(ahead: ChildAhead) -> Child:
    slate = Slate(ahead.slate_fd)
    os.close(ahead.slate_fd)
    reader, writer = await asyncio.open_unix_connection(sock=ahead.connection)
    return Child(_Started(ahead.process), reader, writer, slate)


class _Started:
    """A ``Process`` that no loop has started."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    async def wait(self) -> int:
        """Its exit status, when it has ended."""
        if self._process.poll() is None:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            descriptor = os.pidfd_open(self._process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self._process.wait()


def with_process(up: EngineUp, took_s: float) -> EngineUp:
    """What a child says of itself, with what its process took: the rest of ``took_s``, from its
    spawn until it was up.
    """
    if up.start is None:
        return up
    create_s = max(0.0, took_s - up.start.context_s - up.start.libraries_s)
    return msgspec.structs.replace(up, start=replace(up.start, create_s=create_s))


def said_of(up: EngineUp) -> dict[str, Any]:
    """What a log says of an engine that is up."""
    said: dict[str, Any] = {"pid": up.pid, "device": up.device_name}
    if up.start is not None:
        said |= {
            "libraries_s": round(up.start.libraries_s, 3),
            "context_s": round(up.start.context_s, 3),
        }
    return said


async def bury(child: Child) -> int | None:
    """Make sure that it is dead, and leave nothing of it behind; its exit status."""
    child.writer.close()
    child.slate.close()
    with suppress(DeadlineExceeded):
        # It ends by itself, and then its status says why.
        await within(END_GRACE_S, child.process.wait(), "the engine's own end")
    kill_group(child.process)
    try:
        return await within(REAP_DEADLINE_S, child.process.wait(), "reaping the engine")
    except DeadlineExceeded:
        log.error("engine cannot be reaped", action="engine_unreaped", pid=child.process.pid)
        return None


def kill_group(process: Process) -> None:
    """Kill a child and everything that it started."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        # Its own session makes its process id that of its group.
        os.killpg(process.pid, signal.SIGKILL)
