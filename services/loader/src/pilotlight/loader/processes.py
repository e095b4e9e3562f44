"""Processes that outlive whoever started them: found again by a file that names them, waited for without being their parent."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from pilotlight.common.machine import STANDARD_ERROR, STANDARD_ERROR_DESCRIPTOR

_STAT_START_TIME = 19
"""Index of the start time among the fields of /proc/PID/stat that follow the name in parentheses."""


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
        """Start a process that is no part of our session: it goes on when we end. Its output goes to a file, never to a pipe of ours,
        or to where our standard error goes.

        Raises:
            OSError: it cannot be started.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = [(os.POSIX_SPAWN_OPEN, 1, str(log_path), flags, 0o600), (os.POSIX_SPAWN_DUP2, 1, STANDARD_ERROR_DESCRIPTOR)]
        inherited = [(os.POSIX_SPAWN_DUP2, STANDARD_ERROR_DESCRIPTOR, 1)]
        pid = os.posix_spawn(
            command[0],
            list(command),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                *(inherited if log_path == STANDARD_ERROR else opened),
            ],
            setsid=True,
            # Python ignores it; who is started must not.
            setsigdef=[signal.SIGPIPE],
        )
        return cls(ProcessRecord(pid=pid, start_ticks=_start_ticks(pid) or 0), os.pidfd_open(pid), True)

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
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, record: ProcessRecord) -> None:
        """Name the process for a later run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        making = self._path.with_suffix(".new")
        making.write_bytes(msgspec.json.encode(record))
        making.rename(self._path)

    def remove(self) -> None:
        """There is no such process any more."""
        self._path.unlink(missing_ok=True)


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, also parentheses.
    return int(stat.rpartition(")")[2].split()[_STAT_START_TIME])
