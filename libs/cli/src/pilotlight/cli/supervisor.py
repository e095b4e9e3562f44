"""Starts processes by readiness, restarts them when they die, stops them in reverse order, and leaves none behind.

A child says ``READY=1`` on the datagram socket in its NOTIFY_SOCKET (as systemd asks for it). Its output goes to a file, never to a
pipe that a grandchild could keep open. The supervisor is a child subreaper: workers that outlive their loader become its children,
so that at stop nobody is left.
"""

import asyncio
import ctypes
import os
import random
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.service import END_WITH_PARENT
from pilotlight.common.waiting import Backoff, pause

log = structlog.get_logger()

PR_SET_CHILD_SUBREAPER = 36
STABLE_AFTER_S = 10.0
"""A child that lived this long starts its next restart without a delay."""


class ChildFailed(PilotlightError):
    """A process of the system did not start."""

    code = "child_failed"
    action = "The message names its log; `pilotlight doctor` checks the machine."


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
    stopping: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Owns the processes of one system."""

    def __init__(
        self, run_dir: Path, clock: Clock, on_change: Callable[[str, str], None], others: Callable[[], set[int]]
    ) -> None:
        """``others`` names children of this process that somebody else owns."""
        self._run_dir = run_dir
        self._clock = clock
        self._on_change = on_change
        self._others = others
        self._children: list[_Child] = []
        self._rng = random.Random()
        self._backoff = Backoff(first_s=0.2, limit_s=10.0)

    def adopt_orphans(self) -> None:
        """Become the parent of grandchildren whose parent dies, and reap them."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_orphans)

    async def start(self, spec: ChildSpec) -> None:
        """Start a child and return when it is ready; from then on it is restarted when it dies.

        Raises:
            ChildFailed: it ended, or was not ready in time.
        """
        child = _Child(spec)
        self._children.append(child)
        await self._launch(child)
        child.watcher = asyncio.create_task(self._watch(child), name=f"watch {spec.name}")

    async def stop(self) -> None:
        """Stop every child in reverse order of start, then whatever else is left of them."""
        for child in reversed(self._children):
            child.stopping = True
            if child.watcher is not None:
                child.watcher.cancel()
            await self._terminate(child)
        self._children.clear()
        await self._end_orphans()

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
                with spec.log_path.open("ab") as output:
                    child.process = await asyncio.create_subprocess_exec(
                        *spec.argv,
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env={**spec.environment, "NOTIFY_SOCKET": str(address), END_WITH_PARENT: str(os.getpid())},
                        start_new_session=True,
                    )
                await self._until_ready(child)
            finally:
                loop.remove_reader(receiver)
                address.unlink(missing_ok=True)

    async def _until_ready(self, child: _Child) -> None:
        assert child.process is not None
        ended = asyncio.create_task(child.process.wait(), name=f"end of {child.spec.name}")
        ready = asyncio.create_task(child.ready.wait(), name=f"readiness of {child.spec.name}")
        await asyncio.wait({ended, ready}, timeout=child.spec.ready_deadline_s, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if child.ready.is_set():
            ended.cancel()
            return
        if ended.done():
            raise ChildFailed(f"{child.spec.name} ended with status {ended.result()}; its log is {child.spec.log_path}")
        ended.cancel()
        await self._terminate(child)
        raise ChildFailed(
            f"{child.spec.name} was not ready within {child.spec.ready_deadline_s:g} s; its log is {child.spec.log_path}"
        )

    async def _watch(self, child: _Child) -> None:
        while not child.stopping:
            assert child.process is not None
            since_s = self._clock.monotonic_s()
            status = await child.process.wait()
            if child.stopping:
                return
            log.warning("process ended; starting it again", action="child_restart", child=child.spec.name, status=status)
            self._on_change(child.spec.name, "restarting")
            if self._clock.monotonic_s() - since_s > STABLE_AFTER_S:
                child.restarts = 0
            while True:
                await pause(self._backoff.delay_s(child.restarts, self._rng))
                child.restarts += 1
                try:
                    await self._launch(child)
                except (ChildFailed, OSError) as error:
                    log.error("process does not start", action="child_restart_failed", child=child.spec.name, error=str(error))
                    continue
                self._on_change(child.spec.name, "ready")
                break

    async def _terminate(self, child: _Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(child.spec.stop_deadline_s):
                await process.wait()
        except TimeoutError:
            log.error("process did not stop in time; killing it", action="child_killed", child=child.spec.name)
            process.kill()
            await process.wait()

    async def _end_orphans(self) -> None:
        for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            deadline_s = self._clock.monotonic_s() + patience_s
            for pid in self._orphans():
                log.warning("ending a process that was left", action="orphan_ended", pid=pid, signal=number.name)
                _signal(pid, number)
            while self._orphans() and self._clock.monotonic_s() < deadline_s:
                self._reap_orphans()
                await pause(0.02)
            if not self._orphans():
                return

    def _reap_orphans(self) -> None:
        for pid in self._orphans():
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue

    def _orphans(self) -> list[int]:
        ours = {child.process.pid for child in self._children if child.process is not None} | self._others()
        return [pid for pid in _children_of_this_process() if pid not in ours]


def _receive_readiness(receiver: socket.socket, ready: asyncio.Event) -> None:
    try:
        message = receiver.recv(4096)
    except BlockingIOError:
        return
    if b"READY=1" in message:
        ready.set()


def _children_of_this_process() -> list[int]:
    try:
        listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in listed.split()]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
