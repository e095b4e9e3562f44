"""Processes that outlive the process that started them: found again by a file that names them,
waited for without being their parent.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from pilotlight.common.procfs import look_at
from pilotlight.loader.spawning import spawn


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a pid file says. A pid alone does not name a process: pids are used again."""

    pid: int
    start_ticks: int
    """When it started, in clock ticks since boot."""


@dataclass(slots=True, eq=False)
class Process:
    """A process that runs, or ran, in a session of its own."""

    record: ProcessRecord
    _pidfd: int
    _is_child: bool
    exit_code: int | None = None
    """Known of a child that has ended; negative for the signal that ended it."""

    @classmethod
    def spawn(cls, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> Self:
        """Start a process that goes on when we end: see ``spawning.spawn``.

        Raises:
            OSError: it cannot be started.
        """
        return cls.begun(spawn(command, environment, log_path))

    @classmethod
    def begun(cls, pid: int) -> Self:
        """A child of ours that has just begun.

        Raises:
            OSError: it cannot be watched, and was ended.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # It could not be watched, and another one would be started beside it.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        return cls(ProcessRecord(pid=pid, start_ticks=_start_ticks(pid) or 0), pidfd, True)

    @classmethod
    def adopt(cls, record: ProcessRecord) -> Self | None:
        """The process of an earlier run, if it still lives."""
        try:
            pidfd = os.pidfd_open(record.pid)
        except OSError:
            return None
        # Asked after the descriptor is held: from here on it is this process, or none.
        if _start_ticks(record.pid) != record.start_ticks:
            os.close(pidfd)
            return None
        return cls(record, pidfd, False)

    async def ended(self) -> None:
        """Return when it has ended."""
        if self._pidfd < 0:
            return
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._pidfd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._pidfd)
        if self._is_child:
            self._reap()
        self.release()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    @property
    def stopped(self) -> bool:
        """By a signal or a debugger: it does nothing until it is woken."""
        found = look_at(self.record.pid) if self._pidfd >= 0 else None
        return found is not None and found.state in "Tt"

    def _reap(self) -> None:
        """Collect the exit status of a child that has ended: this does not block."""
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.record.pid, 0)[1])

    def kill_session(self) -> None:
        """End it and whatever it started in its session, at once."""
        try:
            os.killpg(self.record.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def release(self) -> None:
        """Let go of it; it may go on."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class ProcessFile:
    """A pid file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> ProcessRecord | None:
        """What an earlier run wrote; None where there is nothing of use."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ProcessRecord)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, record: ProcessRecord) -> None:
        """Name the process for a later run.

        Raises:
            OSError: that cannot be written; what was there before is still there.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        making = self._path.with_suffix(".new")
        making.write_bytes(msgspec.json.encode(record))
        making.rename(self._path)

    def remove(self) -> None:
        """There is no such process any more.

        Raises:
            OSError: the file cannot be removed, which is as good: it names a process that has
                ended.
        """
        self._path.unlink(missing_ok=True)


def _start_ticks(pid: int) -> int | None:
    found = look_at(pid)
    return found.start_ticks if found is not None else None
