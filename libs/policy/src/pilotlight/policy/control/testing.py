"""A large cluster at rest, and small changes of it: for tests that count what control looks at, and
for ``bench/control.py``. And single records and reports, with defaults.
"""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

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
    WorkerView,
)
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Plan, Term
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.control.tick import tick
from pilotlight.policy.ids import Epoch, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, InstanceState, NodeDrain
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import NOW_S, instance, model, worker

TICK_S = 0.25
PART_BYTES = 2_000_000_000
COPIES = 2
"""Nodes with a copy of each model."""


def view(
    index: int = 0,
    *,
    stages: tuple[HeldStage, ...] = (),
    liveness: Liveness = Liveness.ALIVE,
    heard_s: float = NOW_S,
) -> WorkerView:
    """What is known of worker ``w<index>``, by its last report."""
    facts = worker(index, held_stages=stages, liveness=liveness)
    return WorkerView(facts=facts, heard_s=heard_s, incarnation="a", epoch_seen=Epoch(1))


def record(one: Instance, trace_parent: str = "") -> Record:
    """An instance of ``model()`` in the books."""
    return Record(instance=one, model=model(), trace_parent=trace_parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a cluster is."""

    nodes: int
    workers_per_node: int
    models: int
    instances: int


@dataclass(slots=True)
class LargeCluster:
    """Every instance serves, one half of them with a request in flight.

    All that is to be told has been told.

    ``crowd`` takes the room away.
    """

    size: Size
    rules: ControlRules = field(
        default_factory=lambda: ControlRules(
            reconcile=ReconcileRules(term_started_s=NOW_S - 1000, hold_deadline_s=10.0)
        )
    )
    now_s: float = NOW_S
    books: Books = field(default_factory=Books)
    memory: Memory = field(default_factory=Memory)
    workers: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    nodes: dict[NodeId, NodeFacts] = field(default_factory=dict[NodeId, NodeFacts])
    models: dict[ModelName, Model] = field(default_factory=dict[ModelName, Model])
    demand: tuple[Demand, ...] = ()
    drains: tuple[NodeDrain, ...] = ()
    version: int = 0
    """Counts reports, so that every report ends the pause of models that were refused."""

    def __post_init__(self) -> None:
        size = self.size
        for index in range(size.models):
            one = model(f"m{index:05}", part_bytes=PART_BYTES, keep_alive_s=1e6)
            self.models[one.name] = one
        names = list(self.models)
        for index in range(size.nodes):
            self._add_node(
                index,
                [
                    self.models[name]
                    for at, name in enumerate(names)
                    if (at - index) % size.nodes < COPIES
                ],
            )
        ids, records = list(self.workers), list[Record]()
        for index in range(size.instances):
            of = self.models[names[index % len(names)]]
            worker_id = ids[index * len(ids) // size.instances]
            one = self._instance(of, f"i{index:05}", worker_id)
            records.append(Record(instance=one, model=of, seen_on=frozenset({worker_id})))
            self._hear_of(worker_id, _stage(one, in_flight=index % 2))
        self.books = Books().put(*records)
        for _ in range(2):
            self.carry_out(self.tick(None))

    def tick(self, changed: Focus | None = Focus()) -> Plan:  # noqa: B008 - frozen
        """Decide. ``changed``: what is new beside the books; None: look at everything."""
        return tick(self.facts(changed), self.memory, self.rules)

    def facts(self, changed: Focus | None) -> ControlFacts:
        """Everything there is."""
        term = Term(
            epoch=Epoch(1),
            started_s=NOW_S - 1000,
            listening_since_s=NOW_S - 1000,
            deaf=False,
            announced=True,
        )
        return ControlFacts(
            now_s=self.now_s,
            term=term,
            books=self.books,
            workers=self.workers,
            nodes=self.nodes,
            models=self.models,
            demand=self.demand,
            awaited=frozenset(one.model for one in self.demand),
            drains=self.drains,
            world_version=self.version,
            changed=changed,
        )

    def carry_out(self, plan: Plan) -> None:
        """Keep what a tick hands on, and let time pass. Starts come to nothing."""
        self.books, self.memory = plan.books, plan.memory
        self.now_s += TICK_S

    def hear(self, worker_id: WorkerId, *stages: HeldStage) -> Focus:
        """A worker reports what it holds; what changed by that."""
        return self._judge(worker_id, held=stages)

    def report(self, index: int) -> Focus:
        """The request of an instance has ended, or another has come."""
        record = self._record(index)
        busy = record.instance.in_flight > 0
        stage = _stage(record.instance, in_flight=0 if busy else 1)
        return self._hear_of(record.instance.lead, stage)

    def report_all(self) -> Focus:
        """All workers and nodes report what they did before."""
        self.workers = {
            key: replace(view, heard_s=self.now_s) for key, view in self.workers.items()
        }
        return Focus(workers=frozenset(self.workers), nodes=frozenset(self.nodes))

    def move(self, index: int) -> Focus:
        """The row of an instance changes."""
        record = self._record(index)
        self.books = self.books.put(
            replace(record, instance=replace(record.instance, reason=f"at {self.now_s}"))
        )
        return Focus()

    def ask(self, index: int, *, count: int = 1, age_s: float = 0.1) -> Focus:
        """Requests wait for ``count`` of the models that have no instance, since ``age_s``."""
        cold = list(self.models)[self.size.instances :]
        names = [cold[(index + each) % len(cold)] for each in range(count)]
        self.demand = tuple(
            Demand(model=name, waiting=1, oldest_age_s=age_s, deadline_in_s=10.0) for name in names
        )
        return Focus()

    def load(self, index: int) -> WorkerId:
        """An instance of a cold model begins to load, on the worker that had the least.

        Returns where.
        """
        of = list(self.models.values())[
            self.size.instances + index % (self.size.models - self.size.instances)
        ]
        worker_id = min(self.workers, key=lambda one: len(self.workers[one].facts.held))
        one = replace(
            self._instance(of, "loads", worker_id),
            state=InstanceState.LOADING,
            state_since_s=self.now_s,
            served=False,
        )
        self.books = self.books.put(Record(instance=one, model=of, seen_on=frozenset({worker_id})))
        self._judge(
            worker_id,
            held=(
                *self.workers[worker_id].facts.held,
                replace(_stage(one, 0), state=HeldState.LOADING),
            ),
        )
        return worker_id

    def loaded(self, worker_id: WorkerId) -> Focus:
        """What a worker loads has become ready."""
        stages = (replace(one, state=HeldState.READY) for one in self.workers[worker_id].facts.held)
        return self._judge(worker_id, held=tuple(stages))

    def die(self, index: int) -> Focus:
        """The worker of an instance is dead."""
        return self._judge(self._record(index).instance.lead, liveness=Liveness.DEAD)

    def drain(self, index: int) -> Focus:
        """An operator wants a node to be empty."""
        node_id = self._record(index).instance.placements[0].node_id
        self.nodes[node_id] = replace(self.nodes[node_id], draining=True)
        self.drains = (NodeDrain(node_id=node_id, age_s=0.0),)
        self.version += 1
        return Focus(nodes=frozenset({node_id}))

    def register(self, index: int) -> Focus:
        """A model is registered."""
        one = model(f"new-{index:05}", part_bytes=PART_BYTES, keep_alive_s=1e6)
        self.models[one.name] = one
        return Focus(models=frozenset({one.name}))

    def crowd(self, *, load_s: float = 0.0) -> None:
        """Take all room away: devices have room for one instance or for none, four of five
        instances are busy, the others pinned.

        ``load_s``: what it took to load each instance. It is owed service in proportion.
        """
        for worker_id, view in self.workers.items():
            memory_bytes = (7 if view.facts.held else 2) * PART_BYTES
            device = replace(view.facts.device, memory_bytes=memory_bytes)
            self.workers[worker_id] = replace(view, facts=replace(view.facts, device=device))
        for index in range(self.size.instances):
            record, is_busy = self._record(index), index % 5 > 0
            one = replace(
                record.instance,
                state_since_s=self.now_s - 1.0,
                load_s=load_s,
                in_flight=int(is_busy),
            )
            self.books = self.books.put(replace(record, instance=one))
            self.models[one.model] = replace(self.models[one.model], pinned=not is_busy)
            self._hear_of(one.lead, _stage(one, in_flight=one.in_flight))
        for _ in range(2):
            self.carry_out(self.tick(None))

    def kept(self) -> "LargeCluster":
        """The same cluster, to which things can happen that do not happen to this one."""
        one = copy(self)
        one.workers, one.nodes, one.models = dict(self.workers), dict(self.nodes), dict(self.models)
        return one

    def _hear_of(self, worker_id: WorkerId, stage: HeldStage) -> Focus:
        """A worker reports one stage otherwise, or anew, and all others as they were."""
        view = self.workers[worker_id]
        aged_s = self.now_s - view.heard_s
        held = {one.instance_id: one for one in view.facts_at(view.facts_s + aged_s).held}
        held[stage.instance_id] = stage
        return self.hear(worker_id, *held.values())

    def _judge(self, worker_id: WorkerId, **changes: Any) -> Focus:
        """A worker reports, or is said to be otherwise."""
        view = self.workers[worker_id]
        self.workers[worker_id] = replace(
            view, facts=replace(view.facts, **changes), heard_s=self.now_s
        )
        self.version += 1
        return Focus(workers=frozenset({worker_id}))

    def _record(self, index: int) -> Record:
        return self.books.records[InstanceId(f"i{index % self.size.instances:05}")]

    def _instance(self, of: Model, instance_id: str, worker_id: WorkerId) -> Instance:
        one = instance(
            of.name,
            instance_id,
            worker_id=worker_id,
            device_bytes=of.device_bytes(of.spec.whole),
            served=True,
        )
        node_id = self.workers[worker_id].facts.node_id
        return replace(one, placements=(replace(one.placements[0], node_id=node_id),))

    def _add_node(self, index: int, copied: list[Model]) -> None:
        node_id = NodeId(f"n{index:04}")
        self.nodes[node_id] = NodeFacts(
            node_id=node_id,
            host="h",
            liveness=Liveness.ALIVE,
            nic_bytes_per_s=12.5e9,
            pool_bytes=10**12,
            pool_free_bytes=10**11,
            copies=tuple(
                Copy(
                    digest=one.digest,
                    node_id=node_id,
                    tier=Tier.HOST,
                    parts=tuple(range(6)),
                    size_bytes=one.spec.total_bytes,
                )
                for one in copied
            ),
            dataplane_port=1,
        )
        for each in range(self.size.workers_per_node):
            worker_id = WorkerId(f"w{index:04}-{each}")
            device = Device(
                kind=DeviceKind.CUDA,
                name="gpu",
                memory_bytes=80 * 10**9,
                # As measured: of equal devices not two are exactly equal.
                load_bytes_per_s=50e9 + 1e6 * ((index * 7 + each) % 501),
            )
            facts = WorkerFacts(
                worker_id=worker_id, node_id=node_id, device=device, liveness=Liveness.ALIVE
            )
            self.workers[worker_id] = WorkerView(
                facts=facts, heard_s=self.now_s, incarnation="a", epoch_seen=Epoch(1)
            )


def _stage(one: Instance, in_flight: int) -> HeldStage:
    placement = one.placements[0]
    return HeldStage(
        instance_id=one.instance_id,
        generation=one.generation,
        model=one.model,
        digest=one.digest,
        stage=placement.stage,
        state=HeldState.READY,
        device_bytes=placement.device_bytes,
        in_flight=in_flight,
    )
