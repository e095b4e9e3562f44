"""What this process knows of the world by listening: reports, demand, models. Kept by leader and standbys alike.

Ages are by this process's monotonic clock. Nothing is forgotten because it is not heard: a silent worker becomes suspect, then dead;
a silent gateway's demand is dropped, for it repeats it every 250 ms as long as there is any. While NATS is lost nobody can be heard:
ages stand still, and go on from where they were.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.common.messages.demand import DemandVector
from pilotlight.common.messages.reports import LoaderReport, WorkerReport
from pilotlight.policy.liveness import FORGET_AFTER_S, LAST_WORDS_S, liveness_of
from pilotlight.policy.types import (
    Demand,
    Digest,
    Epoch,
    GatewayId,
    HeldStage,
    InstanceId,
    Liveness,
    Model,
    ModelName,
    NodeDrain,
    NodeFacts,
    NodeId,
    WorkerFacts,
    WorkerId,
)

YOUNGER_S = 1.0
"""A drain that is younger by so much than it was thought to be is another one: it was taken back, and asked for again."""
GATEWAY_SILENT_S = 1.0
"""Four demand vectors missed: nobody waits there any more, or the gateway is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker by its last report."""

    facts: WorkerFacts
    heard_s: float
    incarnation: str
    epoch_seen: Epoch

    def held(self, instance_id: InstanceId) -> HeldStage | None:
        """The stage of an instance, if the worker reports one."""
        return next((held for held in self.facts.held if held.instance_id == instance_id), None)


@dataclass(slots=True)
class _Worker:
    report: WorkerReport
    heard_s: float
    fresh_s: float
    """``heard_s``, moved on by the time in which nothing could be heard."""
    declared_dead_s: float | None = None


@dataclass(slots=True)
class _Node:
    report: LoaderReport
    fresh_s: float


@dataclass(slots=True)
class _Vector:
    demands: tuple[Demand, ...]
    heard_s: float
    fresh_s: float


@dataclass(slots=True)
class World:
    """The view. Each ``hear_`` method says whether a decision may come out differently now."""

    listening_since_s: float
    models: dict[ModelName, Model] = field(default_factory=dict[ModelName, Model])
    version: int = 0
    """Counts changes of what could take a model: workers, and what they hold."""
    deaf_since_s: float | None = None
    """Since when NATS is lost; None while it is not."""
    reconnects: int = 0
    """Counts them: the server may have come back without its memory."""
    draining_since_s: dict[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Nodes that an operator wants to be empty, and since when."""
    _epoch_heard: Epoch = field(default=Epoch(0))
    _workers: dict[WorkerId, _Worker] = field(default_factory=dict[WorkerId, _Worker])
    _nodes: dict[NodeId, _Node] = field(default_factory=dict[NodeId, _Node])
    _vectors: dict[GatewayId, _Vector] = field(default_factory=dict[GatewayId, _Vector])
    _waiting_since_s: dict[ModelName, float] = field(default_factory=dict[ModelName, float])

    def hear_worker(self, report: WorkerReport, now_s: float) -> bool:
        """Take a worker's report."""
        known = self._workers.get(report.facts.worker_id)
        if known is not None and known.report.incarnation == report.incarnation and known.declared_dead_s is not None:
            if now_s - known.declared_dead_s < LAST_WORDS_S:
                return False
            known.declared_dead_s = None
        changed = (
            known is None
            or known.report.incarnation != report.incarnation
            or _essence(known.report.facts) != _essence(report.facts)
            or self._liveness(known.fresh_s, now_s) is not Liveness.ALIVE
        )
        if known is None or known.report.incarnation != report.incarnation:
            self._workers[report.facts.worker_id] = _Worker(report, now_s, now_s)
        else:
            known.report, known.heard_s, known.fresh_s = report, now_s, now_s
        self.version += changed
        return changed

    def hear_loader(self, report: LoaderReport, now_s: float) -> bool:
        """Take a loader's report, and its word for workers whose process ended."""
        known = self._nodes.get(report.facts.node_id)
        before = frozenset(known.report.dead_workers) if known is not None else frozenset[WorkerId]()
        self._nodes[report.facts.node_id] = _Node(report, now_s)
        changed = known is None or known.report.facts.draining != report.facts.draining
        for worker_id in report.dead_workers:
            worker = self._workers.get(worker_id)
            # A death that was listed before is known; the worker may have been started anew since.
            if worker is None or worker_id in before or worker.declared_dead_s is not None:
                continue
            worker.declared_dead_s = now_s
            changed = True
        self.version += changed
        return changed

    def hear_demand(self, vector: DemandVector, now_s: float) -> bool:
        """Take a gateway's whole demand."""
        before = {demand.model: demand.waiting for demand in self.demand(now_s)}
        if vector.demands:
            self._vectors[vector.gateway_id] = _Vector(vector.demands, now_s, now_s)
        else:
            self._vectors.pop(vector.gateway_id, None)
        after = {demand.model: demand.waiting for demand in self.demand(now_s)}
        return before != after

    def hear_models(self, models: Iterable[Model]) -> bool:
        """Take the list of registered models."""
        listed = {model.name: model for model in models}
        changed = listed != self.models
        self.models = listed
        return changed

    def hear_drains(self, ages_s: Mapping[NodeId, float], now_s: float) -> bool:
        """Take the list of nodes that are to be empty."""
        known = self.draining_since_s
        told = {node_id: now_s - ages_s[node_id] for node_id in sorted(ages_s)}
        # Each list is told a little late, so what is known stays where nothing has happened.
        self.draining_since_s = {
            node_id: known[node_id] if node_id in known and since_s - known[node_id] <= YOUNGER_S else since_s
            for node_id, since_s in told.items()
        }
        changed = known != self.draining_since_s
        self.version += changed
        return changed

    def demand(self, now_s: float) -> tuple[Demand, ...]:
        """Waiting requests by model, over every gateway that is heard."""
        self._vectors = {key: one for key, one in self._vectors.items() if self._age_s(one.fresh_s, now_s) <= GATEWAY_SILENT_S}
        merged: dict[ModelName, Demand] = {}
        for vector in self._vectors.values():
            for demand in vector.demands:
                aged = _aged(demand, now_s - vector.heard_s)
                known = merged.get(demand.model)
                merged[demand.model] = aged if known is None else _joined(known, aged)
        waiting = {model for model, demand in merged.items() if demand.waiting > 0}
        self._waiting_since_s = {model: self._waiting_since_s.get(model, now_s) for model in waiting}
        return tuple(merged[model] for model in sorted(merged))

    def waiting_since_s(self, model: ModelName) -> float | None:
        """When this process first heard that somebody waits for a model; None when nobody does."""
        return self._waiting_since_s.get(model)

    def workers(self, now_s: float) -> dict[WorkerId, WorkerView]:
        """Every worker with its liveness."""
        self._workers = {key: one for key, one in self._workers.items() if self._age_s(one.fresh_s, now_s) < FORGET_AFTER_S}
        return {
            worker_id: WorkerView(
                facts=replace(
                    one.report.facts,
                    liveness=Liveness.DEAD if one.declared_dead_s is not None else self._liveness(one.fresh_s, now_s),
                ),
                heard_s=one.heard_s,
                incarnation=one.report.incarnation,
                epoch_seen=one.report.epoch_seen,
            )
            for worker_id, one in self._workers.items()
        }

    def nodes(self, now_s: float) -> dict[NodeId, NodeFacts]:
        """Every node with its liveness."""
        self._nodes = {key: one for key, one in self._nodes.items() if self._age_s(one.fresh_s, now_s) < FORGET_AFTER_S}
        return {
            node_id: replace(
                one.report.facts,
                liveness=self._liveness(one.fresh_s, now_s),
                draining=one.report.facts.draining or node_id in self.draining_since_s,
            )
            for node_id, one in self._nodes.items()
        }

    def drains(self, now_s: float) -> tuple[NodeDrain, ...]:
        """Nodes that are to be empty, and for how long."""
        return tuple(NodeDrain(node_id=node_id, age_s=now_s - since_s) for node_id, since_s in self.draining_since_s.items())

    def hear_connection(self, connected: bool, now_s: float) -> None:
        """Take note of whether anything can be heard at all."""
        if not connected:
            self.deaf_since_s = now_s if self.deaf_since_s is None else self.deaf_since_s
        elif self.deaf_since_s is not None:
            deaf_s = now_s - self.deaf_since_s
            self.deaf_since_s = None
            for one in (*self._workers.values(), *self._nodes.values(), *self._vectors.values()):
                one.fresh_s = min(now_s, one.fresh_s + deaf_s)

    def hear_epoch(self, epoch: Epoch) -> None:
        """Take an epoch that another leader has announced."""
        self._epoch_heard = max(self._epoch_heard, epoch)

    def epoch_seen(self) -> Epoch:
        """Highest epoch that any worker or loader has obeyed, or was announced: a new leader must be above it, whatever the lease row
        says.
        """
        seen = [one.report.epoch_seen for one in self._workers.values()] + [one.report.epoch_seen for one in self._nodes.values()]
        return max([self._epoch_heard, *seen])

    def _age_s(self, fresh_s: float, now_s: float) -> float:
        return max(0.0, (now_s if self.deaf_since_s is None else self.deaf_since_s) - fresh_s)

    def _liveness(self, fresh_s: float, now_s: float) -> Liveness:
        return liveness_of(self._age_s(fresh_s, now_s))


def _essence(facts: WorkerFacts) -> tuple[object, ...]:
    """What decisions depend on; counters that change with every report are left out."""
    stages = tuple(
        (held.instance_id, held.generation, held.state, held.device_bytes, held.in_flight > 0, held.reason) for held in facts.held
    )
    return (facts.engine_up, facts.device, facts.health, stages)


def _aged(demand: Demand, by_s: float) -> Demand:
    return replace(demand, oldest_age_s=demand.oldest_age_s + by_s, deadline_in_s=demand.deadline_in_s - by_s)


def _joined(one: Demand, other: Demand) -> Demand:
    oldest = one if one.oldest_age_s >= other.oldest_age_s else other
    return replace(
        oldest,
        waiting=one.waiting + other.waiting,
        deadline_in_s=min(one.deadline_in_s, other.deadline_in_s),
        arrivals=one.arrivals + other.arrivals,
    )


def copies_of(node: NodeFacts, digest: Digest) -> NodeFacts:
    """The node with the copies of one model alone: what a decision over that model looks at."""
    return replace(node, copies=tuple(copy for copy in node.copies if copy.digest == digest))
