"""Where a server's processes spend the processor's time, by ``/proc``: for ``bench/served_gpu.py
--profile``.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TOLD_SHARE = 0.005
"""Of one core; what took less is not told."""


@dataclass(frozen=True)
class Thread:
    """A thread that lives, and what it has taken since it began."""

    role: str
    name: str
    cpu_s: float


@dataclass(frozen=True)
class Reading:
    """One moment."""

    at_s: float
    processes: Mapping[int, tuple[str, float]]
    """Role, and seconds since it began with those of threads that have ended."""
    threads: Mapping[tuple[int, int], Thread]
    """By process and thread."""


def read(root_pid: int) -> Reading:
    """A process and all that descend from it."""
    processes: dict[int, tuple[str, float]] = {}
    threads: dict[tuple[int, int], Thread] = {}
    for pid in _with_descendants(root_pid):
        folder = Path(f"/proc/{pid}")
        try:
            role = role_of((folder / "cmdline").read_bytes().decode(errors="replace").split("\0"))
            processes[pid] = (role, _cpu_of(folder)[1])
            for task in (folder / "task").iterdir():
                name, cpu_s = _cpu_of(task)
                threads[pid, int(task.name)] = Thread(role, name, cpu_s)
        except OSError:
            continue  # It has just ended.
    return Reading(time.monotonic(), processes, threads)


def taken(before: Reading, after: Reading) -> dict[str, Any]:
    """Between two moments: seconds of each role's processes together, how many cores that is, and
    the busiest thread of each.
    """
    took_s = after.at_s - before.at_s
    seconds, counts = Counter[str](), Counter[str]()
    for pid, (role, cpu_s) in after.processes.items():
        seconds[role] += cpu_s - before.processes.get(pid, (role, 0.0))[1]
        counts[role] += 1
    threads: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for key, thread in after.threads.items():
        began_s = before.threads[key].cpu_s if key in before.threads else 0.0
        threads[thread.role].append((thread.cpu_s - began_s, thread.name))
    roles = {
        role: {
            "processes": counts[role],
            "cpu_s": round(cpu_s, 3),
            "cores": round(cpu_s / took_s, 3),
            "busiest_thread": {
                "name": max(threads[role])[1],
                "cores": round(max(threads[role])[0] / took_s, 3),
            },
        }
        for role, cpu_s in seconds.most_common()
        if cpu_s / took_s >= TOLD_SHARE
    }
    return {
        "seconds": round(took_s, 3),
        "cores": round(sum(seconds.values()) / took_s, 3),
        "roles": roles,
    }


def role_of(words: list[str]) -> str:
    """A process's name for people: of Python's its module, of others the program."""
    if words[1:2] == ["-m"] and len(words) > 2:
        return ("spare " if "--spare" in words else "") + words[2].removeprefix("pilotlight.")
    return (
        Path(words[0].split(":")[0].split(" ")[0]).name
        if words[0].startswith("/")
        else words[0].split(" ")[0]
    )


def _cpu_of(folder: Path) -> tuple[str, float]:
    """Name, and seconds in the kernel and outside."""
    head, _, fields = (folder / "stat").read_text().rpartition(")")
    ticks = fields.split()[11:13]
    return head.partition("(")[2], sum(map(int, ticks)) / TICKS_PER_S


def _with_descendants(root_pid: int) -> Iterator[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            children[int(parent)].append(int(entry.name))
    waiting = [root_pid]
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        yield pid
