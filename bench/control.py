"""What a decision costs in a large cluster: ``make bench-control``.

Builds the facts of a cluster at rest (1,000 nodes with 8 workers each, 10,000 models, 2,000
instances) and times single ticks of control (``policy/control/tick.py``) in this process, without
bus and database:

* ``nothing``: nothing is new; some holds are repeated, as in every tick;
* ``report``: one worker reports that a request has come or ended;
* ``row``: the row of one instance has changed;
* ``demand``: a request waits for a model that no instance serves, so that a start is placed;
* ``heartbeats``: all workers and nodes report what they did before;
* ``everything``: a tick that looks at everything, as the first one of a term does.

Prints one JSON document: the machine, for each kind the median over the runs of median and 99th
percentile, by the clock and (``cpu_``) of processor time, which other processes do not add to, and
the most objects that a tick looked at.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cold_start import machine

from pilotlight.common.clock import SystemClock
from pilotlight.policy.control.focus import Focus, Visited
from pilotlight.policy.control.testing import LargeCluster, Size

Change = Callable[[LargeCluster, int], Focus | None]
KINDS: dict[str, Change] = {
    "nothing": lambda cluster, index: Focus(),
    "report": lambda cluster, index: cluster.report(index * 7),
    "row": lambda cluster, index: cluster.move(index * 11),
    "demand": lambda cluster, index: cluster.ask(index * 13),
    "heartbeats": lambda cluster, index: cluster.report_all(),
    "everything": lambda cluster, index: None,
}


FEW = {"heartbeats": 10, "everything": 5}
"""Ticks of kinds that take long."""


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


def take(cluster: LargeCluster, change: Change, ticks: int) -> Taken:
    """Ticks with one change each."""
    clock, taken = SystemClock(), Taken()
    for index in range(ticks):
        changed = change(cluster, index)
        began_s, cpu_s = clock.monotonic_s(), time.process_time()
        plan = cluster.tick(changed)
        taken.cpu_ms.append((time.process_time() - cpu_s) * 1000)
        taken.wall_ms.append((clock.monotonic_s() - began_s) * 1000)
        taken.visited.append(plan.visited)
        cluster.carry_out(plan)
        if cluster.demand:
            # The next one asks for another model: until then nothing waits.
            cluster.demand = ()
            cluster.carry_out(cluster.tick())
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
    parser.add_argument("--ticks", type=int, default=300, help="of each kind and run")
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    size = Size(
        nodes=asked.nodes,
        workers_per_node=asked.workers,
        models=asked.models,
        instances=asked.instances,
    )
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    looked: dict[str, dict[str, int]] = {}
    for _ in range(asked.runs):
        cluster = LargeCluster(size)
        gc.collect()
        for kind, change in KINDS.items():
            taken = take(cluster, change, FEW.get(kind, asked.ticks))
            runs[kind].append(taken.figures())
            looked[kind] = taken.most()
    figures: dict[str, Any] = {
        kind: {
            **{name: round(statistics.median(run[name] for run in each), 3) for name in each[0]},
            "looked_at": looked[kind],
        }
        for kind, each in runs.items()
    }
    print(
        json.dumps(
            {
                "machine": machine(),
                "size": asdict(size),
                "runs": asked.runs,
                "ticks": asked.ticks,
                "kinds": figures,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
