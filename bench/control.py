"""What control costs in a large cluster: ``make bench-control``.

Two parts: *live* runs the control plane as it is, with nodes that are played (``control_live.py``);
*ticks* is what follows.

Builds the facts of a cluster at rest (1,000 nodes with 8 workers each, 10,000 models, 2,000
instances) and times single ticks of control (``policy/control/tick.py``) in this process, without
bus and database. Each timed tick has one change and nothing else; the next one starts from the
cluster at rest again, a quarter of a second later. ``KINDS`` lists the changes.

A crowded cluster is one without room: four of five instances are busy, models of the others are
pinned, other devices are too small.

Prints one JSON document in the form of ``bench/results``: for each kind median and 99th percentile
of each run, by the clock and (``cpu``) of processor time, which other processes do not add to, and
the most objects that a tick looked at.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cold_start import machine
from control_live import NOT_RECORDED, measurements
from control_system import LiveSize

from pilotlight.common.clock import SystemClock
from pilotlight.policy.control.focus import Focus, Visited
from pilotlight.policy.control.testing import LargeCluster, Size
from pilotlight.scheduler.rules import rules_of
from pilotlight.scheduler.settings import SchedulerSettings

Change = Callable[[LargeCluster, int], Focus | None]
PARTS = ("live", "ticks")
REFUSED = 100
LONG_S = 100.0
"""Older than the patience of any model."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of tick."""

    what: str
    change: Change
    crowded: bool = False
    owed: bool = False
    """Busy instances have not served for long enough to make room."""
    refused: int = 0
    """Models for which requests have waited for long before, in vain."""
    ticks: int = 200
    """At most."""


def _loaded(cluster: LargeCluster, index: int) -> Focus:
    worker_id = cluster.load(index * 13)
    cluster.carry_out(cluster.tick(Focus(workers=frozenset({worker_id}))))
    return cluster.loaded(worker_id)


KINDS: dict[str, Kind] = {
    "nothing": Kind(
        what="nothing is new; some holds are repeated", change=lambda cluster, index: Focus()
    ),
    "report": Kind(
        what="a worker reports that a request has come or ended",
        change=lambda cluster, index: cluster.report(index * 7),
    ),
    "row": Kind(
        what="the row of an instance has changed",
        change=lambda cluster, index: cluster.move(index * 11),
    ),
    "demand": Kind(
        what="a request waits for a cold model, and a start is placed",
        change=lambda cluster, index: cluster.ask(index * 13),
    ),
    "demand_burst": Kind(
        what=f"requests wait for {REFUSED} cold models at once, and the first few starts are placed",
        change=lambda cluster, index: cluster.ask(index * 13, count=REFUSED),
    ),
    "loaded": Kind(what="an instance becomes ready", change=_loaded),
    "worker_dies": Kind(
        what="a worker with an instance is dead",
        change=lambda cluster, index: cluster.die(index * 7),
    ),
    "node_drains": Kind(
        what="an operator wants a node with 8 workers to be empty",
        change=lambda cluster, index: cluster.drain(index * 7),
    ),
    "registered": Kind(
        what="a model is registered", change=lambda cluster, index: cluster.register(index)
    ),
    "crowded_demand": Kind(
        what="a request waits for a cold model, and there is no room",
        change=lambda cluster, index: cluster.ask(index * 13),
        crowded=True,
    ),
    "crowded_makes_way": Kind(
        what="a model has waited for longer than its patience, and one of the busy instances makes room",
        change=lambda cluster, index: cluster.ask(index * 13, age_s=LONG_S),
        crowded=True,
    ),
    "crowded_waits": Kind(
        what="a model has waited for longer than its patience, no busy instance may make room; nothing is new",
        change=lambda cluster, index: Focus(),
        crowded=True,
        owed=True,
        refused=1,
    ),
    "crowded_waits_report": Kind(
        what="the same, and a worker reports",
        change=lambda cluster, index: cluster.report(index * 7),
        crowded=True,
        owed=True,
        refused=1,
    ),
    "crowded_many_wait": Kind(
        what=f"the same with {REFUSED} such models; nothing is new",
        change=lambda cluster, index: Focus(),
        crowded=True,
        owed=True,
        refused=REFUSED,
    ),
    "crowded_many_wait_report": Kind(
        what=f"{REFUSED} such models, and a worker reports: all of them are tried again",
        change=lambda cluster, index: cluster.report(index * 7),
        crowded=True,
        owed=True,
        refused=REFUSED,
    ),
    "heartbeats": Kind(
        what="all workers and nodes report what they did before",
        change=lambda cluster, index: cluster.report_all(),
        ticks=10,
    ),
    "everything": Kind(
        what="a tick that looks at everything, as the first of a term does",
        change=lambda cluster, index: None,
        ticks=5,
    ),
}


@dataclass
class Taken:
    """What ticks took, in milliseconds."""

    wall_ms: list[float] = field(default_factory=list[float])
    cpu_ms: list[float] = field(default_factory=list[float])
    visited: list[Visited] = field(default_factory=list[Visited])

    def figures(self) -> dict[str, float]:
        """Medians and 99th percentiles."""
        return {
            "p50_ms": statistics.median(self.wall_ms),
            "p99_ms": _p99(self.wall_ms),
            "cpu_p50_ms": statistics.median(self.cpu_ms),
            "cpu_p99_ms": _p99(self.cpu_ms),
        }

    def most(self) -> dict[str, int]:
        """The most that a tick looked at."""
        return max((asdict(one) for one in self.visited), key=lambda one: sum(one.values()))


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def clusters(size: Size) -> dict[tuple[bool, bool], LargeCluster]:
    """With room; crowded; crowded, and all instances are owed service. Starts are chosen as the
    scheduler does by default.
    """
    rules = LargeCluster(Size(nodes=1, workers_per_node=1, models=1, instances=1)).rules
    rules = replace(rules, scheme=rules_of(SchedulerSettings(), 0.0).scheme)
    crowded = LargeCluster(size, rules=rules)
    owed = crowded.kept()
    crowded.crowd()
    owed.crowd(load_s=1000.0)
    return {
        (False, False): LargeCluster(size, rules=rules),
        (True, False): crowded,
        (True, True): owed,
    }


def take(at_rest: LargeCluster, kind: Kind, ticks: int) -> Taken:
    """Ticks with one change each."""
    clock, taken, at_rest = SystemClock(), Taken(), at_rest.kept()
    if kind.refused:
        at_rest.ask(0, count=kind.refused, age_s=LONG_S)
    for _ in range(20 if kind.refused else 1):
        at_rest.carry_out(at_rest.tick())
    for index in range(ticks):
        cluster = at_rest.kept()
        changed = kind.change(cluster, index)
        gc.collect(1)  # The copy of the cluster is not the tick's garbage.
        began_s, cpu_s = clock.monotonic_s(), time.process_time()
        plan = cluster.tick(changed)
        taken.cpu_ms.append((time.process_time() - cpu_s) * 1000)
        taken.wall_ms.append((clock.monotonic_s() - began_s) * 1000)
        taken.visited.append(plan.visited)
        at_rest.carry_out(at_rest.tick())
    return taken


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8, help="of each node")
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--instances", type=int, default=2000)
    parser.add_argument("--ticks", type=int, default=200, help="of each kind and run, at most")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--starts-per-s", type=float, default=20.0, help="of the live part")
    parser.add_argument("--players", type=int, default=2, help="processes that play nodes")
    parser.add_argument("--rest-s", type=float, default=20.0, help="of the live part")
    parser.add_argument("--load-s", type=float, default=40.0, help="of the live part")
    parser.add_argument(
        "--settle-s", type=float, default=120.0, help="to come to rest in, at most; the live part"
    )
    parser.add_argument("--out", type=Path, help="a file for the document, written after each part")
    parser.add_argument(
        "--commit",
        default=commit(),
        help="hash and date, where this is no checkout: 'abc1234 2026-01-31'",
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    asked = parser.parse_args()
    size = Size(
        nodes=asked.nodes,
        workers_per_node=asked.workers,
        models=asked.models,
        instances=asked.instances,
    )
    said = where(asked)
    found: list[dict[str, Any]] = []
    if "live" in asked.parts:
        live = LiveSize(
            nodes=asked.nodes,
            workers_per_node=asked.workers,
            models=asked.models,
            starts_per_s=asked.starts_per_s,
            players=asked.players,
            rest_s=asked.rest_s,
            load_s=asked.load_s,
            settle_s=asked.settle_s,
        )
        found += measurements(live, said)
        _write(asked.out, size, found)
    if "ticks" in asked.parts:
        found += _ticks(asked, size, said)
        _write(asked.out, size, found)
    print(_document(size, found))


def _document(size: Size, found: list[dict[str, Any]], name: str = "control") -> str:
    document = {"benchmark": name, "size": asdict(size), "measurements": found}
    return json.dumps(document, indent=1)


def _write(file: Path | None, size: Size, found: list[dict[str, Any]]) -> None:
    if file is not None:
        file.write_text(_document(size, found, file.stem))


def _ticks(asked: argparse.Namespace, size: Size, said: dict[str, str]) -> list[dict[str, Any]]:
    """Single ticks, with one change each."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in asked.kinds}
    looked: dict[str, dict[str, int]] = {}
    for _ in range(asked.runs):
        made = clusters(size)
        gc.collect()
        for name in asked.kinds:
            kind = KINDS[name]
            taken = take(made[kind.crowded, kind.owed], kind, min(kind.ticks, asked.ticks))
            runs[name].append(taken.figures())
            looked[name] = taken.most()
    return [
        {
            "what": f"{name}: {KINDS[name].what}",
            **said,
            "unit": "ms",
            "samples": {figure: [round(run[figure], 3) for run in each] for figure in each[0]},
            "medians": {
                figure: round(statistics.median(run[figure] for run in each), 3)
                for figure in each[0]
            },
            "looked_at": looked[name],
        }
        for name, each in runs.items()
    ]


def commit() -> str:
    """Hash and date of this checkout; empty where it is none."""
    command = ["git", "log", "-1", "--abbrev=7", "--format=%h %cs"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def where(asked: argparse.Namespace) -> dict[str, str]:
    """What ``bench/results`` says of each measurement: on what, when, from which commit."""
    on = machine()
    changed, _, changed_date = asked.commit.partition(" ")
    return {
        "command": f"make bench-control PARTS={' '.join(asked.parts)}",
        "machine": f"{on['cores']} cores ({on['cpu']}), {on['memory_gib']} GiB, Linux {on['kernel']}, Python {on['python']}",
        "load": f"load average {os.getloadavg()[1]:.0f}",
        "commit": changed or NOT_RECORDED,
        "commit_date": changed_date or NOT_RECORDED,
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
