"""One node's memory to another's on this host, over TCP and by NIXL, in turns: what
``PILOTLIGHT_LINK_TRANSPORT`` costs and gives.

``python bench/dataplane/transports.py --mib 512 --rounds 5``; ways that need NIXL are left out
where it is not installed. Each way has two processes of its own, with the loader's host pool, fetch
core and links; the receiver has no other source. Prints one JSON document: the machine, medians and
every figure. Times are from the word to fetch until all of the model is there and verified;
processor time is that of both nodes, the processes that read included.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bare_loader import (
    MIB,
    STALL_TIMEOUT_S,
    Quiet,
    bytes_of,
    fetch_tools,
    machine,
    make_model,
    model_of,
    record_manifest,
    recorded_manifest,
)
from chain import KEY, Traffic, refuse
from children import Child, obey

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.clock import SystemClock
from pilotlight.common.handshake import Identity
from pilotlight.common.messages.hold import Peer
from pilotlight.common.telemetry import configure_logging
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.link.nixl_agent import PACKAGES
from pilotlight.dataplane.link.nixl_process import NixlProcess, PoolMemory
from pilotlight.dataplane.link.offers import Offers
from pilotlight.dataplane.link.peers import Peers
from pilotlight.dataplane.link.server import LinkServer
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.source_origin import ModelSource, SourceOrigin
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.model import Model

WAYS = {"tcp": "", "nixl over tcp": "tcp", "nixl over shared memory": "sysv,posix,cma,self,tcp"}
"""By name, what UCX may use; empty: no NIXL."""
HOST = "127.0.0.1"
READY_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


class Node:
    """Everything of a loader that a link needs, and nothing else."""

    def __init__(self, name: str, folder: Path, pool_path: Path, *, by_nixl: bool) -> None:
        clock, quiet, threads = (
            SystemClock(),
            Quiet(),
            (LinkThread("links-in"), LinkThread("links-out")),
        )
        self._folder = folder
        self._manifest = recorded_manifest(folder)
        self._model = model_of(folder.as_uri(), self._manifest)
        self._clock = clock
        self._pool = HostPool.open(pool_path, bytes_of(self._manifest) + 64 * MIB, clock)
        me = Identity(NodeId(name), KEY)
        self._peers = Peers(
            me, threads[0], clock, Traffic(), STALL_TIMEOUT_S, lambda _: FetchPriority.COLD_START
        )
        open_source = self._open_source if name == "sender" else refuse
        tools = fetch_tools(self._pool, self._manifest, open_source, nearby=(self._peers,))
        self._copies = HostCopies(tools, quiet, quiet)
        offers = Offers(pool=self._pool, copies=self._copies, moved=tools.moved, clock=clock)
        self._nixl: NixlProcess | None = None
        if by_nixl:
            memory = PoolMemory(
                self._pool.descriptor,
                self._pool.geometry.data_offset,
                self._pool.geometry.file_bytes,
            )
            self._nixl = self._peers.memory = NixlProcess(memory, threads[0])
        self._server = LinkServer(
            me, (HOST, 0), offers, threads[1], clock, Traffic(), memory=self._nixl
        )
        self._thread = threads[0]

    def _open_source(self, model: Model, manifest: Manifest) -> ModelSource:
        return SourceOrigin(FolderSource(self._folder), manifest, model.uri)

    async def start(self) -> None:
        """Listen."""
        await self._peers.start()
        await self._server.start()
        if self._nixl is not None:
            self._thread.spawn("NIXL", self._nixl.keep())

    async def port(self, _: dict[str, Any]) -> dict[str, Any]:
        """Where it listens, once it is ready."""
        async with asyncio.timeout(READY_S):
            while self._nixl is not None and self._nixl.region is None:
                await asyncio.to_thread(os.sched_yield)
        return {"port": self._server.port}

    async def meet(self, order: dict[str, Any]) -> dict[str, Any]:
        """Get ready to take from the sender."""
        self._peers.follow(
            self._model.digest, [Peer(node_id=NodeId("sender"), host=HOST, port=order["port"])]
        )
        async with asyncio.timeout(READY_S):
            while any(state != "up" for state in self._peers.states.values()):
                await asyncio.to_thread(os.sched_yield)
        return {}

    async def fetch(self, _: dict[str, Any]) -> dict[str, Any]:
        """Bring all of the model here."""
        began_s = self._clock.monotonic_s()
        holder = self._copies.claim(
            self._model, range(len(self._manifest.parts)), InstanceId("bench"), leased=True
        )
        async for _ in self._copies.ready_parts(holder):
            pass
        self._copies.release(holder)
        return {"seconds": self._clock.monotonic_s() - began_s}

    async def drop(self, _: dict[str, Any]) -> dict[str, Any]:
        """Have nothing of it any more."""
        return {"dropped": len(self._copies.drop([self._model.digest]))}

    async def cpu(self, _: dict[str, Any]) -> dict[str, Any]:
        """Processor time of this process and of its child."""
        return {"cpu_s": sum(_cpu_s(pid) for pid in (os.getpid(), *_children()))}

    async def stop(self) -> None:
        """Leave nothing behind."""
        await self._server.stop()
        await self._peers.stop()
        await self._copies.stop()
        self._pool.close(remove=True)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _children() -> list[int]:
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


async def be_node(name: str, folder: Path, pool: Path, *, by_nixl: bool) -> None:
    """One of the two processes of a way."""
    configure_logging("bench", "warning")
    node = Node(name, folder, pool, by_nixl=by_nixl)
    await node.start()
    orders = {
        "port": node.port,
        "meet": node.meet,
        "fetch": node.fetch,
        "drop": node.drop,
        "cpu": node.cpu,
    }
    try:
        await obey(orders)
    finally:
        await node.stop()


def said(child: Child, do: str, **more: Any) -> dict[str, Any]:
    """Tell, and hear the answer."""
    child.tell(do, **more)
    return child.heard()


def pair(way: str, folder: Path, pools: Path, stack: ExitStack, log: Any) -> tuple[Child, Child]:
    """The sender, which has the model, and the receiver, which has met it."""
    children: list[Child] = []
    for name in ("sender", "receiver"):
        command = [
            sys.executable,
            __file__,
            "--node",
            name,
            "--folder",
            str(folder),
            "--pool",
            str(pools / f"{name}-{len(way)}"),
        ]
        if WAYS[way]:
            command = ["env", f"UCX_TLS={WAYS[way]}", "UCX_NET_DEVICES=lo", *command, "--nixl"]
        child = Child(f"{way}: {name}", command, log)
        stack.callback(child.stop)
        child.heard()
        children.append(child)
    sender, receiver = children
    said(sender, "fetch")
    said(receiver, "port")
    said(receiver, "meet", port=said(sender, "port")["port"])
    return sender, receiver


def measure(mib: int, rounds: int, log: Any) -> dict[str, Any]:
    """All ways in turns; each way's first round is thrown away: memory is made, and links learn of
    each other's.
    """
    has_nixl = any(importlib.util.find_spec(package) for package in PACKAGES)
    ways = [way for way, transports in WAYS.items() if has_nixl or not transports]
    figures: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pools = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        make_model(folder, mib)
        total = record_manifest(folder)
        pairs = {way: pair(way, folder, pools, stack, log) for way in ways}
        for number in range(rounds + 1):
            for way in ways:
                sender, receiver = pairs[way]
                before = said(sender, "cpu")["cpu_s"] + said(receiver, "cpu")["cpu_s"]
                seconds = said(receiver, "fetch")["seconds"]
                used = said(sender, "cpu")["cpu_s"] + said(receiver, "cpu")["cpu_s"] - before
                if not said(receiver, "drop")["dropped"]:
                    raise SystemExit("the model could not be dropped")
                if number:
                    figures[way].append(
                        {
                            "mb_per_s": round(total / seconds / 1e6, 1),
                            "cpu_s_per_gib": round(used / total * 2**30, 3),
                        }
                    )
    return {
        "machine": machine(),
        "bytes": total,
        "median_mb_per_s": {
            way: statistics.median(figure["mb_per_s"] for figure in found)
            for way, found in figures.items()
        },
        "median_cpu_s_per_gib": {
            way: statistics.median(figure["cpu_s_per_gib"] for figure in found)
            for way, found in figures.items()
        },
        "rounds": figures,
    }


def main() -> None:
    """Measure, or be a node of a measurement."""
    parser = argparse.ArgumentParser(description="A link over TCP and by NIXL.")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"))
    parser.add_argument("--node", choices=["sender", "receiver"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pool", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--nixl", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.node:
        asyncio.run(be_node(asked.node, asked.folder, asked.pool, by_nixl=asked.nixl))
        return
    with asked.log.open("wb") as log:
        print(json.dumps(measure(asked.mib, asked.rounds, log), indent=1))


if __name__ == "__main__":
    main()
