"""The truly cold process, through the whole system: ``process`` of ``bench/materialize.py``.

A system has a model in its host pool and an artifact of it in its store
(``materialize_system.py``). Then, ``ROUNDS`` times: the model is evicted, the caches of compiled
kernels are emptied, the loader, its worker and all engines are killed at once, and a request is
sent, which waits at the gateway while the supervisor starts a loader again. The clock starts when
that process does, and stops at the first text at the client.

With ``--node`` the loader finds a new node instead: no host pool, no state folder, so another name
for the node, and no word of GPUs; the weights' files are as the system's cache of files has them.
The supervisor stands still until the silence of the killed node has been noticed and the request is
sent: the system has no node then, and the new one is all that the first token waits for.

``python materialize_process.py SHAPE FOLDER KIND [--node]`` prints one line of JSON: each round, in
milliseconds since the loader began. By ``/proc``: ``worker`` and ``engine``, when their processes
began; by logs: ``planned`` (the loader knows its devices and begins its worker), ``up`` (the
engine), and how long the engine waited for its imports when the worker wanted it (``libraries``)
and for its device (``context``); by the start's record: each phase's end; by the client: ``ttft``,
``asked`` (negative: before the loader began). ``compiled`` counts kernels that were compiled in the
round, and ``restored`` says whether the start came from the artifact.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cache_gpu import Served, say
from materialize_system import (
    MODEL,
    SETTLED_S,
    Asked,
    Logs,
    Row,
    Whole,
    gaps_ms,
    materialized,
    now_s,
    phases,
    record_of,
    settled,
)

ROUNDS = 3
LOOK_S = 0.002
SLOW_S = 8.0
"""A round that takes longer tells what the system's processes wrote in it."""
LOADER, WORKER = "pilotlight.loader", "pilotlight.worker"
ENGINE = "pilotlight.worker.engine_main"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
EVENTS = {
    "workers_planned": "planned_ms",
    "engine_started": "up_ms",
    "graphs_begun": "attached_ms",
}
"""Lines of logs, and what the first one of a round is called."""
TOOK = {"libraries_s": "libraries_ms", "context_s": "context_ms"}
BEGUN = {"ready": "graphs_begun"}
"""What the library had done by itself when the engine asked for it."""
REST_S = 1.0
"""An engine that has this long nothing to do has planned the next start."""


@dataclass(frozen=True)
class Process:
    """One of the system's, with the program that it runs."""

    pid: int
    parent: int
    began_s: float
    program: str


def processes(home: Path) -> list[Process]:
    """The loader of a system, its workers and their engines."""
    found: list[Process] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            modules = [os.fsdecode(word) for word in words if word.startswith(b"pilotlight.")]
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if not modules or stat[0] in "ZX":
                continue
            ours = f"PILOTLIGHT_HOME={home}".encode() in (entry / "environ").read_bytes().split(
                b"\0"
            )
            # An engine is given none of our variables: it is known by its parent.
            if ours or modules[0] == ENGINE:
                began_s = int(stat[19]) / TICKS_PER_S
                found.append(Process(int(entry.name), int(stat[1]), began_s, modules[0]))
    node = {LOADER, WORKER}
    ours_by_pid = {one.pid for one in found if one.program in node}
    return [one for one in found if one.pid in ours_by_pid or one.parent in ours_by_pid]


def timeline(lines: Iterator[dict[str, Any]], began_s: float, wall_offset_s: float) -> Row:
    """What logs say of a start.

    Args:
        lines: of the logs, in any order.
        began_s: when the loader did.
        wall_offset_s: from that clock to the wall's.
    """
    row: Row = {"compiled": 0}
    for line in lines:
        action = line.get("action")
        row["compiled"] += action == "kernel_compiled"
        name = EVENTS.get(str(action))
        if name is None:
            continue
        at_s = datetime.fromisoformat(line["timestamp"]).timestamp() - wall_offset_s
        row[name] = min(row.get(name, float("inf")), (at_s - began_s) * 1e3)
        row |= {TOOK[key]: 1e3 * line[key] for key in TOOK if key in line}
        row |= {BEGUN[key]: line[key] for key in BEGUN if key in line}
    return row


def supervisor_of(home: Path) -> int:
    """The process that starts the loader again."""
    return next(one.parent for one in processes(home) if one.program == LOADER)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def killed(home: Path) -> set[int]:
    """Kills the node's processes; their ids."""
    victims = processes(home)
    # Who would start the others again goes first.
    for one in sorted(victims, key=lambda one: one.began_s):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    return {one.pid for one in victims}


def without_node(served: Served) -> None:
    """Until the system knows of no worker that lives."""
    end_s = time.monotonic() + SETTLED_S
    while time.monotonic() < end_s:
        workers = served.admin("GET", "/workers")["workers"]
        if all(one["liveness"] == "dead" for one in workers):
            return
        time.sleep(0.1)
    raise SystemExit("the killed node is not taken for dead")


def started(home: Path, before: set[int], until: threading.Event) -> dict[str, float]:
    """When the new processes of each program began, the first of each, until it is told to end."""
    found: dict[str, float] = {}
    while not until.wait(LOOK_S):
        for one in processes(home):
            if one.pid not in before:
                found[one.program] = min(found.get(one.program, one.began_s), one.began_s)
        if {LOADER, WORKER, ENGINE} <= found.keys():
            break
    return found


def one_round(whole: Whole, prompt: str, logs: Logs, *, node: bool) -> Row:
    """One cold process; on a new node, where that is asked for."""
    served, home = whole.served, whole.home
    time.sleep(REST_S)
    served.evict(MODEL)
    settled(served)
    shutil.rmtree(whole.caches, ignore_errors=True)
    for _ in logs.news():
        pass
    wall_offset_s = time.time() - now_s()
    with contextlib.ExitStack() as standing:
        if node:
            standing.enter_context(stopped(supervisor_of(home)))
        before = killed(home)
        if node:
            whole.pool.unlink(missing_ok=True)
            shutil.rmtree(home / "state", ignore_errors=True)
            without_node(served)
        asked, found = Asked(served, prompt), dict[str, float]()
    done = threading.Event()
    watch = threading.Thread(target=lambda: found.update(started(home, before, done)), daemon=True)
    watch.start()
    try:
        asked.wait()
    finally:
        done.set()
        watch.join()
    began_s = found[LOADER]
    record = record_of(served, asked.trace_id)
    lines = list(logs.news())
    if asked.at_s[0] - began_s > SLOW_S:
        for line in sorted(lines, key=lambda line: str(line.get("timestamp"))):
            say(json.dumps(line))
    return {
        "ttft_ms": (asked.at_s[0] - began_s) * 1e3,
        "asked_ms": (asked.sent_s - began_s) * 1e3,
        "worker_ms": (found.get(WORKER, began_s) - began_s) * 1e3,
        "engine_ms": (found.get(ENGINE, began_s) - began_s) * 1e3,
        **timeline(iter(lines), began_s, wall_offset_s),
        **phases(record, began_s, wall_offset_s),
        "worst_gap_ms": max(gaps_ms(asked), default=0.0),
        "restored": int("restore" in {one["name"] for one in record.get("phases", ())}),
    }


def measure(shape: str, folder: Path, kind: str, *, node: bool) -> Row:
    """All rounds of a system of its own; ``node``: each on a new node."""
    with materialized(shape, folder, kind, ROUNDS) as whole:
        logs = Logs(whole.home)
        return {"rounds": [one_round(whole, prompt, logs, node=node) for prompt in whole.prompts]}


if __name__ == "__main__":
    made = measure(
        sys.argv[1], Path(sys.argv[2]).absolute(), sys.argv[3], node="--node" in sys.argv
    )
    print(json.dumps(made))
