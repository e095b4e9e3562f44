"""A model from one node to 1, 3 and 7 others, by a chain and by each asking the source: part of ``make bench-dataplane``.

Every node is a network namespace behind a link of ``--rate`` (``tc tbf``, both ways), joined by a bridge; in each runs one process with
the loader's own host pool, fetch core and links. The namespaces are made here and removed again, which needs root. The receivers have
no other source: a byte that the chain does not bring does not come.

Prints one JSON document: the machine, medians, the floors, and every single figure. Times are from the word to fetch until the
last receiver has all of the model, verified.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from fetch import Bare, Quiet, machine, make_model

from pilotlight.checkpoint.checkpoint import read_checkpoint, read_chunk
from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.checkpoint.manifest import Manifest, decode, encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.clock import SystemClock
from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.errors import SourceUnavailable
from pilotlight.common.faults import Faults
from pilotlight.common.messages.hold import Peer
from pilotlight.common.telemetry import configure_logging
from pilotlight.dataplane.chunk_fetch import Distrusted
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.lanes import LaneLimits, Lanes
from pilotlight.dataplane.link.handshake import PURPOSE, Identity
from pilotlight.dataplane.link.offers import Offers
from pilotlight.dataplane.link.peers import Peers
from pilotlight.dataplane.link.server import LinkServer
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.links import Links, parse_bandwidth
from pilotlight.dataplane.model_fetch import FetchTools
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.readers import Readers
from pilotlight.dataplane.source_origin import ModelSource, SourceOrigin
from pilotlight.policy.types import Digest, FetchPriority, InstanceId, Model, ModelName, NodeId, ScalingBounds, Slo

MIB = 1 << 20
KEY = ClusterKey(b"the key of the benchmark", PURPOSE)
NETWORK = "10.231.7"
PORT = 9777
MAX_NODES = 8
FLOOR_RATIO = 1.12
FLOOR_SHARE = 0.92
READY_S = 60.0


def run(*command: str) -> None:
    """A command that must not fail."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def namespaces(rate: str) -> Generator[list[str]]:
    """Nodes' namespaces, each behind a link of this rate in both directions."""
    prefix = f"plb{os.getpid()}"
    bridge, names = f"{prefix}-br", [f"{prefix}-{index}" for index in range(MAX_NODES)]
    shape = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
    try:
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "br0", "up")
        for index, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{index}", "netns", bridge)
            run("ip", "-n", bridge, "link", "set", f"p{index}", "master", "br0")
            run("ip", "-n", bridge, "link", "set", f"p{index}", "up")
            run("ip", "-n", name, "addr", "add", f"{address(index)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
            run("tc", "-n", bridge, "qdisc", "add", "dev", f"p{index}", *shape)
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def address(index: int) -> str:
    """Of a node."""
    return f"{NETWORK}.{index + 1}"


def peer(index: int) -> Peer:
    """A node, as the others know it."""
    return Peer(node_id=NodeId(f"n{index}"), host=address(index), port=PORT)


def model_of(folder: Path, manifest: Manifest) -> Model:
    """The model of the benchmark, as it is registered."""
    return Model(
        name=ModelName("bench"),
        uri=folder.as_uri(),
        revision=None,
        source_version="",
        digest=manifest.digest(),
        text_digest=Digest("0" * 64),
        dtype=manifest.spec.dtype,
        spec=manifest.spec,
        slo=Slo(ttft_ms=1000, tpot_ms=100),
        scaling=ScalingBounds(),
    )


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

    def __init__(self, index: int, folder: Path, pool_path: Path) -> None:
        clock, quiet = SystemClock(), Quiet()
        self._folder = folder
        self._manifest = decode((folder / "manifest.json").read_bytes())
        self.model = model_of(folder, self._manifest)
        self.traffic = Traffic()
        self._clock = clock
        self._pool = HostPool.open(pool_path, self._size_bytes + 64 * MIB, clock)
        me = Identity(NodeId(f"n{index}"), KEY)
        self.peers = Peers(me, LinkThread("links-in"), clock, self.traffic, 10.0, lambda _: FetchPriority.COLD_START)
        tools = FetchTools(
            pool=self._pool,
            readers=Readers(16, 10.0),
            manifests=Bare(self._manifest),
            open_source=self._open_source if index == 0 else refuse,
            lanes=Lanes(LaneLimits(least=4, most=16), Links(None, clock), clock),
            distrusted=Distrusted(clock),
            faults=Faults.parse(""),
            clock=clock,
            process="bench",
            nearby=(self.peers,),
        )
        self._copies = HostCopies(tools, quiet, quiet)
        offers = Offers(pool=self._pool, copies=self._copies, moved=tools.moved, clock=clock)
        self._server = LinkServer(me, (address(index), PORT), offers, LinkThread("links-out"), clock, self.traffic)

    @property
    def _size_bytes(self) -> int:
        return sum(part.image_bytes for part in self._manifest.parts)

    def _open_source(self, model: Model, manifest: Manifest) -> ModelSource:
        return SourceOrigin(FolderSource(self._folder), manifest, model.uri)

    async def start(self) -> None:
        """Listen."""
        await self.peers.start()
        await self._server.start()

    async def fetch(self) -> dict[str, float]:
        """Bring all of the model here."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        holder = self._copies.hold(self.model, range(len(self._manifest.parts)), InstanceId("bench"), leased=True)
        async for _ in self._copies.ready_parts(holder):
            pass
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"end_s": self._clock.monotonic_s(), "cpu_s": round(cpu_s, 3), "received_bytes": self.traffic.received_bytes}

    async def stop(self) -> None:
        """Leave nothing behind."""
        await self._server.stop()
        await self.peers.stop()
        await self._copies.stop()
        self._pool.close(remove=True)


def refuse(model: Model, manifest: Manifest) -> ModelSource:
    """What a receiver's source is."""
    raise SourceUnavailable("a receiver has no source but the other nodes")


async def serve_node(index: int, folder: Path) -> None:
    """One node: obeys a line of its input at a time, and answers each with one."""
    node = Node(index, folder, Path(f"/dev/shm/pilotlight-bench-{os.getpid()}.pool"))
    try:
        await node.start()
        answer: dict[str, Any] = {}
        while True:
            print(json.dumps(answer), flush=True)
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line.strip():
                return
            order = json.loads(line)
            answer = {}
            if order["do"] == "follow":
                node.peers.follow(node.model.digest, [peer(upstream) for upstream in order["upstreams"]])
                async with asyncio.timeout(READY_S):
                    while any(state != "up" for state in node.peers.states.values()):
                        await asyncio.to_thread(os.sched_yield)
            elif order["do"] == "fetch":
                answer = await node.fetch()
            elif order["do"] == "sent":
                answer = {"sent_bytes": node.traffic.sent_bytes}
    finally:
        await node.stop()


class Process:
    """A node, seen from outside."""

    def __init__(self, index: int, namespace: str, folder: Path, log: IO[bytes]) -> None:
        command = ["ip", "netns", "exec", namespace, sys.executable, __file__, "--node", str(index), "--folder", str(folder)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.index = index

    def tell(self, do: str, **more: Any) -> None:
        """Give it an order; ``heard`` waits for the answer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._child.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """Its next answer."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"node {self.index} ended; see its log")
        return json.loads(line)

    def stop(self) -> None:
        """End it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def measure(receivers: int, *, chain: bool, names: list[str], folder: Path, log: IO[bytes]) -> dict[str, Any]:
    """One run with fresh processes."""
    with ExitStack() as stack:
        nodes = [Process(index, names[index], folder, log) for index in range(receivers + 1)]
        for node in nodes:
            stack.callback(node.stop)
        for node in nodes:
            node.heard()
        nodes[0].tell("fetch")
        nodes[0].heard()
        for node in nodes[1:]:
            node.tell("follow", upstreams=list(range(node.index - 1, -1, -1)) if chain else [0])
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
        }


def prepare(folder: Path, mib: int) -> int:
    """Make the model and its manifest with every digest recorded; its bytes in memory."""
    make_model(folder, mib)
    source = FolderSource(folder)
    manifest = read_checkpoint(source).manifest
    digests = {
        (p, c): chunk_digest(read_chunk(source, manifest, chunk))
        for p, part in enumerate(manifest.parts)
        for c, chunk in enumerate(part.chunks)
    }
    (folder / "manifest.json").write_bytes(encode(manifest.with_digests(digests)))
    return sum(part.image_bytes for part in manifest.parts)


def report(runs: dict[str, list[dict[str, Any]]], size_bytes: int, rate: str) -> dict[str, Any]:
    """Medians, and what they are of the link and of one receiver."""
    link_bytes_per_s = parse_bandwidth(rate) or 0.0
    ideal_s = size_bytes / link_bytes_per_s
    medians = {name: round(statistics.median(run["seconds"] for run in found), 3) for name, found in runs.items()}
    shares = {name: round(ideal_s / seconds, 3) for name, seconds in medians.items()}
    floors: dict[str, Any] = {}
    if {"chain 1", "chain 7"} <= medians.keys():
        ratio = round(medians["chain 7"] / medians["chain 1"], 3)
        floors = {"chain 7 / chain 1": ratio, "at most": FLOOR_RATIO, "of the link": shares["chain 1"], "at least": FLOOR_SHARE}
        floors["met"] = ratio <= FLOOR_RATIO and shares["chain 1"] >= FLOOR_SHARE
    cpu = {
        name: round(statistics.median(cpu_s for run in found for cpu_s in run["cpu_s"]) / size_bytes * 2**30, 3)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="size of the model")
    parser.add_argument("--rate", default="200mbit", help="of every link, as tc takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--receivers", default="1,3,7")
    parser.add_argument("--each", action=argparse.BooleanOptionalAction, default=True, help="also with each asking the source")
    parser.add_argument("--log", type=Path, help="where the nodes' logs go")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure chains and stars of every size."""
    options = parse_options()
    if options.node is not None:
        configure_logging("bench")
        asyncio.run(serve_node(options.node, options.folder))
        return
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    # Told to end, it leaves no namespaces behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    counts = [int(count) for count in options.receivers.split(",")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        size_bytes = prepare(folder, options.mib)
        names = stack.enter_context(namespaces(options.rate))
        log = stack.enter_context((options.log or Path(os.devnull)).open("wb"))
        runs: dict[str, list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            shapes = (True, False) if options.each else (True,)
            plans = [(count, chain) for count in counts for chain in shapes if chain or count > 1]
            for count, chain in plans if number % 2 == 0 else reversed(plans):
                name = f"{'chain' if chain else 'each from the source'} {count}"
                found = measure(count, chain=chain, names=names, folder=folder, log=log)
                runs.setdefault(name, []).append(found)
                print(f"{name}: {found['seconds']:.2f} s, cpu {found['cpu_s']}", file=sys.stderr)
    print(json.dumps(report(runs, size_bytes, options.rate), indent=2))


if __name__ == "__main__":
    main()
