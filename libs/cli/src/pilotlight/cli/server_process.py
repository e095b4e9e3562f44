"""A server program that runs as a child process of ours.

Every server obeys one contract: ``start`` returns when the server takes connections, ``stop``
returns when its process is gone, both may be called again, and a server starts again on the folder
that it left, also after a crash. Output goes to a log file. A server ends when the process that
started it does, however that ended.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.waiting import within

log = structlog.get_logger()

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Server(ABC):
    """A child process in its own session."""

    name = "server"
    stop_signal = signal.SIGTERM

    def __init__(self, folder: Path, log_file: Path, clock: Clock | None) -> None:
        self.folder = folder.absolute()
        self.log_file = log_file
        self._clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""
        return (
            self._process.pid
            if self._process is not None and self._process.poll() is None
            else None
        )

    @abstractmethod
    async def start(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Return when the server takes connections; at once when it runs already."""

    async def wait(self) -> int:
        """Return the exit status when the process has ended; 0 when it was never started or was
        stopped.
        """
        process = self._process
        if process is None:
            return 0
        await ended(process)
        return process.wait()

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Ask the server to end; past the deadline it is killed."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(self.stop_signal)
        try:
            await within(deadline_s, ended(process), f"the stop of {self.name}")
        except DeadlineExceeded as error:
            log.warning("killed", action="server_killed", server=self.name, error=error.message)
            process.kill()
            await ended(process)
        process.wait()

    def _spawn(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            return subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
                preexec_fn=_dies_with_parent(self.stop_signal),
            )

    def _log_end(self) -> str:
        """The last lines of the log: what the user needs to see when a server does not start."""
        text = self.log_file.read_text(errors="replace") if self.log_file.is_file() else ""
        lines = text.strip().splitlines()
        full = [line for line in lines[-20:] if "No space left on device" in line]
        return " / ".join(full[-1:] or lines[-3:])


def _dies_with_parent(number: signal.Signals) -> Callable[[], None]:
    parent = os.getpid()

    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was set
            os._exit(1)

    return before_exec


async def ended(process: subprocess.Popen[bytes]) -> None:
    """Return when a child has ended, without reaping it."""
    if process.poll() is not None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    watched = os.pidfd_open(process.pid)
    try:
        loop.add_reader(watched, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
