"""What the processes of a running system take, over the time of a soak."""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
ROLES = {
    "pilotlight.worker.engine_main": "engine",
    "pilotlight.worker": "worker",
    "pilotlight.gateway": "gateway",
    "pilotlight.scheduler": "scheduler",
    "pilotlight.loader": "loader",
    "pilotlight.cache": "cache",
    "pilotlight.materializer": "materializer",
}
"""By module; a child that is the worker's spare is none of them."""

FIFTHS = 5
GROWTH_RATIO, GROWTH_BYTES = 1.05, 16 * MIB
"""From the second fifth of the requests to the last one, medians: what a heap's fragments may add,
and no leak stays below in thousands of requests."""
ENGINE_OUTSIDE_BYTES = 128 * MIB
"""What the engine may take beside what it was given for models: compiled kernels are half of it."""
MORE_HANDLES = 8
"""Descriptors, or threads, that may come in the same time: connections that are opened anew are not
closed at the same moment."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One process at one moment."""

    rss_bytes: int
    descriptors: int
    threads: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """All of them, by role."""

    done: int
    """Requests that had ended."""
    at_s: float
    taken: Mapping[str, Taken]


def look(root_pid: int) -> dict[str, Taken]:
    """The system's processes now: those that descend from one."""
    found: dict[str, Taken] = {}
    for pid in descendants(root_pid):
        role = _role(pid)
        taken = _taken(pid) if role else None
        if role and taken:
            found[role] = taken
    return found


def descendants(root_pid: int) -> Iterable[int]:
    """Its children, theirs, and so on."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command may hold spaces and parentheses.
                children[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(
                    int(entry.name)
                )
            except OSError:
                continue
    waiting = [root_pid]
    while waiting:
        waiting += (below := children[waiting.pop()])
        yield from below


def _role(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if Path(words[0]).name == "nats-server":
        return "nats-server"
    if words[1:2] != ["-m"] or "--spare" in words:
        return None
    return ROLES.get(words[2])


def _taken(pid: int) -> Taken | None:
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    if "VmRSS" not in status:
        return None  # It has just ended.
    return Taken(int(status["VmRSS"].split()[0]) * 1024, descriptors, int(status["Threads"]), pid)


def verdicts(
    before: Mapping[str, Taken],
    samples: Sequence[Sample],
    after: Mapping[str, Taken],
    granted_bytes: int,
) -> list[str]:
    """What the system did not keep to; empty: nothing.

    * Every role is there in every sample, and always the same process.
    * Its median RSS in the last fifth of the requests is at most that in the second fifth, times
      1.05, and 16 MiB.
    * Its descriptors and threads have not grown by more than 8 in that time.
    * The engine takes at most 128 MiB more than before the first request and what it was granted;
      after the model was evicted, at most 128 MiB more than before the first request.
    """
    wrong: list[str] = []
    for role in (*ROLES.values(), "nats-server"):
        if (
            role not in before
            or role not in after
            or any(role not in sample.taken for sample in samples)
        ):
            wrong.append(f"{role} was not there all the time")
            continue
        if any(sample.taken[role].pid != before[role].pid for sample in samples):
            wrong.append(f"{role} ended, and was started again")
            continue
        second, last = medians(samples, role)[1], medians(samples, role)[-1]
        if last.rss_bytes > second.rss_bytes * GROWTH_RATIO + GROWTH_BYTES:
            wrong.append(f"{role} grew from {_mib(second.rss_bytes)} to {_mib(last.rss_bytes)} MiB")
        if last.descriptors > second.descriptors + MORE_HANDLES:
            wrong.append(f"{role} had {second.descriptors} descriptors, then {last.descriptors}")
        if last.threads > second.threads + MORE_HANDLES:
            wrong.append(f"{role} had {second.threads} threads, then {last.threads}")
    if "engine" in before and "engine" in after:
        idle_bytes = before["engine"].rss_bytes
        most_bytes = max(
            (sample.taken["engine"].rss_bytes for sample in samples if "engine" in sample.taken),
            default=0,
        )
        beside_bytes = most_bytes - idle_bytes - granted_bytes
        if beside_bytes > ENGINE_OUTSIDE_BYTES:
            wrong.append(f"the engine took {_mib(beside_bytes)} MiB beside what it was granted")
        kept_bytes = after["engine"].rss_bytes - idle_bytes
        if kept_bytes > ENGINE_OUTSIDE_BYTES:
            wrong.append(f"the engine kept {_mib(kept_bytes)} MiB after its model was evicted")
    return wrong


def medians(samples: Sequence[Sample], role: str) -> list[Taken]:
    """A role's medians in each fifth of the requests, by what had ended; those without a sample
    have that of the one before.
    """
    total = samples[-1].done
    found: list[Taken] = []
    for fifth in range(FIFTHS):
        within = [
            sample.taken[role]
            for sample in samples
            if role in sample.taken and fifth * total <= FIFTHS * sample.done <= (fifth + 1) * total
        ]
        if within:
            found.append(
                Taken(
                    int(statistics.median(one.rss_bytes for one in within)),
                    int(statistics.median(one.descriptors for one in within)),
                    int(statistics.median(one.threads for one in within)),
                )
            )
        else:
            found.append(found[-1])
    return found


def told(taken: Taken) -> dict[str, Any]:
    """For the document."""
    return {
        "rss_mib": _mib(taken.rss_bytes),
        "descriptors": taken.descriptors,
        "threads": taken.threads,
    }


def _mib(size_bytes: int) -> float:
    return round(size_bytes / MIB, 1)
