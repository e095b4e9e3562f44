"""The leader's hands: facts for ``tick``, and what becomes of its plan.

Every rule is control's. Here are the writes that the service makes of a plan
(``scheduler.applier``, ``starter``, ``teller``), without rows and messages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pilotlight.policy.arrivals import GATHER_S, ArrivalCounters, ArrivalWindows, CounterLife
from pilotlight.policy.cluster import NodeFacts, WorkerView
from pilotlight.policy.coldstart.timings import Timings
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.growing import growth_of
from pilotlight.policy.control.line import next_try_s, shortened
from pilotlight.policy.control.plan import (
    ControlFacts,
    ControlRules,
    GrowOrder,
    Memory,
    Plan,
    Refusal,
    StartOrder,
    Term,
)
from pilotlight.policy.control.reconcile import Change, drain_of, moved, retargeted
from pilotlight.policy.control.splitting import instances_of
from pilotlight.policy.control.tick import tick
from pilotlight.policy.ids import (
    DecisionId,
    Digest,
    GatewayId,
    Generation,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.instance import ENDED, SERVING, InstanceEvent, step
from pilotlight.policy.model import Model
from pilotlight.policy.multicast import chains_of
from pilotlight.policy.placement import Candidate, eviction_plan
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.sim.cluster.evictions import Evictions
from pilotlight.sim.cluster.parts import Parts
from pilotlight.sim.cluster.workers import EPOCH

LONG_AGO_S = -1000.0
GATEWAY = GatewayId("gateway")


@dataclass(frozen=True, slots=True)
class Decided:
    """One tick: what it looked at, and what it said. Enough to decide again."""

    facts: ControlFacts
    memory: Memory
    plan: Plan


@dataclass(slots=True)
class Leader:
    """One term that never ends."""

    parts: Parts
    rules: ControlRules
    models: Mapping[ModelName, Model]
    timings: Timings
    evictions: Evictions
    books: Books = field(default_factory=Books)
    memory: Memory = field(default_factory=Memory)
    log: "list[Decided] | None" = None
    """Of every tick, where it is kept."""
    ticks: int = 0
    starts: int = 0
    stages: int = 0
    """Of all starts together."""
    refusals: int = 0
    _views: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    _nodes: dict[NodeId, NodeFacts] = field(default_factory=dict[NodeId, NodeFacts])
    _version: int = 0
    _refused: list[Refusal] = field(default_factory=list[Refusal])
    _started: list[ModelName] = field(default_factory=list[ModelName])
    _counters: ArrivalCounters = field(default_factory=lambda: ArrivalCounters(0.0))
    _told_s: float = -math.inf
    _windows: ArrivalWindows = field(default_factory=lambda: ArrivalWindows(0.0))

    def __post_init__(self) -> None:
        if self.evictions.orders_pools:
            for host in self.parts.hosts.values():
                host.order = self._pool_order

    def _pool_order(self, node: NodeFacts) -> tuple[Digest, ...]:
        recent, now_s = self._windows.recent(), self.parts.events.now_s
        return self.evictions.pool_order(node, recent, now_s)

    def count(self, model: ModelName, now_s: float) -> None:
        """A request has come. It is told of as gateways do: at once, and with others that come
        sooner than ``GATHER_S`` after the last message.
        """
        if not self._counters.changed:
            self.parts.events.at(max(now_s, self._told_s + GATHER_S), self._tell_arrivals)
        self._counters.count(model, now_s)

    def decide(self) -> float:
        """Look, decide, carry out; when it is worth it next by time alone."""
        facts = self._gather()
        memory = self.memory
        plan = tick(facts, memory, self.rules)
        self.ticks += 1
        if self.log is not None:
            self.log.append(Decided(facts, memory, plan))
        self._carry_out(plan)
        return next_try_s(shortened(facts, memory, self.rules), plan.memory, self.rules)

    def source_of(self, instance_id: InstanceId, node_id: NodeId) -> str:
        """What the start of an instance chose as a node's source; empty: it has not."""
        record = self.books.get(instance_id)
        if record is None:
            return ""
        places = record.instance.placements
        return next((one.source for one in places if one.node_id == node_id), "")

    def _tell_arrivals(self) -> None:
        now_s = self._told_s = self.parts.events.now_s
        life = CounterLife(
            gateway_id=GATEWAY,
            number=str(self._counters.life),
            age_s=self._counters.age_s(now_s),
        )
        told = self._counters.tell(now_s)
        self.evictions.hear_arrivals(self._windows.hear(life, told, now_s, now_s))
        if self._counters.changed:
            self.parts.events.at(now_s + GATHER_S, self._tell_arrivals)

    def _gather(self) -> ControlFacts:
        parts, now_s = self.parts, self.parts.events.now_s
        workers, nodes = parts.take_changed()
        if workers:
            found = (parts.workers[worker_id] for worker_id in sorted(workers))
            heard = {one.worker_id: one.view(one.host.node_id) for one in found}
            self._views = {**self._views, **heard}
            self.evictions.hear_workers(
                heard, self._nodes, self.books, self._windows.recent(), now_s
            )
        if nodes:
            reports = {node_id: parts.hosts[node_id].facts() for node_id in sorted(nodes)}
            self._nodes = {**self._nodes, **reports}
            self.evictions.hear_nodes(reports, self._windows.recent(), now_s)
        self._version += bool(workers)
        demand = parts.gateway.demand(now_s)
        refused, self._refused = tuple(self._refused), []
        started, self._started = tuple(self._started), []
        return ControlFacts(
            now_s=now_s,
            term=Term(
                epoch=EPOCH,
                started_s=LONG_AGO_S,
                listening_since_s=LONG_AGO_S,
                deaf=False,
                announced=True,
            ),
            books=self.books,
            workers=self._views,
            nodes=self._nodes,
            models=self.models,
            demand=demand,
            demand_seen_s=dict(parts.gateway.since_s),
            awaited=frozenset(one.model for one in demand),
            arrivals=self._windows.recent(),
            timings=self.timings,
            world_version=self._version,
            refusals=refused,
            started=started,
            changed=Focus(workers=workers, nodes=nodes),
        )

    def _carry_out(self, plan: Plan) -> None:
        self.books, self.memory = plan.books, plan.memory
        for change in plan.changes:
            self._move(change)
        for drain in plan.drain:
            self._move(drain_of(drain))
        for order in plan.start:
            self._start(order)
        for retarget in plan.retarget:
            self._move(retargeted(retarget))
        for grow in plan.grow:
            self._grow(grow)
        self.refusals += len(plan.refuse)
        for holds in (plan.tell, plan.repeat):
            for node in holds.nodes:
                self.parts.tell_node(node, self.source_of)
            for worker in holds.workers:
                self.parts.tell_worker(worker)

    def _move(self, change: Change) -> None:
        record = self.books.get(change.instance_id)
        if record is None or not record.is_row:
            return
        before = record.instance
        now_s = self.parts.events.now_s
        after = moved(before, change, EPOCH, now_s)
        become = instances_of(before, change.become, EPOCH, now_s)
        self.books = self.books.put(
            replace(record, instance=after),
            *(Record(instance=one, model=record.model) for one in become),
        )
        if after.state in ENDED:
            for placement in after.placements:
                self.parts.workers[placement.worker_id].release(after.instance_id)
        if after.state in SERVING:
            self.parts.serve(after)
        else:
            self.parts.leave(after)
        self.parts.wake()

    def _grow(self, order: GrowOrder) -> None:
        """Grant what is free, and no more: a group that has no room stays what it is."""
        record = self.books.get(order.instance_id)
        if record is None or not record.is_row:
            return
        seen, granted = record.instance, set[WorkerId]()
        had = {one.worker_id: one for one in seen.placements}
        for one in order.placements:
            worker = self.parts.workers[one.worker_id]
            more_bytes = one.device_bytes - had[one.worker_id].device_bytes
            if one != had[one.worker_id] and more_bytes <= worker.free_bytes:
                worker.grant(seen.instance_id, one.device_bytes)
                granted.add(one.worker_id)
        self._move(growth_of(order, seen, record.model, granted))

    def _start(self, order: StartOrder) -> None:
        """Ask for room, write, command."""
        assert order.choice.scheme is not None
        now_s = self.parts.events.now_s
        self.starts += 1
        instance_id = InstanceId(f"i{self.starts:07d}")
        places = order.choice.scheme.placements
        for at, placement in enumerate(places):
            if not self._grant(instance_id, order, placement):
                for other in places[:at]:
                    self.parts.workers[other.worker_id].release(instance_id)
                refusal = Refusal(
                    model=order.model.name,
                    worker_id=placement.worker_id,
                    code="no_room",
                    message="what it would take was used meanwhile",
                    transient=False,
                )
                self._refused.append(refusal)
                self.parts.wake()
                return
        self.stages += len(places)
        chains = chains_of(order.model, order.seen.nodes, order.seen.instances, places)
        instance = Instance(
            instance_id=instance_id,
            model=order.model.name,
            digest=order.model.digest,
            state=step(InstanceState.PLANNED, InstanceEvent.FETCH_STARTED),
            generation=Generation(1),
            epoch=EPOCH,
            placements=tuple(
                replace(one, upstreams=tuple(chains.upstreams.get(one.node_id, ())))
                for one in places
            ),
            decision_id=DecisionId(f"d{self.starts:07d}"),
            state_since_s=now_s,
            last_used_s=now_s,
            reason=order.reason,
            targets=order.choice.instances,
        )
        self.books = self.books.put(Record(instance=instance, model=order.model))
        self._started.append(order.model.name)
        self.parts.wake()

    def _grant(self, instance_id: InstanceId, order: StartOrder, placement: Placement) -> bool:
        """What the cache does: evict for the least room, promise what is asked for."""
        worker = self.parts.workers[placement.worker_id]
        missing = placement.device_bytes - worker.free_bytes
        if missing > 0 and order.ahead:
            return False
        if missing > 0:
            seen = order.seen
            node = self._nodes[placement.node_id]
            facts = self._views[placement.worker_id].facts
            candidate = Candidate(
                worker=facts, node=node, free_bytes=worker.free_bytes, evictable_bytes=0
            )
            rules = replace(self.rules.scheme.placement, policy=self.evictions.policy)
            stage = order.model.spec.whole if _holds_all(order, placement) else placement.stage
            plan = eviction_plan(order.model, stage, candidate, seen, rules)
            victims = [InstanceId(one.subject) for one in plan.victims]
            if not plan.enough or not all(map(self.parts.is_idle, victims)):
                return False
            for victim in victims:
                self.parts.evict(victim)
        worker.grant(instance_id, min(placement.device_bytes, max(0, worker.free_bytes)))
        return True


def _holds_all(order: StartOrder, placement: Placement) -> bool:
    """Whether a worker is to have room for the whole model."""
    model = order.model
    return placement.device_bytes >= model.device_bytes(model.spec.whole)
