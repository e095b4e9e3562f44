"""A cluster of a few nodes to which things happen at random, as control sees it: facts, and what
became of plans.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import (
    Copy,
    Device,
    DeviceHealth,
    DeviceKind,
    HealthState,
    HeldStage,
    HeldState,
    Liveness,
    NodeFacts,
    Tier,
    Transfer,
    WorkerFacts,
    WorkerView,
)
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.plan import ControlFacts, Plan, Refusal, Term
from pilotlight.policy.control.reconcile import drain_of, moved
from pilotlight.policy.estimates import with_estimates
from pilotlight.policy.ids import Digest, Epoch, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import InstanceEvent, step
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Estimate, Estimates, InstanceState, NodeDrain, Placement
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import instance as an_instance
from pilotlight.policy.testing import model

EPOCH = Epoch(3)
NODES = 4
WHOLE = (0, 1, 2, 3, 4, 5)
"""Parts of every model."""
START_S = 1000.0
GRAIN_S = 0.125
"""Times are multiples of this: sums of them are exact."""


@dataclass
class Cluster:
    """What happens follows from the seed alone."""

    rng: random.Random
    now_s: float = START_S
    books: Books = field(default_factory=Books)
    workers: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    nodes: dict[NodeId, NodeFacts] = field(default_factory=dict[NodeId, NodeFacts])
    models: dict[ModelName, Model] = field(default_factory=dict[ModelName, Model])
    demand: dict[ModelName, tuple[int, float]] = field(
        default_factory=dict[ModelName, "tuple[int, float]"]
    )
    drained_s: dict[NodeId, float] = field(default_factory=dict[NodeId, float])
    estimates: Estimates = field(default_factory=dict[ModelName, "tuple[Estimate, ...]"])
    evict: tuple[ModelName, ...] = ()
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    started: list[ModelName] = field(default_factory=list[ModelName])
    asking: list[Record] = field(default_factory=list[Record])
    deaf: bool = False
    version: int = 0
    count: int = 0
    changed_models: set[ModelName] = field(default_factory=set[ModelName])
    changed_workers: set[WorkerId] = field(default_factory=set[WorkerId])
    changed_nodes: set[NodeId] = field(default_factory=set[NodeId])

    @classmethod
    def of(cls, seed: int) -> "Cluster":
        """A cluster in which nothing has happened yet."""
        cluster = cls(random.Random(seed))
        for name in "abcdef":
            cluster.register(ModelName(name))
        for index in range(NODES):
            cluster.report_node(NodeId(f"n{index}"))
            for each in range(cluster.rng.randint(1, 4)):
                cluster.report_worker(WorkerId(f"w{index}{each}"))
        return cluster

    # What happens.

    def happen(self) -> None:
        """Let some time pass, and something happen."""
        self.now_s += (
            self.rng.choice((0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 8.0, 8.0, 40.0, 500.0)) * GRAIN_S
        )
        kinds: tuple[tuple[Callable[[], None], int], ...] = (
            (self._report, 20),
            (self._ask, 4),
            (self._settle, 6),
            (lambda: self.report_node(self.rng.choice(list(self.nodes))), 3),
            (self._judge_worker, 1),
            (self._judge_node, 1),
            (lambda: self.register(self.rng.choice(list(self.models))), 1),
            (self._pin, 3),
            (self._drain_node, 1),
            (self._evict, 1),
            (self._learn, 1),
            (self._go_deaf, 1),
            (self._delete, 1),
        )
        whats, weights = zip(*kinds, strict=True)
        for what in self.rng.choices(whats, weights, k=self.rng.randint(0, 6)):
            what()

    def press(self, names: str) -> None:
        """Requests have waited for long, for more models than there is room for."""
        for name in map(ModelName, names):
            self.register(name)
            self.demand[name] = 1, self.now_s - 80 * GRAIN_S

    def register(self, name: ModelName) -> None:
        """A model is registered, or its row changes."""
        rng = self.rng
        self.models[name] = model(
            name,
            digest=rng.choice(("", "", "", "shared", "other")),
            part_bytes=rng.choice((10, 20, 100)),
            pinned=rng.random() < 0.2,
            min_instances=int(rng.random() < 0.1),
            max_instances=rng.choice((1, 2, 3, 5)),
            keep_alive_s=rng.choice((1.0, 5.0, 60.0)),
        )
        self.changed_models.add(name)

    def report_node(self, node_id: NodeId) -> None:
        """A loader reports."""
        rng = self.rng
        known = sorted({one.digest for one in self.models.values()})
        digests = rng.sample(known, k=min(len(known), rng.randint(0, 2)))
        self.nodes[node_id] = NodeFacts(
            node_id=node_id,
            host="h",
            liveness=Liveness.ALIVE,
            nic_bytes_per_s=rng.choice((100.0, 100.0, 1000.0)),
            pool_bytes=rng.choice((10_000, 10_000, 200)),
            pool_free_bytes=0,
            copies=tuple(
                Copy(
                    digest=one,
                    node_id=node_id,
                    tier=Tier.HOST,
                    parts=rng.choice(((0,), (2, 3), WHOLE, WHOLE)),
                    size_bytes=60,
                )
                for one in digests
            ),
            transfers=tuple(
                Transfer(digest=Digest("d"), source="s", done_bytes=0, total_bytes=1)
                for _ in range(rng.choice((0, 0, 0, 1, 2)))
            ),
            draining=node_id in self.drained_s,
            dataplane_port=rng.choice((0, 1, 1, 1)),
        )
        self.changed_nodes.add(node_id)

    def report_worker(self, worker_id: WorkerId, stages: tuple[HeldStage, ...] = ()) -> None:
        """A worker reports."""
        rng, known = self.rng, self.workers.get(worker_id)
        again = known is not None and rng.random() < 0.9
        facts = WorkerFacts(
            worker_id=worker_id,
            node_id=NodeId(f"n{worker_id[1]}"),
            device=known.facts.device
            if known is not None and again
            else Device(
                kind=DeviceKind.CPU,
                name="d",
                memory_bytes=rng.choice((100, 150, 250, 700)),
                load_bytes_per_s=rng.choice((100.0, 101.0, 500.0)),
                granule_bytes=rng.choice((1, 1, 4)),
            ),
            liveness=Liveness.ALIVE,
            held=stages,
            engine_up=rng.random() < 0.98,
            health=DeviceHealth(
                state=rng.choice(
                    (HealthState.HEALTHY,) * 18 + (HealthState.DEGRADED, HealthState.FAILED)
                )
            ),
        )
        heard_s = self.now_s - rng.choice((0.0, 0.0, 1.0)) * GRAIN_S
        self.workers[worker_id] = WorkerView(
            facts=facts, heard_s=heard_s, incarnation="a", epoch_seen=EPOCH
        )
        self.changed_workers.add(worker_id)
        self.version += 1

    def _report(self) -> None:
        """A worker holds about what it should."""
        rng = self.rng
        everyone = [WorkerId(f"w{node}{each}") for node in range(NODES) for each in range(4)]
        worker_id = rng.choice(
            everyone if rng.random() < 0.2 else sorted(self.books.by_worker) or everyone
        )
        stages = [
            self._stage(record, placement.device_bytes)
            for record in self.books.on_worker(worker_id)
            for placement in record.instance.placements
            if placement.worker_id == worker_id and rng.random() < 0.95
        ]
        before = self.workers.get(worker_id)
        if before is not None and rng.random() < 0.3:
            wanted = {one.instance_id for one in stages}
            stages += [one for one in before.facts.held if one.instance_id not in wanted]
        self.report_worker(worker_id, tuple(stages))

    def _stage(self, record: Record, device_bytes: int) -> HeldStage:
        rng = self.rng
        states = (
            (HeldState.READY,) * 12
            + (HeldState.LOADING,) * 3
            + (HeldState.DRAINING, HeldState.FAILED, HeldState.EVICTED)
        )
        state = rng.choice(states)
        return HeldStage(
            instance_id=record.instance.instance_id,
            generation=record.instance.generation,
            model=record.model.name,
            digest=record.model.digest,
            stage=record.instance.placements[0].stage,
            state=state,
            device_bytes=device_bytes,
            in_flight=rng.choice((0, 1, 1)),
            idle_s=rng.choice((0.0, 1.0, 8.0, 80.0)) * GRAIN_S,
        )

    def _ask(self) -> None:
        name = self.rng.choice(list(self.models) or [ModelName("a")])
        if name in self.demand and self.rng.random() < 0.6:
            del self.demand[name]
        else:
            self.demand[name] = (
                self.rng.choice((1, 1, 20, 50)),
                self.now_s - self.rng.choice((0.0, 8.0, 80.0)) * GRAIN_S,
            )

    def _settle(self) -> None:
        """A start gets its room and its row, or neither."""
        if not self.asking:
            return
        record = self.asking.pop(0)
        name, instance = record.model.name, record.instance
        if self.rng.random() < 0.8:
            upstreams = tuple(self.rng.sample(sorted(self.nodes), k=self.rng.randint(0, 2)))
            placements = tuple(replace(one, upstreams=upstreams) for one in instance.placements)
            fetching = step(instance.state, InstanceEvent.FETCH_STARTED)
            after = replace(
                instance, state=fetching, state_since_s=self.now_s, placements=placements
            )
            self.books = self.books.put(replace(record, instance=after, tentative=False))
            self.started.append(name)
            return
        self.books = self.books.without((instance.instance_id,))
        transient = self.rng.random() < 0.2
        self.refusals.append(
            Refusal(
                model=name,
                worker_id=instance.lead,
                code="no_room",
                message="full",
                transient=transient,
            )
        )

    def _judge_worker(self) -> None:
        worker_id = self.rng.choice(list(self.workers) or [WorkerId("w00")])
        liveness = self.rng.choice((Liveness.SUSPECT, Liveness.DEAD, None))
        view = self.workers.pop(worker_id, None)
        if view is not None and liveness is not None:
            self.workers[worker_id] = replace(view, facts=replace(view.facts, liveness=liveness))
        self.changed_workers.add(worker_id)
        self.version += 1

    def _judge_node(self) -> None:
        node_id = self.rng.choice(list(self.nodes))
        liveness = self.rng.choice((Liveness.ALIVE, Liveness.SUSPECT, Liveness.DEAD))
        self.nodes[node_id] = replace(self.nodes[node_id], liveness=liveness)
        self.changed_nodes.add(node_id)

    def _pin(self) -> None:
        if self.models:
            name = self.rng.choice(list(self.models))
            self.models[name] = replace(self.models[name], pinned=not self.models[name].pinned)
            self.changed_models.add(name)

    def _drain_node(self) -> None:
        node_id = self.rng.choice(list(self.nodes))
        if self.drained_s.pop(node_id, None) is None:
            self.drained_s[node_id] = self.now_s - self.rng.choice((0.0, 200.0)) * GRAIN_S
        self.nodes[node_id] = replace(self.nodes[node_id], draining=node_id in self.drained_s)
        self.changed_nodes.add(node_id)
        self.version += 1

    def _evict(self) -> None:
        self.evict = (ModelName(self.rng.choice("abcdef")),)

    def _learn(self) -> None:
        name = self.rng.choice(list(self.models) or [ModelName("a")])
        learned = Estimate(
            model=name,
            device_kind=DeviceKind.CPU,
            fetch_bytes_per_s=self.rng.choice((0.0, 10.0, 1000.0)),
            load_bytes_per_s=self.rng.choice((0.0, 10.0, 1000.0)),
            prefill_s=0.1,
            cold_ttft_s=1.0,
            samples=1,
        )
        self.estimates = with_estimates(self.estimates, (learned,))

    def _go_deaf(self) -> None:
        self.deaf = not self.deaf and self.rng.random() < 0.5

    def _delete(self) -> None:
        if len(self.models) > 3 and self.rng.random() < 0.3:
            name = self.rng.choice(list(self.models))
            del self.models[name]
            self.changed_models.add(name)

    # What control is told, and what becomes of what it says.

    def facts(self) -> ControlFacts:
        """What is known now, and what changed since the last call."""
        changed = Focus(
            models=frozenset(self.changed_models),
            workers=frozenset(self.changed_workers),
            nodes=frozenset(self.changed_nodes),
        )
        self.changed_models, self.changed_workers, self.changed_nodes = set(), set(), set()
        evict, self.evict = self.evict, ()
        refusals, self.refusals = tuple(self.refusals), []
        started, self.started = tuple(self.started), []
        return ControlFacts(
            now_s=self.now_s,
            term=Term(
                epoch=EPOCH,
                started_s=START_S - 400,
                listening_since_s=START_S - 500,
                deaf=self.deaf,
                announced=True,
            ),
            books=self.books,
            workers=dict(self.workers),
            nodes=dict(self.nodes),
            models=dict(self.models),
            demand=tuple(
                Demand(
                    model=name,
                    waiting=waiting,
                    oldest_age_s=self.now_s - since_s,
                    deadline_in_s=10.0,
                )
                for name, (waiting, since_s) in sorted(self.demand.items())
            ),
            demand_seen_s={name: since_s for name, (_, since_s) in self.demand.items()},
            awaited=frozenset(self.demand),
            estimates=self.estimates,
            drains=tuple(
                NodeDrain(node_id=node_id, age_s=self.now_s - since_s)
                for node_id, since_s in self.drained_s.items()
            ),
            evict=evict,
            world_version=self.version,
            refusals=refusals,
            started=started,
            changed=changed,
        )

    def carry_out(self, plan: Plan) -> None:
        """Do what a plan says, as a leader does."""
        self.books = plan.books
        for change in (*plan.changes, *map(drain_of, plan.drain)):
            record = self.books.get(change.instance_id)
            if record is not None and record.is_row:
                after = moved(record.instance, change, EPOCH, self.now_s)
                self.books = self.books.put(replace(record, instance=after))
        for order in plan.start:
            assert order.choice.scheme is not None
            self.count += 1
            self._begin(order.model, f"i{self.count:04}", order.choice.scheme.placements)

    def _begin(self, of: Model, instance_id: str, placements: tuple[Placement, ...]) -> None:
        instance = replace(
            an_instance(
                of.name,
                instance_id,
                state=InstanceState.PLANNED,
                since_s=self.now_s,
                digest=of.digest,
            ),
            placements=placements,
            epoch=EPOCH,
        )
        record = Record(instance=instance, model=of, tentative=True)
        self.books = self.books.put(record)
        self.asking.append(record)
