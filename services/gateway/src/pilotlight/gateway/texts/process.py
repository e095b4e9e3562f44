"""One text helper, as the gateway sees it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from pilotlight.gateway.texts.frames import (
    HEADER_BYTES,
    Hello,
    Reply,
    encoded,
    header,
    header_of,
    reply_of,
)

START_DEADLINE_S = 30.0
END_DEADLINE_S = 5.0
BLAMED_SHARE = 0.1
"""Of its time. A helper that worked less was stopped, or had no processor: that is not the job's
fault."""
_KEPT_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "HOME",
    "TMPDIR",
)
"""A helper gets no secrets."""
_ENVIRONMENT = {
    # One thread: its stacks and arenas would count as the memory of a job.
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "RUST_BACKTRACE": "0",
}
_BLAMED: dict[int, str] = {
    signal.SIGPROF: "it took more processor time than it may",
    signal.SIGABRT: "it took more memory than it may, or crashed",
    signal.SIGSEGV: "it crashed",
    signal.SIGBUS: "it crashed",
    signal.SIGILL: "it crashed",
    signal.SIGFPE: "it crashed",
}
"""Signals by which a helper ends that its job is to blame for. Others come from outside."""


class HelperLost(Exception):
    """A helper ended, or was ended, before it answered."""

    def __init__(self, reason: str, *, blamed: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.blamed = blamed
        """It was its job's fault."""
        self.long = False
        """It was a long job."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A process, and our end of its socket."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket


class Launcher(Protocol):
    """Where helpers come from, and go when they are not needed any more."""

    def launch(self) -> Launched:
        """Start one, or hand out one that is idle."""
        ...

    def take_back(self, launched: Launched) -> None:
        """One that is idle and well."""
        ...


class HelperLauncher:
    """Starts processes, and ends them."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes

    def launch(self) -> Launched:
        """Start one.

        Takes a millisecond or two; by a thread that lives as long as the helper, which ends with
        it.

        Raises:
            OSError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        environment = {
            name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ
        } | _ENVIRONMENT
        command = [
            sys.executable,
            "-m",
            "pilotlight.gateway.texts.helper",
            str(theirs.fileno()),
            str(self._memory_bytes),
        ]
        with theirs:
            try:
                process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment
                )
            except OSError:
                ours.close()
                raise
        return Launched(process, ours)

    def take_back(self, launched: Launched) -> None:
        """End it."""
        end(launched)


def end(launched: Launched) -> None:
    """Kill a helper, whatever it does."""
    launched.connection.close()
    launched.process.kill()
    with suppress(subprocess.TimeoutExpired):
        launched.process.wait(END_DEADLINE_S)


def _worked_s(pid: int) -> float:
    """Processor time of a process so far; 0 where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Heard = Callable[[list[Reply] | Exception], None]
"""Takes a helper's answers, all of them, or why there are none."""


class _Line(asyncio.Protocol):
    """Our end of a helper's socket: no streams and no task, for a job is done within a tenth of a
    millisecond.
    """

    def __init__(self) -> None:
        self.gone = False
        """The helper has closed its end."""
        self.worked_s = 0.0
        """Processor time that it had taken when it answered last."""
        self.heard: Heard | None = None
        """Of the jobs that are under way."""
        self.jobs = 1
        """How many those are."""
        self._replies: list[Reply] = []
        """To the first of them."""
        self._got = bytearray()

    def data_received(self, data: bytes) -> None:
        got: bytes | bytearray = data
        if self._got:
            self._got += data
            got = self._got
        at = 0
        try:
            while len(self._replies) < self.jobs and len(got) >= at + HEADER_BYTES:
                length, worked_s = header_of(got[at : at + HEADER_BYTES])
                end_at = at + HEADER_BYTES + length
                if len(got) < end_at:
                    break
                self._replies.append(reply_of(got[at + HEADER_BYTES : end_at]))
                at, self.worked_s = end_at, worked_s
        except msgspec.DecodeError as error:
            self._say(error)
            return
        if got is data:
            self._got += data[at:]
        else:
            del self._got[:at]
        if len(self._replies) == self.jobs:
            self._say(self._replies)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._say(exc or EOFError("its end is closed"))

    def _say(self, what: list[Reply] | Exception) -> None:
        heard, self.heard = self.heard, None
        self._got, self._replies = bytearray(), []
        if heard is not None:
            heard(what)


class HelperProcess:
    """A helper, which does one job after the other."""

    def __init__(self, launched: Launched, transport: asyncio.WriteTransport, line: _Line) -> None:
        self.launched = launched
        self.held: set[str] = set()
        """Bundles that it was given; it may have dropped some."""
        self.over = False
        """It is of no use any more: nothing that it says is heard."""
        self._transport = transport
        self.line = line

    @classmethod
    async def start(cls, launcher: Launcher) -> "HelperProcess":
        """Start one and wait until it can work.

        Raises:
            HelperLost: it did not come up.
        """
        try:
            launched = launcher.launch()
            started = await cls._connected(launched)
        except OSError as error:
            raise HelperLost(f"it cannot be started: {error}", blamed=False) from error
        hello = encoded(Hello())
        try:
            await started.ask([header(hello, START_DEADLINE_S), hello], START_DEADLINE_S)
        except HelperLost as error:
            raise HelperLost(f"it did not come up: {error.reason}", blamed=False) from error
        return started

    @classmethod
    async def _connected(cls, launched: Launched) -> "HelperProcess":
        """With a line to a helper, which is ended where there is none."""
        loop = asyncio.get_running_loop()
        try:
            # Not the socket itself: the helper may be taken back, and serve another.
            transport, line = await loop.create_unix_connection(
                _Line, sock=launched.connection.dup()
            )
        except BaseException:
            await asyncio.to_thread(end, launched)
            raise
        return cls(launched, transport, line)

    def begin(self, frames: list[bytes], heard: Heard, jobs: int = 1) -> None:
        """Hand it so many jobs. ``heard`` is called once, also where it ends before it has answered
        them; then ``lost`` says why.
        """
        self.line.heard, self.line.jobs = heard, jobs
        try:
            self._transport.writelines(frames)
        except (OSError, RuntimeError) as error:
            # RuntimeError where uvloop has closed the socket.
            self.line.connection_lost(OSError(str(error)))

    async def ask(self, frames: list[bytes], deadline_s: float) -> Reply:
        """Have a job done.

        Raises:
            HelperLost: it ended before it answered, or was ended at the deadline. It is of no use
                any more.
        """
        answer: asyncio.Future[list[Reply] | Exception] = asyncio.get_running_loop().create_future()

        def heard(what: list[Reply] | Exception) -> None:
            if not answer.done():
                answer.set_result(what)

        try:
            self.begin(frames, heard)
            async with asyncio.timeout(deadline_s):
                what = await answer
        except TimeoutError as error:
            raise await self.late(deadline_s) from error
        except BaseException:
            # Half a reply is of no use to the next job.
            await self.kill()
            raise
        if isinstance(what, Exception):
            raise await self.lost() from what
        return what[0]

    async def late(self, deadline_s: float) -> HelperLost:
        """End one that has not answered in time; what is to be said of it."""
        worked_s = _worked_s(self.launched.process.pid) - self.line.worked_s
        await self.kill()
        return HelperLost(
            f"it took more than {deadline_s:g} s, and worked for {worked_s:g} s of them",
            blamed=worked_s > BLAMED_SHARE * deadline_s,
        )

    async def lost(self) -> HelperLost:
        """Why it ended."""
        process = self.launched.process
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, END_DEADLINE_S)
        status = process.poll()
        await self.kill()
        number = -status if status is not None and status < 0 else None
        blamed = _BLAMED.get(number) if number is not None else None
        return HelperLost(
            blamed or f"its process ended with status {status}", blamed=blamed is not None
        )

    def hear_no_more(self) -> None:
        """An answer that comes now comes too late."""
        self.over = True
        self.line.heard = None

    async def kill(self) -> None:
        """End it, whatever it does."""
        self.hear_no_more()
        self._transport.close()
        await asyncio.to_thread(end, self.launched)

    def leave(self) -> Launched:
        """Let go of an idle one."""
        self._transport.close()
        return self.launched
