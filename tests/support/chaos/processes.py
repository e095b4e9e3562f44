"""The processes of one running system, found by their parents; and what can be done to them."""

import os
import select
import signal
import time
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MARK = "CHAOS_SYSTEM"
"""Environment variable of a system under test: a process that has it and does not descend from the
supervisor is an orphan."""


ENGINES_OF_A_WORKER = 2


class Fault(StrEnum):
    """What is done to it."""

    KILL = "kill"
    """``kill -9``."""
    STOP = "stop"
    """Stopped for five seconds, as by a machine that swaps, or a debugger."""
    HANG = "hang"
    """Stopped for good: its supervisor has to notice and end it."""
    RESTART = "restart"
    """Asked to end, and started again by its supervisor."""


class Target(StrEnum):
    """What a fault hits."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    CACHE = "cache"
    LOADER = "loader"
    WORKER = "worker"
    ENGINE = "engine"
    MATERIALIZER = "materializer"
    NATS = "nats-server"
    POSTGRES = "postgres"


@dataclass(frozen=True)
class Found:
    """One process."""

    pid: int
    parent: int
    started_ticks: int
    words: tuple[str, ...]
    kind: str
    """A target's name; ``postgres-child`` for the processes that the database's server starts; else
    the program's name."""

    def environment(self) -> dict[str, str]:
        try:
            pairs = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return {}
        return dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if b"=" in pair)

    def maps(self, what: str) -> bool:
        return what in self._maps()

    def backed_bytes(self, start: int, stop: int) -> int:
        """Memory that may be read and written between two addresses, as the system says."""
        found = 0
        for line in self._maps().splitlines():
            addresses, rights = line.split()[:2]
            first, end = (int(one, 16) for one in addresses.split("-"))
            if rights.startswith("rw"):
                found += max(0, min(end, stop) - max(first, start))
        return found

    def _maps(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/maps").read_text()
        except OSError:
            return ""


class Processes:
    """The system whose supervisor is ``root``."""

    def __init__(self, root: int, mark: str) -> None:
        self.root = root
        self._mark = mark

    def all(self) -> dict[int, Found]:
        """Every descendant of the supervisor that has not ended."""
        known = _every_process()
        inside: dict[int, Found] = {}
        for found in known.values():
            above = found
            while above.parent in known and above.parent != self.root:
                above = known[above.parent]
            if above.parent == self.root:
                inside[found.pid] = found
        return inside

    def of(self, target: Target) -> list[Found]:
        """The processes of a service, the oldest first."""
        found = [one for one in self.all().values() if one.kind == target.value]
        return sorted(found, key=lambda one: (one.started_ticks, one.pid))

    def census(self) -> Counter[str]:
        """How many there are of each kind; of engines one for each worker that has any, for spares
        come late.

        The database's own children come and go.
        """
        everyone = self.all().values()
        counts = Counter(
            one.kind for one in everyone if one.kind not in ("postgres-child", Target.ENGINE.value)
        )
        counts[Target.ENGINE.value] = len(
            {one.parent for one in everyone if one.kind == Target.ENGINE.value}
        )
        return counts

    def crowds(self) -> dict[int, int]:
        """Workers that have more engines than the one that serves and its spare, and how many."""
        counts = Counter(one.parent for one in self.of(Target.ENGINE))
        return {worker: count for worker, count in counts.items() if count > ENGINES_OF_A_WORKER}

    def ticks(self) -> int:
        """Processor time of the supervisor and its descendants, with those that have ended; in the
        kernel's ticks.
        """
        return sum(_ticks(pid) for pid in (self.root, *self.all()))

    def orphans(self) -> list[Found]:
        """Processes of this system that no supervisor would stop."""
        inside = self.all()
        return [
            one
            for one in _every_process().values()
            if one.pid not in inside
            and one.pid != self.root
            and one.environment().get(MARK) == self._mark
        ]

    def worker_of(self, worker_id: str) -> Found:
        """The process of one worker."""
        return next(
            one
            for one in self.of(Target.WORKER)
            if one.environment().get("PILOTLIGHT_WORKER_ID") == worker_id
        )

    def engine_of(self, worker: Found) -> Found:
        """The engine that a worker uses: of its children the one that has the host pool mapped, or
        else the oldest.
        """
        children = [one for one in self.of(Target.ENGINE) if one.parent == worker.pid]
        return next((one for one in children if one.maps(".pool")), children[0])

    def hit(self, target: Target, worker_id: str | None) -> list[Found]:
        """The processes that a fault of a target hits; ``worker_id`` says which of several workers,
        where it matters.
        """
        if target in (Target.WORKER, Target.ENGINE):
            worker = self.worker_of(worker_id) if worker_id else self.of(Target.WORKER)[0]
            return [worker] if target is Target.WORKER else [self.engine_of(worker)]
        return self.of(target)


STOP_S = 5.0
SHUTDOWN_S = 30.0


def inflict(fault: Fault, processes: Processes, victims: list[Found]) -> None:
    """Do it; returns when it is over."""
    match fault:
        case Fault.KILL:
            for one in victims:
                os.kill(one.pid, signal.SIGKILL)
        case Fault.STOP:
            hold_stopped(processes, victims, STOP_S)
        case Fault.HANG:
            stop(processes, victims)
        case Fault.RESTART:
            for one in victims:
                # To PostgreSQL this is a fast shutdown; SIGTERM would wait for its clients to
                # leave.
                _shut_down(one.pid, signal.SIGINT)


def stop(processes: Processes, victims: list[Found]) -> list[int]:
    """SIGSTOP; returns the processes to wake. A database's server is stopped with all its
    children.
    """
    everyone = {one.pid for one in victims}
    everyone |= {
        one.pid
        for one in processes.all().values()
        if one.kind == "postgres-child" and one.parent in everyone
    }
    for pid in sorted(everyone):
        _signal(pid, signal.SIGSTOP)
    return sorted(everyone)


def wake(pids: list[int]) -> None:
    """SIGCONT."""
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def hold_stopped(processes: Processes, victims: list[Found], seconds: float) -> None:
    """Stop, let time pass, go on: the passing of time is the fault."""
    stopped = stop(processes, victims)
    try:
        time.sleep(seconds)
    finally:
        wake(stopped)


def _shut_down(pid: int, number: signal.Signals) -> None:
    """Returns when the process has ended, or its parent would be found waiting for that and taken
    for healthy.
    """
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, number)
        if not select.select([process], [], [], SHUTDOWN_S)[0]:
            raise TimeoutError(f"{pid} has not ended {SHUTDOWN_S:g} s after {number.name}")
    finally:
        os.close(process)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _every_process() -> dict[int, Found]:
    found: dict[int, Found] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            one = _read(int(entry.name))
            if one is not None:
                found[one.pid] = one
    return found


def _read(pid: int) -> Found | None:
    try:
        # The name of the program, in parentheses, may hold anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = tuple(
            os.fsdecode(word)
            for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if word
        )
    except OSError:
        return None
    if state in "ZX":
        return None
    return Found(pid, int(fields[0]), int(fields[18]), words, _kind(words))


def _ticks(pid: int) -> int:
    """Of a process and its children that it has buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:15])


def _kind(words: tuple[str, ...]) -> str:
    if "pilotlight.worker.engine_main" in words:
        return Target.ENGINE.value
    for target in Target:
        if f"pilotlight.{target.value}" in words:
            return target.value
    program = Path(words[0]).name if words else ""
    if program.startswith("postgres:") or (words and words[0].startswith("postgres:")):
        return "postgres-child"
    return program
