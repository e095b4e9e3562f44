"""One model by 1, 2 and 4 nodes that each fetch their range of its layers from one remote store:
part of ``make bench-dataplane``.

Every node is a network namespace behind a link of ``--rate``; the store, Ceph's S3 server, is one
without such a link, and so is the node that measures what the store gives. Each node is a process
with the loader's own host pool and fetch core, and the model's manifest with every digest: what is
counted as there is verified.

Prints one JSON document: the machine, medians, the floor, and every single figure. Times are from
the word to fetch until the last node has all of its layers.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from bare_loader import (
    MIB,
    SHARED_MEMORY,
    Quiet,
    bytes_of,
    cpu_s,
    fetch_tools,
    floor,
    machine,
    make_model,
    model_of,
    opener,
    record_manifest,
    recorded_manifest,
    sources_for,
)
from children import Child, obey
from netns import Host, network
from store import MODEL_URI, ceph, upload

from pilotlight.common.clock import SystemClock
from pilotlight.common.telemetry import configure_logging
from pilotlight.dataplane.bandwidth import parse_bandwidth
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Stage

NODES = (1, 2, 4)
REGION = "us-east-1"
FLOOR_RATIO = 0.30
FLOOR_STORE_MB_PER_S = 100.0


class Node:
    """Everything of a loader that a fetch needs."""

    def __init__(self, folder: Path, endpoint: str, pool_path: Path) -> None:
        """``folder`` holds the manifest; the bytes are at the endpoint."""
        clock, quiet = SystemClock(), Quiet()
        manifest = recorded_manifest(folder)
        self._clock = clock
        self._manifest = manifest
        self._model = model_of(MODEL_URI, manifest)
        self._pool = HostPool.open(pool_path, bytes_of(manifest) + 64 * MIB, clock)
        tools = fetch_tools(self._pool, manifest, opener(sources_for(MODEL_URI, endpoint)))
        self._copies = HostCopies(tools, quiet, quiet)

    async def fetch(self, order: dict[str, Any]) -> dict[str, Any]:
        """Bring the layers of a stage here, with embedding and head where they belong to it."""
        began_cpu_s, size_bytes = cpu_s(), 0
        parts = self._model.spec.parts_of(Stage(*order["layers"]))
        holder = self._copies.claim(self._model, parts, InstanceId("bench"), leased=True)
        async for ready in self._copies.ready_parts(holder):
            size_bytes += self._manifest.parts[ready.part].image_bytes
        return {
            "end_s": self._clock.monotonic_s(),
            "cpu_s": round(cpu_s() - began_cpu_s, 3),
            "bytes": size_bytes,
        }

    async def stop(self) -> None:
        """Leave nothing behind."""
        await self._copies.stop()
        self._pool.close(remove=True)


async def serve_node(folder: Path, endpoint: str) -> None:
    """One node."""
    node = Node(folder, endpoint, folder / f"{os.getpid()}.pool")
    try:
        await obey({"fetch": node.fetch})
    finally:
        await node.stop()


def serve_store(folder: Path, address: str) -> None:
    """The remote store. What it keeps lies in the model's folder, and goes with it."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store_bytes = (
            2 * sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) + 1024 * MIB
        )
        with ceph(Path(place), address, store_bytes) as endpoint:
            os.environ["AWS_REGION"] = REGION
            upload(folder, endpoint)
            record_manifest(folder, sources_for(MODEL_URI, endpoint).pin(MODEL_URI).source)
            environment = {
                name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            }

            async def where(_: dict[str, Any]) -> dict[str, Any]:
                return {"endpoint": endpoint, "environment": environment}

            asyncio.run(obey({"where": where}))


def layer_ranges(layers: int, nodes: int) -> list[tuple[int, int]]:
    """As even as it goes."""
    return list(itertools.pairwise(layers * number // nodes for number in range(nodes + 1)))


def measure(hosts: list[Host], folder: Path, endpoint: str, log: IO[bytes]) -> dict[str, Any]:
    """One run with a fresh process in each of these namespaces."""
    manifest = recorded_manifest(folder)
    with ExitStack() as stack:
        nodes: list[Child] = []
        for host in hosts:
            command = (sys.executable, __file__, "--node", endpoint, "--folder", str(folder))
            nodes.append(stack.enter_context(Child(host.name, host.inside(*command), log)))
        for node in nodes:
            node.heard()
        began_s = SystemClock().monotonic_s()
        for node, layers in zip(
            nodes, layer_ranges(manifest.spec.num_layers, len(nodes)), strict=True
        ):
            node.tell("fetch", layers=layers)
        ends = [node.heard() for node in nodes]
    if sum(end["bytes"] for end in ends) != bytes_of(manifest):
        raise SystemExit("the nodes do not have the whole model between them")
    return {
        "seconds": round(max(end["end_s"] for end in ends) - began_s, 3),
        "each_s": [round(end["end_s"] - began_s, 3) for end in ends],
        "each_bytes": [end["bytes"] for end in ends],
        "cpu_s": [end["cpu_s"] for end in ends],
        "load_average": round(os.getloadavg()[0], 2),
    }


def report(runs: dict[str, list[dict[str, Any]]], size_bytes: int, rate: str) -> dict[str, Any]:
    """Medians, and what they are of one node."""
    medians = {
        name: round(statistics.median(run["seconds"] for run in found), 3)
        for name, found in runs.items()
    }
    store_mb_per_s = round(size_bytes / medians.pop("store") / 1e6, 1)
    ratios = {name: round(seconds / medians["1"], 3) for name, seconds in medians.items()}
    return {
        "machine": machine(),
        "bytes": size_bytes,
        "rate": rate,
        "link_alone_s": round(size_bytes / (parse_bandwidth(rate) or float("inf")), 3),
        "store_mb_per_s": store_mb_per_s,
        "median_s": medians,
        "of_one_node": ratios,
        "floors": {
            "time of 4 nodes of one": floor(ratios["4"], at_most=FLOOR_RATIO),
            "MB/s of the store": floor(store_mb_per_s, at_least=FLOOR_STORE_MB_PER_S),
        },
        "runs": runs,
    }


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=384, help="size of the model")
    parser.add_argument("--rate", default="200mbit", help="of every node's link, as tc takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--log", type=Path, default=Path(os.devnull), help="where the nodes' logs go"
    )
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure every number of nodes."""
    options = parse_options()
    if options.store is not None:
        serve_store(options.folder, options.store)
        return
    if options.node is not None:
        configure_logging("bench")
        asyncio.run(serve_node(options.folder, options.node))
        return
    runs: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        make_model(folder, options.mib)
        *nodes, near, remote = stack.enter_context(
            network([*(options.rate for _ in range(max(NODES))), None, None])
        )
        log = stack.enter_context(options.log.open("wb"))
        command = (sys.executable, __file__, "--store", remote.address, "--folder", str(folder))
        store = stack.enter_context(Child("store", remote.inside(*command), log))
        store.heard()
        store.tell("where")
        where = store.heard()
        os.environ.update(where["environment"], AWS_REGION=REGION)
        size_bytes = bytes_of(recorded_manifest(folder))
        plans = {"store": [near]} | {str(count): nodes[:count] for count in NODES}
        for number in range(options.rounds):
            for name, hosts in plans.items() if number % 2 == 0 else reversed(plans.items()):
                found = measure(hosts, folder, where["endpoint"], log)
                runs.setdefault(name, []).append(found)
                print(f"{name}: {found['seconds']:.2f} s, cpu {found['cpu_s']}", file=sys.stderr)
    print(json.dumps(report(runs, size_bytes, options.rate), indent=2))


if __name__ == "__main__":
    main()
