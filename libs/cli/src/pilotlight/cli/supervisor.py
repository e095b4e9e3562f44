"""Starts processes by readiness, restarts them when they die, stops them in reverse order, and
leaves none behind.

A child says ``READY=1`` on the datagram socket in its NOTIFY_SOCKET (as systemd asks for it). Its
output goes to a file, never to a pipe that a grandchild could keep open. The supervisor is a child
subreaper: workers that outlive their loader become its children, so that at stop no process is
left.
"""

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import (
    DeadlineExceeded,
    InternalError,
    PilotlightError,
    error_of,
)
from pilotlight.common.machine import END_WITH_PARENT
from pilotlight.common.service import SETTINGS_INVALID, START_FAILED, TASK_DIED
from pilotlight.common.waiting import Backoff, cancel_all, pause, within

log = structlog.get_logger()

PR_SET_CHILD_SUBREAPER = 36
ORPHAN_PATIENCE_S = 5.0
"""How long processes that lost their parent may take to end, before they are killed and after."""
MAX_LOG_BYTES = 64 * 1024
"""Of the end of a child's log in which its last word is looked for."""
STABLE_AFTER_S = 10.0
"""A child that lived this long starts its next restart without a delay."""
START_TRIES = 3
"""Of a child that says that another try can help: on a machine that has just begun to start
everything, a server's answer may be too late for it."""


class ChildFailed(PilotlightError):
    """A process of the system did not start."""

    code = "child_failed"
    action = "The message names its log; `pilotlight doctor` checks the machine."


class _LastWord(msgspec.Struct, frozen=True):
    """A line that a service logs when it cannot start."""

    action: str
    error: str
    code: str = InternalError.code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process to supervise."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log_path: Path
    ready_deadline_s: float = 60.0
    stop_deadline_s: float = 12.0


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    watcher: asyncio.Task[None] | None = None
    restarts: int = 0
    log_from: int = 0
    """Where the log of its last start begins."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Owns the processes of one system."""

    def __init__(
        self,
        run_dir: Path,
        clock: Clock,
        on_change: Callable[[str, str], None],
        others: Callable[[], set[int]],
        *,
        orphan_patience_s: float = ORPHAN_PATIENCE_S,
    ) -> None:
        """There is no child yet.

        Args:
            run_dir: Folder for the sockets by which children say that they are ready.
            clock: Tells how long a child lived, and for deadlines.
            on_change: Told of a child's name and its state, ``restarting`` or ``ready``.
            others: Ids of this process's children that others own.
            orphan_patience_s: Seconds that processes which lost their parent may take to end,
                before they are killed and after.
        """
        self._run_dir = run_dir
        self._clock = clock
        self._on_change = on_change
        self._others = others
        self._orphan_patience_s = orphan_patience_s
        self._spawning = 0
        self._adopting = False
        self._children: list[_Child] = []
        self._rng = random.Random()
        self._backoff = Backoff(first_s=0.2, limit_s=10.0)

    def adopt_orphans(self) -> None:
        """Become the parent of grandchildren whose parent dies, and reap them, until ``stop``."""
        self._adopting = True
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_orphans)

    async def start(self, spec: ChildSpec) -> None:
        """Start a child and return when it is ready; from then on it is restarted when it dies.

        Raises:
            ChildFailed: it ended without a word, or was not ready in time.
            PilotlightError: it ended and said why.
        """
        child = _Child(spec)
        self._children.append(child)
        await self._launch_at_last(child)
        child.watcher = asyncio.create_task(self._watch(child), name=f"watch {spec.name}")

    async def stop(self) -> None:
        """Stop every child in reverse order of start, then whatever else is left of them."""
        for child in reversed(self._children):
            if child.watcher is not None:
                await cancel_all((child.watcher,))
            await self._terminate(child)
        self._children.clear()
        if self._adopting:
            await self._end_orphans()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
            self._adopting = False

    async def _launch_at_last(self, child: _Child) -> None:
        for failures in range(START_TRIES - 1):
            try:
                await self._launch(child)
            except PilotlightError as error:
                if not error.retryable:
                    raise
                log.warning(
                    "process does not start; starting it again",
                    action="child_start_failed",
                    child=child.spec.name,
                    error=error.message,
                )
                await pause(self._backoff.delay_s(failures, self._rng))
            else:
                return
        await self._launch(child)

    async def _launch(self, child: _Child) -> None:
        spec = child.spec
        address = self._run_dir / f"notify-{spec.name}.sock"
        address.unlink(missing_ok=True)
        child.ready.clear()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as receiver:
            receiver.bind(str(address))
            loop = asyncio.get_running_loop()
            loop.add_reader(receiver, _receive_readiness, receiver, child.ready)
            try:
                await self._spawn(child, str(address))
                await self._until_ready(child)
            finally:
                loop.remove_reader(receiver)
                address.unlink(missing_ok=True)

    async def _spawn(self, child: _Child, notify_socket: str) -> None:
        # Until the process is in its place it looks like an orphan, and must not be reaped as one.
        self._spawning += 1
        try:
            with child.spec.log_path.open("ab") as output:
                child.log_from = output.tell()
                child.process = await asyncio.create_subprocess_exec(
                    *child.spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={
                        **child.spec.environment,
                        "NOTIFY_SOCKET": notify_socket,
                        END_WITH_PARENT: str(os.getpid()),
                    },
                    start_new_session=True,
                )
        except OSError as error:
            raise ChildFailed(f"{child.spec.name} cannot be started: {error}") from error
        finally:
            self._spawning -= 1
        self._reap_orphans()

    async def _until_ready(self, child: _Child) -> None:
        assert child.process is not None
        ended = asyncio.create_task(child.process.wait(), name=f"end of {child.spec.name}")
        ready = asyncio.create_task(child.ready.wait(), name=f"readiness of {child.spec.name}")
        try:
            await asyncio.wait(
                {ended, ready},
                timeout=child.spec.ready_deadline_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ended.done():
                raise _why(child, ended.result())
            if ready.done():
                return
        finally:
            await cancel_all((ended, ready))
        await self._terminate(child)
        raise ChildFailed(
            f"{child.spec.name} was not ready within {child.spec.ready_deadline_s:g} s; its log is {child.spec.log_path}"
        )

    async def _watch(self, child: _Child) -> None:
        while True:
            assert child.process is not None
            since_s = self._clock.monotonic_s()
            status = await child.process.wait()
            log.warning(
                "process ended; starting it again",
                action="child_restart",
                child=child.spec.name,
                status=status,
            )
            self._on_change(child.spec.name, "restarting")
            if self._clock.monotonic_s() - since_s > STABLE_AFTER_S:
                child.restarts = 0
            while True:
                await pause(self._backoff.delay_s(child.restarts, self._rng))
                child.restarts += 1
                try:
                    await self._launch(child)
                except (PilotlightError, OSError) as error:
                    log.error(
                        "process does not start",
                        action="child_restart_failed",
                        child=child.spec.name,
                        error=str(error),
                    )
                    continue
                self._on_change(child.spec.name, "ready")
                break

    async def _terminate(self, child: _Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await within(
                child.spec.stop_deadline_s, process.wait(), f"the stop of {child.spec.name}"
            )
        except DeadlineExceeded as error:
            log.error("killed", action="child_killed", child=child.spec.name, error=error.message)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _end_orphans(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline_s = self._clock.monotonic_s() + self._orphan_patience_s
            told: set[int] = set()
            # Each that ends may leave us children of its own.
            while (orphans := self._orphans()) and self._clock.monotonic_s() < deadline_s:
                for pid in orphans - told:
                    log.warning(
                        "ending a process that was left",
                        action="orphan_ended",
                        pid=pid,
                        signal=number.name,
                    )
                    _signal(pid, number)
                told |= orphans
                self._reap_orphans()
                await pause(0.02)
            if not orphans:
                return

    def _reap_orphans(self) -> None:
        if self._spawning or not self._adopting:
            return
        for pid in self._orphans():
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue

    def _orphans(self) -> set[int]:
        ours = {
            child.process.pid for child in self._children if child.process is not None
        } | self._others()
        return _children_of_this_process() - ours


def _why(child: _Child, status: int) -> PilotlightError:
    """What a child that ended while it started said of that in its log: its own error, told as
    ours.
    """
    spec = child.spec
    with contextlib.suppress(OSError), spec.log_path.open("rb") as log_file:
        log_file.seek(max(child.log_from, log_file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
        for line in reversed(log_file.read().splitlines()):
            with contextlib.suppress(msgspec.MsgspecError):
                told = msgspec.json.decode(line, type=_LastWord)
                if told.action in (START_FAILED, SETTINGS_INVALID, TASK_DIED):
                    return error_of(told.code, f"{spec.name} cannot start: {told.error}")
    return ChildFailed(f"{spec.name} ended with status {status}; its log is {spec.log_path}")


def _receive_readiness(receiver: socket.socket, ready: asyncio.Event) -> None:
    try:
        message = receiver.recv(4096)
    except BlockingIOError:
        return
    if b"READY=1" in message:
        ready.set()


def _children_of_this_process() -> set[int]:
    found: set[int] = set()
    # A process is the child of the thread that started it.
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (thread / "children").read_text().split())
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
