"""What every worker and node is to hold, made of the instances alone; and the telling of it.

A command is the whole desired state of its receiver. It goes out on change, every second, and when a report disagrees.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.messages.hold import Fetch, Hold, NodeHold, WorkerHold, node_hold_subject, worker_hold_subject
from pilotlight.common.telemetry import with_parent
from pilotlight.policy.instance import STARTING
from pilotlight.policy.types import Epoch, HeldState, InstanceState, NodeFacts, NodeId, WorkerId
from pilotlight.scheduler.book import Entry
from pilotlight.scheduler.chains import Upstreams, upstreams_of
from pilotlight.scheduler.world import WorkerView

REPEAT_S = 1.0
DISAGREES_AGAIN_S = 0.1
"""A report may have been under way while the command was: it is given this long to be about the command."""


def worker_hold(worker_id: WorkerId, entries: Iterable[Entry], epoch: Epoch) -> WorkerHold:
    """Everything that one worker is to hold."""
    holds = [
        Hold(
            instance_id=entry.instance.instance_id,
            generation=entry.instance.generation,
            model=entry.model,
            stage=placement.stage,
            device_bytes=placement.device_bytes,
            draining=entry.instance.state is InstanceState.DRAINING,
            trace_parent=entry.trace_parent,
        )
        for entry in entries
        for placement in entry.instance.placements
        if placement.worker_id == worker_id
    ]
    return WorkerHold(worker_id=worker_id, epoch=epoch, holds=tuple(sorted(holds, key=lambda hold: hold.instance_id)))


def node_hold(node_id: NodeId, entries: Iterable[Entry], upstreams: Upstreams, epoch: Epoch) -> NodeHold:
    """Everything that one node is to fetch, and from whom: the parts of instances that are on their way."""
    fetches = [
        Fetch(
            instance_id=entry.instance.instance_id,
            generation=entry.instance.generation,
            model=entry.model,
            parts=entry.model.spec.parts_of(placement.stage),
            trace_parent=entry.trace_parent,
            upstreams=upstreams.get((node_id, entry.model.digest), ()),
        )
        for entry in entries
        if entry.instance.state in STARTING
        for placement in entry.instance.placements
        if placement.node_id == node_id
    ]
    return NodeHold(node_id=node_id, epoch=epoch, fetches=tuple(sorted(fetches, key=lambda fetch: fetch.instance_id)))


def disagreement(hold: WorkerHold, worker: WorkerView) -> str | None:
    """What a worker's report shows otherwise than it was told; None when it agrees.

    1. it holds a stage that it is not to hold (a stage that it drains is on its way out)
    2. it does not hold a stage that it is to hold; one that is to drain may be gone already
    3. it holds a stage at an older generation; one that drains keeps the number that it began with
    4. it is not draining a stage that it is to drain
    """
    wanted = {one.instance_id: one for one in hold.holds}
    held = {one.instance_id: one for one in worker.facts.held}
    for instance_id, stage in held.items():
        desired = wanted.get(instance_id)
        if desired is None:
            if stage.state is not HeldState.DRAINING:  # 1
                return f"it holds {instance_id}, which it is not to hold"
        elif desired.draining:
            if stage.state in (HeldState.LOADING, HeldState.READY):  # 4
                return f"it is to drain {instance_id}"
        elif stage.generation < desired.generation:  # 3
            return f"it holds {instance_id} at generation {stage.generation}, not {desired.generation}"
    missing = [one.instance_id for one in hold.holds if one.instance_id not in held and not one.draining]  # 2
    return f"it does not hold {missing[0]}" if missing else None


Essence = tuple[tuple[object, ...], ...]
"""What makes a command another one than that before."""


@dataclass(slots=True)
class _Sent:
    essence: Essence
    at_s: float


@dataclass(slots=True)
class Dispatcher:
    """Tells workers and nodes, and remembers what it told them when."""

    bus: Bus
    epoch: Epoch
    check: Callable[[], None]
    """Raises ``NotLeader`` once the lease may have run out."""
    clock: Clock
    _seq: int = 0
    _workers: dict[WorkerId, _Sent] = field(default_factory=dict[WorkerId, _Sent])
    _nodes: dict[NodeId, _Sent] = field(default_factory=dict[NodeId, _Sent])

    async def dispatch(self, entry: Entry, entries: tuple[Entry, ...], nodes: Mapping[NodeId, NodeFacts], now_s: float) -> None:
        """Tell the nodes and workers of one instance at once, the nodes first: bytes take longest.

        Raises:
            NotLeader: the lease has run out.
        """
        placements = entry.instance.placements
        upstreams = upstreams_of(entries, nodes)
        for node_id in dict.fromkeys(placement.node_id for placement in placements):
            await self._tell_node(node_hold(node_id, entries, upstreams, self.epoch), now_s)
        for worker_id in dict.fromkeys(placement.worker_id for placement in placements):
            await self._tell_worker(worker_hold(worker_id, entries, self.epoch), now_s)

    async def publish(
        self,
        entries: tuple[Entry, ...],
        workers: dict[WorkerId, WorkerView],
        nodes: Mapping[NodeId, NodeFacts],
        now_s: float,
    ) -> None:
        """Tell everyone whose command changed, who was told a second ago, or whose report disagrees.

        Raises:
            NotLeader: the lease has run out.
        """
        placed = [placement for entry in entries for placement in entry.instance.placements]
        upstreams = upstreams_of(entries, nodes)
        for node_id in {*nodes, *(placement.node_id for placement in placed)}:
            command = node_hold(node_id, entries, upstreams, self.epoch)
            if _due(self._nodes.get(node_id), _node_essence(command), now_s):
                await self._tell_node(command, now_s)
        for worker_id in {*workers, *(placement.worker_id for placement in placed)}:
            command = worker_hold(worker_id, entries, self.epoch)
            sent = self._workers.get(worker_id)
            worker = workers.get(worker_id)
            disputed = (
                sent is not None
                and worker is not None
                and worker.heard_s - sent.at_s > DISAGREES_AGAIN_S
                and disagreement(command, worker) is not None
            )
            if disputed or _due(sent, _worker_essence(command), now_s):
                await self._tell_worker(command, now_s)

    async def _tell_worker(self, command: WorkerHold, now_s: float) -> None:
        self.check()
        self._workers[command.worker_id] = _Sent(_worker_essence(command), now_s)
        self._seq += 1
        with with_parent(_only_trace(command.holds)):
            told = msgspec.structs.replace(command, seq=self._seq, sent=moment_of(self.clock))
            await self.bus.publish(worker_hold_subject(command.worker_id), told)

    async def _tell_node(self, command: NodeHold, now_s: float) -> None:
        self.check()
        self._nodes[command.node_id] = _Sent(_node_essence(command), now_s)
        self._seq += 1
        with with_parent(_only_trace(command.fetches)):
            told = msgspec.structs.replace(command, seq=self._seq, sent=moment_of(self.clock))
            await self.bus.publish(node_hold_subject(command.node_id), told)


def _worker_essence(command: WorkerHold) -> Essence:
    return tuple((hold.instance_id, hold.generation, hold.draining) for hold in command.holds)


def _node_essence(command: NodeHold) -> Essence:
    return tuple((fetch.instance_id, fetch.generation, fetch.upstreams) for fetch in command.fetches)


def _due(sent: _Sent | None, essence: Essence, now_s: float) -> bool:
    return sent is None or sent.essence != essence or now_s - sent.at_s >= REPEAT_S


def _only_trace(orders: Iterable[Hold] | Iterable[Fetch]) -> str:
    """A command may carry several cold starts; its header can name one trace, each order in it names its own."""
    traces = [order.trace_parent for order in orders if order.trace_parent]
    return traces[0] if len(traces) == 1 else ""
