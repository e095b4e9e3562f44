"""Many nodes in one process, for ``control_live.py``: loaders and workers as others hear of them.

Each node is a ``NodeTeller``, as in a loader. Its workers obey commands at once: a stage loads for
``LOAD_S`` and is ready; a stage that is to drain, or is not in a command any more, is gone. Nothing
is computed.

Every process hears the commands of all nodes and leaves those of others alone.
"""

import argparse
import asyncio
import heapq
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.messages.codec import Message, decode_json, encode_json
from pilotlight.common.messages.hold import (
    NodeHold,
    WorkerHold,
    node_hold_subject,
    worker_hold_subject,
)
from pilotlight.common.messages.reports import (
    LOADER_PART,
    LoaderReport,
    TellWhole,
    WorkerReport,
    node_report_subject,
    whole_subject,
)
from pilotlight.common.messages.room import (
    Drop,
    Dropped,
    GivenUp,
    GiveUp,
    drop_subject,
    give_up_subject,
)
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import ADMIN
from pilotlight.common.node_state import NodeTeller
from pilotlight.common.settings import BusSettings
from pilotlight.common.telemetry import configure_logging
from pilotlight.common.waiting import every
from pilotlight.policy.cluster import (
    Copy,
    Device,
    DeviceKind,
    HeldStage,
    HeldState,
    Liveness,
    NodeFacts,
    Tier,
    WorkerFacts,
)
from pilotlight.policy.ids import Epoch, InstanceId, NodeId, WorkerId

GIB = 1 << 30
DEVICE_BYTES = 80 * GIB
POOL_BYTES = 1024 * GIB
LOAD_S = 0.2
LOOK_S = 0.01
FIGURES_SUBJECT = "bench.figures"
DEVICE = Device(
    kind=DeviceKind.CUDA, name="played", memory_bytes=DEVICE_BYTES, load_bytes_per_s=50e9
)


class AskFigures(Message, frozen=True, kw_only=True):
    """To all processes that play nodes."""

    player: int


class Figures(Message, frozen=True, kw_only=True):
    """What the nodes of one process have met, since it began."""

    commanded: dict[InstanceId, float]
    """When the first command for each instance came, in Unix seconds."""
    epochs: dict[int, float]
    """The same of each leader's epoch."""
    commands: int
    reports: int
    held: int
    """Stages that are held now."""


class PlayedNode:
    """A loader and its workers."""

    def __init__(self, number: int, workers: int, now_s: float) -> None:
        self.node_id = NodeId(f"n{number:04}")
        self.held: dict[WorkerId, dict[InstanceId, HeldStage]] = {
            WorkerId(f"w{number:04}-{index}"): {} for index in range(workers)
        }
        self.ready_s: dict[InstanceId, float] = {}
        """Since when stages are idle: no request runs here."""
        self.copies: dict[str, Copy] = {}
        self.incarnation = secrets.token_hex(6)
        self.teller = NodeTeller(self.node_id, self.incarnation, now_s)
        self.epoch = Epoch(0)
        self._seq = 0

    def say_loader(self, now_s: float) -> None:
        """The loader's part is another one."""
        self._seq += 1
        facts = NodeFacts(
            node_id=self.node_id,
            host=self.node_id,
            liveness=Liveness.ALIVE,
            nic_bytes_per_s=12.5e9,
            pool_bytes=POOL_BYTES,
            pool_free_bytes=POOL_BYTES - sum(one.size_bytes for one in self.copies.values()),
            pool_unit_bytes=1 << 20,
            copies=tuple(self.copies.values()),
        )
        report = LoaderReport(
            facts=facts, incarnation=self.incarnation, epoch_seen=self.epoch, seq=self._seq
        )
        self.teller.put(LOADER_PART, encode_json(report), now_s)

    def say_worker(self, worker_id: WorkerId, now_s: float) -> None:
        """A worker's part is another one."""
        self._seq += 1
        facts = WorkerFacts(
            worker_id=worker_id,
            node_id=self.node_id,
            device=DEVICE,
            liveness=Liveness.ALIVE,
            held=tuple(
                replace(one, idle_s=now_s - self.ready_s.get(key, now_s))
                for key, one in self.held[worker_id].items()
            ),
        )
        report = WorkerReport(
            facts=facts, incarnation=self.incarnation, epoch_seen=self.epoch, seq=self._seq
        )
        self.teller.put(worker_id, encode_json(report), now_s)


class Players:
    """All nodes of this process."""

    def __init__(self, bus: NatsBus, first: int, count: int, workers: int) -> None:
        self._bus = bus
        self._clock = SystemClock()
        now_s = self._clock.monotonic_s()
        self._nodes = {
            node.node_id: node
            for node in (PlayedNode(first + at, workers, now_s) for at in range(count))
        }
        self._of_worker = {key: node for node in self._nodes.values() for key in node.held}
        self._dirty: dict[NodeId, None] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._due: list[tuple[float, NodeId]] = []
        self._commanded: dict[InstanceId, float] = {}
        self._epochs: dict[int, float] = {}
        self._commands = 0
        self._reports = 0

    async def start(self, prefix: str) -> None:
        """Listen."""
        client: Any = self._bus.client
        for subject, heard in (
            (worker_hold_subject(WorkerId("*")), self._on_worker_hold),
            (node_hold_subject(NodeId("*")), self._on_node_hold),
            (whole_subject(NodeId("*")), self._on_whole),
            (give_up_subject(WorkerId("*")), self._on_give_up),
            (drop_subject(NodeId("*")), self._on_drop),
        ):
            await client.subscribe(prefix + subject, cb=heard)
        await client.flush()

    async def run(self) -> None:
        """Report for ever; nodes begin one after the other, as in a cluster."""
        now_s = self._clock.monotonic_s()
        for at, node in enumerate(self._nodes.values()):
            node.say_loader(now_s)
            for worker_id in node.held:
                node.say_worker(worker_id, now_s)
            heapq.heappush(self._due, (now_s + at / len(self._nodes), node.node_id))
        async for _ in every(LOOK_S):
            now_s = self._clock.monotonic_s()
            while self._timers and self._timers[0][0] <= now_s:
                heapq.heappop(self._timers)[2](now_s)
            dirty, self._dirty = self._dirty, {}
            for node_id in dirty:
                await self._say(self._nodes[node_id], now_s)
            while self._due and self._due[0][0] <= now_s:
                _, node_id = heapq.heappop(self._due)
                node = self._nodes[node_id]
                if node.teller.wait_s(now_s) <= LOOK_S:
                    await self._say(node, now_s)
                heapq.heappush(self._due, (now_s + node.teller.wait_s(now_s), node_id))

    def figures(self) -> Figures:
        """What was met."""
        return Figures(
            commanded=self._commanded,
            epochs=self._epochs,
            commands=self._commands,
            reports=self._reports,
            held=sum(len(held) for node in self._nodes.values() for held in node.held.values()),
        )

    async def _say(self, node: PlayedNode, now_s: float) -> None:
        self._reports += 1
        await self._bus.publish(node_report_subject(node.node_id), node.teller.report({}, now_s))

    def _later(self, at_s: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._timers, (at_s, self._order, act))

    # What comes. The third token of a subject is a worker's or a node's id.

    async def _on_worker_hold(self, msg: Any) -> None:
        worker_id = WorkerId(msg.subject.split(".")[-2])
        node = self._of_worker.get(worker_id)
        if node is None:
            return
        hold = decode_json(msg.data, WorkerHold)
        now_s = self._clock.monotonic_s()
        wall_s = self._clock.wall().timestamp()
        self._commands += 1
        self._epochs.setdefault(hold.epoch, wall_s)
        if hold.epoch < node.epoch:
            return
        held, wanted = node.held[worker_id], {one.instance_id: one for one in hold.holds}
        changed = hold.epoch > node.epoch
        node.epoch = hold.epoch
        for instance_id in [one for one in held if one not in wanted]:
            del held[instance_id]
            node.ready_s.pop(instance_id, None)
            changed = True
        for instance_id, one in wanted.items():
            before = held.get(instance_id)
            if one.draining:  # It serves nobody, and goes at once.
                changed |= held.pop(instance_id, None) is not None
                node.ready_s.pop(instance_id, None)
            elif before is None:
                self._commanded.setdefault(instance_id, wall_s)
                held[instance_id] = HeldStage(
                    instance_id=instance_id,
                    generation=one.generation,
                    model=one.model.name,
                    digest=one.model.digest,
                    stage=one.stage,
                    state=HeldState.LOADING,
                    device_bytes=one.device_bytes,
                )
                self._later(
                    now_s + LOAD_S,
                    lambda at_s, worker_id=worker_id, instance_id=instance_id: self._loaded(
                        worker_id, instance_id, at_s
                    ),
                )
                changed = True
            elif before.generation != one.generation:
                held[instance_id] = replace(before, generation=one.generation)
                changed = True
        if changed:
            node.say_worker(worker_id, now_s)
            self._dirty[node.node_id] = None

    def _loaded(self, worker_id: WorkerId, instance_id: InstanceId, now_s: float) -> None:
        node = self._of_worker[worker_id]
        stage = node.held[worker_id].get(instance_id)
        if stage is not None and stage.state is HeldState.LOADING:
            node.held[worker_id][instance_id] = replace(
                stage, state=HeldState.READY, loaded=moment_of(self._clock)
            )
            node.ready_s[instance_id] = now_s
            node.say_worker(worker_id, now_s)
            self._dirty[node.node_id] = None

    async def _on_node_hold(self, msg: Any) -> None:
        node = self._nodes.get(NodeId(msg.subject.split(".")[-2]))
        if node is None:
            return
        self._commands += 1
        fresh = [
            one
            for one in decode_json(msg.data, NodeHold).fetches
            if one.model.digest not in node.copies
        ]
        for one in fresh:
            node.copies[one.model.digest] = Copy(
                digest=one.model.digest,
                node_id=node.node_id,
                tier=Tier.HOST,
                parts=one.parts,
                size_bytes=sum(one.model.spec.part_bytes),
            )
        if fresh:
            node.say_loader(self._clock.monotonic_s())
            self._dirty[node.node_id] = None

    async def _on_whole(self, msg: Any) -> None:
        node = self._nodes.get(decode_json(msg.data, TellWhole).node_id)
        if node is not None:
            node.teller.ask()
            self._dirty[node.node_id] = None

    async def _on_give_up(self, msg: Any) -> None:
        worker_id = WorkerId(msg.subject.split(".")[-2])
        node = self._of_worker.get(worker_id)
        if node is None:
            return
        asked = decode_json(msg.data, GiveUp).instance_ids
        given = tuple(one for one in asked if node.held[worker_id].pop(one, None) is not None)
        node.say_worker(worker_id, self._clock.monotonic_s())
        self._dirty[node.node_id] = None
        await msg.respond(encode_json(GivenUp(instance_ids=given)))

    async def _on_drop(self, msg: Any) -> None:
        node = self._nodes.get(NodeId(msg.subject.split(".")[-2]))
        if node is None:
            return
        asked = decode_json(msg.data, Drop).digests
        dropped = tuple(one for one in asked if node.copies.pop(one, None) is not None)
        node.say_loader(self._clock.monotonic_s())
        self._dirty[node.node_id] = None
        await msg.respond(encode_json(Dropped(digests=dropped)))


async def play(arguments: argparse.Namespace) -> None:
    """Play until the process is ended."""
    settings = BusSettings(nats_url=arguments.nats, secrets_dir=arguments.secrets)
    bus = await NatsBus.connect(settings, user=ADMIN, name=f"nodes of {socket.gethostname()}")
    players = Players(bus, arguments.first, arguments.count, arguments.workers)
    await players.start(settings.prefix)

    async def answer(ask: AskFigures) -> Figures:
        return players.figures()

    await bus.serve(f"{FIGURES_SUBJECT}.{arguments.player}", AskFigures, answer)
    await players.run()


def main() -> None:
    """Play some nodes."""
    parser = argparse.ArgumentParser(description="Plays nodes for control_live.py.")
    parser.add_argument("--nats", required=True)
    parser.add_argument("--secrets", required=True)
    parser.add_argument("--player", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    configure_logging("bench-nodes")
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
