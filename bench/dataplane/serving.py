"""Serving beside a chain on the same link: part of ``make bench-dataplane``.

Four network namespaces behind links of ``--rate`` (``tc tbf``, both ways). A pipeline of two
stages, whose activations go over TCP, decodes ``--requests`` requests without a pause; a chain
brings a model of ``--mib`` MiB from one node to another::

    beside     node 0: stage 0, the chain's source     activations and parameters leave node 0 by the same link, in the same direction,
               node 1: stage 1, the chain's receiver   and come to node 1 by the same link; sampled tokens go the other way
    elsewhere  nodes 0 and 1: the stages               the control: the same work for the processors, and nothing on the stages' links
               nodes 2 and 3: the chain
    alone      nodes 0 and 1: the stages               no chain, for --seconds

The kinds take turns, back and forth; each is measured in every round while the chain is under way.
Time per output token (TPOT): a request's last token of that time minus its first, by the tokens
between; of all requests the median.

A stage stands in for a device: for each batch it waits as long as one would compute
(``--device-ms``), and what a chain takes of the host's processors is not taken from it. With
``--engine`` it is our engine on the CPU, one thread each, and it is: the control tells how much.

Prints one JSON document: medians over the rounds, the floor, and every single figure. Whatever else
runs on the machine disturbs it: each run says how busy the processors were.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from bare_loader import SHARED_MEMORY, floor, machine, make_model, record_manifest
from chain import serve_node
from children import Child
from netns import Host, network
from stages import STAGES, serve_stage

from pilotlight.common.clock import SystemClock
from pilotlight.common.telemetry import configure_logging
from pilotlight.dataplane.bandwidth import parse_bandwidth

FLOOR_RATIO = 1.10
CLOCK = SystemClock()
CHAINS: dict[str, tuple[int, int] | None] = {"alone": None, "beside": (0, 1), "elsewhere": (2, 3)}
"""Source and receiver of each kind."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    hosts: list[Host]
    lead: Child
    folder: Path
    log: IO[bytes]
    options: argparse.Namespace

    def measure(self, kind: str, run: int) -> dict[str, Any]:
        """One run of a kind, with fresh loaders."""
        with ExitStack() as stack:
            chain = CHAINS[kind]
            receiver = self._receiver(chain, stack) if chain else None
            self.lead.tell("begin", run=run, requests=self.options.requests)
            self.lead.heard()
            busy, began_s = processor_times(), CLOCK.monotonic_s()
            fetched: dict[str, Any] = {}
            if receiver is not None:
                receiver.tell("fetch")
                fetched = receiver.heard()
            else:
                self.lead.tell("wait", seconds=self.options.seconds)
                self.lead.heard()
            ended_s, now_busy = CLOCK.monotonic_s(), processor_times()
            self.lead.tell("end")
            times = self.lead.heard()["times"]
        return {
            **tokens_of([[at for at in of_one if began_s <= at <= ended_s] for of_one in times]),
            "seconds": round(ended_s - began_s, 3),
            "processors_busy": round((now_busy[0] - busy[0]) / max(1e-9, now_busy[1] - busy[1]), 3),
            **({"receiver_cpu_s": fetched["cpu_s"]} if fetched else {}),
        }

    def _receiver(self, chain: tuple[int, int], stack: ExitStack) -> Child:
        """The chain's two loaders; the receiver, which has met the source."""
        children: list[Child] = []
        for index in chain:
            arguments = [
                "--node",
                str(index),
                "--folder",
                str(self.folder),
                *(["--source"] if index == chain[0] else []),
            ]
            children.append(
                Child(
                    f"node {index}",
                    self.hosts[index].inside(sys.executable, __file__, *arguments),
                    self.log,
                )
            )
            stack.callback(children[-1].stop)
        source, receiver = children
        for child in children:
            child.heard()
        source.tell("fetch")
        receiver.tell("follow", upstreams=[chain[0]])
        for child in children:
            child.heard()
        return receiver


def tokens_of(times: list[list[float]]) -> dict[str, Any]:
    """What the times of requests' tokens say, in milliseconds."""
    gaps = sorted((later - at) * 1000 for of_one in times for at, later in pairwise(of_one))
    each = [(of_one[-1] - of_one[0]) * 1000 / (len(of_one) - 1) for of_one in times]
    return {
        "tpot_ms": round(statistics.median(each), 2),
        "gap_p50_ms": round(statistics.median(gaps), 2),
        "gap_p95_ms": round(gaps[int(0.95 * len(gaps))], 2),
        "tokens": len(gaps),
    }


def processor_times() -> tuple[float, float]:
    """Of all processors together: busy, and in all; in ticks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))


def report(
    runs: dict[str, list[dict[str, Any]]], size_bytes: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Medians over the rounds, and what a chain costs."""
    medians = {
        kind: {name: round(statistics.median(run[name] for run in found), 3) for name in found[0]}
        for kind, found in runs.items()
    }
    ideal_s = size_bytes / (parse_bandwidth(options.rate) or float("inf"))
    tpot = {kind: median["tpot_ms"] for kind, median in medians.items()}
    return {
        "machine": machine(),
        "bytes": size_bytes,
        "rate": options.rate,
        "requests": options.requests,
        "stages": "our engine on the CPU"
        if options.engine
        else f"stand-ins for devices, {options.device_ms:g} ms a batch",
        "direction": "activations and parameters from node 0 to node 1; sampled tokens from node 1 to node 0",
        "medians": medians,
        "share_of_the_link": {
            kind: round(ideal_s / medians[kind]["seconds"], 3) for kind in ("beside", "elsewhere")
        },
        "tpot": {
            "beside the chain, of alone": round(tpot["beside"] / tpot["alone"], 3),
            "the chain elsewhere, of alone (processors)": round(
                tpot["elsewhere"] / tpot["alone"], 3
            ),
            "beside the chain, of the chain elsewhere (link)": round(
                tpot["beside"] / tpot["elsewhere"], 3
            ),
            "each pair, beside of alone": [
                round(with_it["tpot_ms"] / without["tpot_ms"], 3)
                for with_it, without in zip(runs["beside"], runs["alone"], strict=True)
            ],
        },
        "floors": {
            "TPOT beside a chain, of alone": floor(
                round(tpot["beside"] / tpot["alone"], 3), at_most=FLOOR_RATIO
            )
        },
        "runs": runs,
    }


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=int, default=128, help="size of the model that the chain brings"
    )
    parser.add_argument("--rate", default="200mbit", help="of every link, as tc takes it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="that are decoded at once")
    parser.add_argument(
        "--device-ms", type=float, default=10.0, help="that a stage takes for a batch"
    )
    parser.add_argument(
        "--engine", action="store_true", help="compute with our engine on the CPU instead"
    )
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="for which the pipeline is measured alone"
    )
    parser.add_argument(
        "--log", type=Path, default=Path(os.devnull), help="where the processes' logs go"
    )
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure all kinds in turns."""
    options = parse_options()
    if options.stage is not None:
        asyncio.run(
            serve_stage(options.stage, None if options.engine else options.device_ms / 1000)
        )
        return
    if options.node is not None:
        configure_logging("bench")
        asyncio.run(serve_node(options.node, options.folder, has_source=options.source))
        return
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in CHAINS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        make_model(folder, options.mib)
        size_bytes = record_manifest(folder)
        hosts = stack.enter_context(network([options.rate] * 4))
        log = stack.enter_context(options.log.open("wb"))
        stages: list[Child] = []
        for index in range(len(STAGES)):
            device = ("--engine",) if options.engine else ("--device-ms", str(options.device_ms))
            command = hosts[index].inside(sys.executable, __file__, "--stage", str(index), *device)
            stages.append(Child(f"stage {index}", command, log))
            stack.callback(stages[-1].stop)
        for stage in stages:
            stage.heard()
        for stage in stages:
            stage.tell("join")
        for stage in stages:
            stage.heard()
        bench = Bench(hosts, stages[0], folder, log, options)
        for number in range(options.rounds):
            for kind in CHAINS if number % 2 == 0 else reversed(CHAINS):
                found = bench.measure(kind, sum(map(len, runs.values())))
                runs[kind].append(found)
                print(f"{kind}: {found}", file=sys.stderr)
    print(json.dumps(report(runs, size_bytes, options), indent=2))


if __name__ == "__main__":
    main()
