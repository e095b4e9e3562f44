"""What the system says of a process, by its id."""

import os
from dataclasses import dataclass
from pathlib import Path

_STATE, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS = 0, 11, 12, 19
"""Indexes among the fields of /proc/PID/stat that follow the name in parentheses."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One look at a process."""

    state: str
    """Of its first thread, as ``ps`` shows it: R, S, D, T, t, Z, ..."""
    cpu_s: float
    """Processor time of all its threads."""
    start_ticks: int
    """When it started, in clock ticks since boot: with its id it names a process, for ids are used
    again."""


def look_at(pid: int) -> ProcessStat | None:
    """A process; None where there is none (any more), or it cannot be looked at."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything, also parentheses.
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessStat(fields[_STATE], ticks / _TICKS_PER_S, int(fields[_START_TICKS]))


def starved_s(pid: int) -> float:
    """How long the threads of a process have waited for a processor, all together; 0 where the
    system does not count that.
    """
    waited_ns = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waited_ns += _waited_ns(thread)
    except OSError:
        return 0.0
    return waited_ns / 1e9


def _waited_ns(thread: Path) -> int:
    try:
        # Time on a processor, time that it waited for one, turns.
        return int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0
