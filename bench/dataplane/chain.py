"""A model from one node to 1, 3 and 7 others, by a chain and by each asking the source: part of
``make bench-dataplane``.

Every node is a network namespace behind a link of ``--rate`` (``tc tbf``, both ways), joined by a
bridge; in each runs one process with the loader's own host pool, fetch core and links. The
namespaces are made here and removed again, which needs root. The receivers have no other source: a
byte that the chain does not bring does not come.

Prints one JSON document: the machine, medians, the floors, and every single figure. Times are from
the word to fetch until the last receiver has all of the model, verified.
"""

import argparse
import asyncio
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
    STALL_TIMEOUT_S,
    Quiet,
    bytes_of,
    cpu_s,
    fetch_tools,
    floor,
    machine,
    make_model,
    model_of,
    record_manifest,
    recorded_manifest,
)
from children import Child, obey
from netns import Host, address, network

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.clock import SystemClock
from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.errors import SourceUnavailable
from pilotlight.common.handshake import LINK_PURPOSE, Identity
from pilotlight.common.messages.hold import Peer
from pilotlight.common.telemetry import configure_logging
from pilotlight.dataplane.bandwidth import parse_bandwidth
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.link.offers import Offers
from pilotlight.dataplane.link.peers import Peers
from pilotlight.dataplane.link.server import LinkServer
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.source_origin import ModelSource, SourceOrigin
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.model import Model

KEY = ClusterKey(b"the key of the benchmark", LINK_PURPOSE)
PORT = 9777
FLOOR_RATIO = 1.12
FLOOR_SHARE = 0.92
READY_S = 60.0


def peer(index: int) -> Peer:
    """A node, as the others know it."""
    return Peer(node_id=NodeId(f"n{index}"), host=address(index), port=PORT)


class Traffic:
    """A node's ``LinkObserver``."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0

    def on_sent(self, node_id: NodeId, size_bytes: int) -> None:
        self.sent_bytes += size_bytes

    def on_received(self, node_id: NodeId, size_bytes: int) -> None:
        self.received_bytes += size_bytes

    def on_refused(self) -> None:
        raise AssertionError("the nodes of the benchmark know each other")


class Node:
    """Everything of a loader that a chain needs, and nothing else."""

    def __init__(self, index: int, folder: Path, pool_path: Path, *, has_source: bool) -> None:
        clock, quiet = SystemClock(), Quiet()
        self._folder = folder
        self._manifest = recorded_manifest(folder)
        self.model = model_of(folder.as_uri(), self._manifest)
        self.traffic = Traffic()
        self._clock = clock
        self._pool = HostPool.open(pool_path, bytes_of(self._manifest) + 64 * MIB, clock)
        me = Identity(NodeId(f"n{index}"), KEY)
        self.peers = Peers(
            me,
            LinkThread("links-in"),
            clock,
            self.traffic,
            STALL_TIMEOUT_S,
            lambda _: FetchPriority.COLD_START,
        )
        open_source = self._open_source if has_source else refuse
        tools = fetch_tools(self._pool, self._manifest, open_source, nearby=(self.peers,))
        self._copies = HostCopies(tools, quiet, quiet)
        offers = Offers(pool=self._pool, copies=self._copies, moved=tools.moved, clock=clock)
        self._server = LinkServer(
            me, (address(index), PORT), offers, LinkThread("links-out"), clock, self.traffic
        )

    def _open_source(self, model: Model, manifest: Manifest) -> ModelSource:
        return SourceOrigin(FolderSource(self._folder), manifest, model.uri)

    async def start(self) -> None:
        """Listen."""
        await self.peers.start()
        await self._server.start()

    async def follow(self, order: dict[str, Any]) -> dict[str, Any]:
        """Meet those that come before it."""
        self.peers.follow(self.model.digest, [peer(upstream) for upstream in order["upstreams"]])
        async with asyncio.timeout(READY_S):
            while any(state != "up" for state in self.peers.states.values()):
                await asyncio.to_thread(os.sched_yield)
        return {}

    async def fetch(self, _: dict[str, Any]) -> dict[str, Any]:
        """Bring all of the model here."""
        began_cpu_s = cpu_s()
        holder = self._copies.claim(
            self.model, range(len(self._manifest.parts)), InstanceId("bench"), leased=True
        )
        async for _ in self._copies.ready_parts(holder):
            pass
        used_s = round(cpu_s() - began_cpu_s, 3)
        return {
            "end_s": self._clock.monotonic_s(),
            "cpu_s": used_s,
            "received_bytes": self.traffic.received_bytes,
        }

    async def sent(self, _: dict[str, Any]) -> dict[str, Any]:
        """What it has given to others."""
        return {"sent_bytes": self.traffic.sent_bytes}

    async def stop(self) -> None:
        """Leave nothing behind."""
        await self._server.stop()
        await self.peers.stop()
        await self._copies.stop()
        self._pool.close(remove=True)


def refuse(model: Model, manifest: Manifest) -> ModelSource:
    """What a receiver's source is."""
    raise SourceUnavailable("a receiver has no source but the other nodes")


async def serve_node(index: int, folder: Path, *, has_source: bool) -> None:
    """One node; the model lies in a folder of shared memory, and so does its pool, which goes with
    it however the node ends.
    """
    node = Node(index, folder, folder / f"{os.getpid()}.pool", has_source=has_source)
    try:
        await node.start()
        await obey({"follow": node.follow, "fetch": node.fetch, "sent": node.sent})
    finally:
        await node.stop()


def measure(
    receivers: int, *, chain: bool, hosts: list[Host], folder: Path, log: IO[bytes]
) -> dict[str, Any]:
    """One run with fresh processes."""
    with ExitStack() as stack:
        nodes: list[Child] = []
        for index, host in enumerate(hosts[: receivers + 1]):
            command = host.inside(
                sys.executable, __file__, "--node", str(index), "--folder", str(folder)
            )
            nodes.append(stack.enter_context(Child(f"node {index}", command, log)))
        for node in nodes:
            node.heard()
        nodes[0].tell("fetch")
        nodes[0].heard()
        for index, node in enumerate(nodes[1:], 1):
            node.tell("follow", upstreams=list(range(index - 1, -1, -1)) if chain else [0])
        for node in nodes[1:]:
            node.heard()
        began_s = SystemClock().monotonic_s()
        for node in nodes[1:]:
            node.tell("fetch")
        ends = [node.heard() for node in nodes[1:]]
        nodes[0].tell("sent")
        return {
            "seconds": round(max(end["end_s"] for end in ends) - began_s, 3),
            "each_s": [round(end["end_s"] - began_s, 3) for end in ends],
            "cpu_s": [end["cpu_s"] for end in ends],
            "source_sent_bytes": nodes[0].heard()["sent_bytes"],
            "load_average": round(os.getloadavg()[0], 2),
        }


def report(runs: dict[str, list[dict[str, Any]]], size_bytes: int, rate: str) -> dict[str, Any]:
    """Medians, and what they are of the link and of one receiver."""
    ideal_s = size_bytes / (parse_bandwidth(rate) or float("inf"))
    medians = {
        name: round(statistics.median(run["seconds"] for run in found), 3)
        for name, found in runs.items()
    }
    shares = {name: round(ideal_s / seconds, 3) for name, seconds in medians.items()}
    floors: dict[str, Any] = {}
    if {"chain 1", "chain 7"} <= medians.keys():
        floors = {
            "time to 7 of time to 1": floor(
                round(medians["chain 7"] / medians["chain 1"], 3), at_most=FLOOR_RATIO
            ),
            "share of the link, to 1": floor(shares["chain 1"], at_least=FLOOR_SHARE),
        }
    cpu = {
        name: round(
            statistics.median(cpu_s for run in found for cpu_s in run["cpu_s"])
            / size_bytes
            * 2**30,
            3,
        )
        for name, found in runs.items()
    }
    return {
        "machine": machine(),
        "bytes": size_bytes,
        "rate": rate,
        "link_alone_s": round(ideal_s, 3),
        "median_s": medians,
        "share_of_the_link": shares,
        "receiver_cpu_s_per_gib": cpu,
        "floors": floors,
        "runs": runs,
    }


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=128, help="size of the model")
    parser.add_argument("--rate", default="200mbit", help="of every link, as tc takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--receivers", default="1,3,7")
    parser.add_argument(
        "--each",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also with each asking the source",
    )
    parser.add_argument(
        "--log", type=Path, default=Path(os.devnull), help="where the nodes' logs go"
    )
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure chains and stars of every size."""
    options = parse_options()
    if options.node is not None:
        configure_logging("bench")
        asyncio.run(serve_node(options.node, options.folder, has_source=options.node == 0))
        return
    counts = [int(count) for count in options.receivers.split(",")]
    runs: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        make_model(folder, options.mib)
        size_bytes = record_manifest(folder)
        hosts = stack.enter_context(network([options.rate] * (max(counts) + 1)))
        log = stack.enter_context(options.log.open("wb"))
        shapes = (True, False) if options.each else (True,)
        plans = [(count, chain) for count in counts for chain in shapes if chain or count > 1]
        for number in range(options.rounds):
            for count, chain in plans if number % 2 == 0 else reversed(plans):
                name = f"{'chain' if chain else 'each from the source'} {count}"
                found = measure(count, chain=chain, hosts=hosts, folder=folder, log=log)
                runs.setdefault(name, []).append(found)
                print(f"{name}: {found['seconds']:.2f} s, cpu {found['cpu_s']}", file=sys.stderr)
    print(json.dumps(report(runs, size_bytes, options.rate), indent=2))


if __name__ == "__main__":
    main()
