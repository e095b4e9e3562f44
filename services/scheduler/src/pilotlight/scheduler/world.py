"""What this process knows of the world by listening: reports, demand, models.

Kept by leader and standbys alike.

Workers and nodes are the roster's (``common.roster``), which also has the clock that stands still
while nothing can be heard. A silent gateway's demand is dropped: it repeats it every 250 ms as long
as there is any.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.common.messages.demand import DemandVector
from pilotlight.common.roster import News, Roster
from pilotlight.policy.arrivals import ArrivalCount, ArrivalWindows, CounterLife
from pilotlight.policy.cluster import NodeFacts, WorkerFacts, WorkerView
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.ids import Epoch, GatewayId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.plan import NodeDrain
from pilotlight.policy.request import Demand
from pilotlight.scheduler.registered import StoredProfile
from pilotlight.scheduler.shown import Shown

YOUNGER_S = 1.0
"""A drain that is younger by so much than it was thought to be is another one: it was taken back,
and asked for again."""
GATEWAY_SILENT_S = 2.0
"""Eight demand vectors missed: no request waits there any more, or the gateway is gone. Longer than
it takes to notice that NATS is silent, which says nothing of gateways."""


@dataclass(slots=True)
class _Vector:
    demands: tuple[Demand, ...]
    heard_s: float
    listened_s: float
    """``heard_s`` on the roster's listening clock."""


@dataclass(slots=True)
class World:
    """The view. Methods that take something in say whether a decision may come out differently
    now.
    """

    listening_since_s: float
    roster: Roster = field(default_factory=Roster)
    models: dict[ModelName, Model] = field(default_factory=dict[ModelName, Model])
    profiles: tuple[StoredProfile, ...] = ()
    """Measured offline, the newest first."""
    arrivals: ArrivalWindows = field(default_factory=lambda: ArrivalWindows(0.0))
    version: int = 0
    """Counts changes of what could take a model: workers, and what they hold."""
    reconnects: int = 0
    """Counts them: the server may have come back without its memory."""
    shown: Shown = field(default_factory=Shown)
    """What workers say of their steps and their engines' starts."""
    draining_since_s: dict[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Nodes that an operator wants to be empty, and since when."""
    _changed_models: set[ModelName] = field(default_factory=set[ModelName])
    _changed_workers: set[WorkerId] = field(default_factory=set[WorkerId])
    _changed_nodes: set[NodeId] = field(default_factory=set[NodeId])
    _listed: Iterable[Model] = ()
    """As it was heard last: the same one again says nothing new."""
    _epoch_heard: Epoch = field(default=Epoch(0))
    _vectors: dict[GatewayId, _Vector] = field(default_factory=dict[GatewayId, _Vector])
    _merged: tuple[float, tuple[Demand, ...]] | None = None
    """What they tell together, as of a moment; None: to be merged."""
    _waiting: dict[ModelName, int] = field(default_factory=dict[ModelName, int])
    """Requests that wait, by model."""
    _waiting_since_s: dict[ModelName, float] = field(default_factory=dict[ModelName, float])
    _known: dict[WorkerId | NodeId, tuple[object, ...]] = field(
        default_factory=dict["WorkerId | NodeId", "tuple[object, ...]"]
    )
    """What decisions depend on, of each worker and node."""

    def follow(self, news: News) -> bool:
        """Take what the roster has heard."""
        changed = False
        self._changed_workers.update(news.workers)
        self._changed_nodes.update(news.nodes)
        for worker_id in news.workers:
            view = self.roster.worker(worker_id)
            self.shown.hear(worker_id, view.facts if view is not None else None)
            changed |= self._is_another(
                worker_id, None if view is None else (view.incarnation, *_essence(view.facts))
            )
        for node_id in news.nodes:
            facts = self.roster.node(node_id)
            changed |= self._is_another(
                node_id, None if facts is None else (facts.liveness, facts.draining)
            )
        self.version += changed
        return changed

    def _is_another(self, key: WorkerId | NodeId, essence: tuple[object, ...] | None) -> bool:
        before = self._known.pop(key, None)
        if essence is not None:
            self._known[key] = essence
        return before != essence

    def hear_demand(self, vector: DemandVector, now_s: float) -> bool:
        """Take a gateway's whole demand."""
        before = self._waiting
        if vector.demands:
            self._vectors[vector.gateway_id] = _Vector(
                vector.demands, now_s, self.roster.listened_s(now_s)
            )
        else:
            self._vectors.pop(vector.gateway_id, None)
        self._drop_silent(now_s)
        self._note_waiting(now_s)
        return before != self._waiting

    def is_awaited(self, model: ModelName) -> bool:
        """Whether some gateway held requests for a model when it was last looked at."""
        return model in self._waiting_since_s

    def listen(self, now_s: float) -> None:
        """Nothing was heard before now."""
        self.listening_since_s = now_s
        self.arrivals = ArrivalWindows(now_s)

    def hear_arrivals(self, life: CounterLife, counts: Iterable[ArrivalCount], now_s: float) -> int:
        """Take what a gateway tells of arrivals; how many are new."""
        accesses = self.arrivals.hear(life, counts, now_s, self.roster.listened_s(now_s))
        return sum(one.count for one in accesses)

    def hear_models(self, models: Iterable[Model]) -> bool:
        """Take the list of registered models."""
        if models is self._listed:
            return False
        self._listed = models
        listed, known = {model.name: model for model in models}, self.models
        changed = {name for name in {*listed, *known} if listed.get(name) != known.get(name)}
        if changed:
            self.models = listed
            self._changed_models |= changed
        return bool(changed)

    def hear_drains(self, ages_s: Mapping[NodeId, float], now_s: float) -> bool:
        """Take the list of nodes that are to be empty."""
        known = self.draining_since_s
        told = {node_id: now_s - ages_s[node_id] for node_id in sorted(ages_s)}
        # Each list is told a little late, so what is known stays where nothing has happened.
        self.draining_since_s = {
            node_id: known[node_id]
            if node_id in known and since_s - known[node_id] <= YOUNGER_S
            else since_s
            for node_id, since_s in told.items()
        }
        changed = known != self.draining_since_s
        self._changed_nodes |= known.keys() ^ told.keys()
        self.version += changed
        return changed

    def demand(self, now_s: float) -> tuple[tuple[Demand, ...], float]:
        """Waiting requests by model, over every gateway that is heard, as of the last word of them;
        and how long ago that was.
        """
        self._drop_silent(now_s)
        if self._merged is None:
            merged: dict[ModelName, Demand] = {}
            # As of the newest word: of thousands of models none is aged that was in it.
            as_of_s = max((one.heard_s for one in self._vectors.values()), default=now_s)
            for vector in self._vectors.values():
                older_s = as_of_s - vector.heard_s
                for demand in vector.demands:
                    if demand.waiting <= 0:
                        continue
                    aged = demand.aged(older_s) if older_s else demand
                    known = merged.get(demand.model)
                    merged[demand.model] = aged if known is None else _joined(known, aged)
            self._merged = as_of_s, tuple(merged[model] for model in sorted(merged))
        as_of_s, merged_now = self._merged
        return merged_now, now_s - as_of_s

    def _drop_silent(self, now_s: float) -> None:
        """Forget what gateways told that are not heard any more."""
        listened_s = self.roster.listened_s(now_s)
        for vector in self._vectors.values():
            # The clock was put back when this process found that it had stood still; what was heard
            # is not of the future.
            vector.listened_s = min(vector.listened_s, listened_s)
        heard = {
            key: one
            for key, one in self._vectors.items()
            if listened_s - one.listened_s <= GATEWAY_SILENT_S
        }
        if len(heard) < len(self._vectors):
            self._vectors = heard
            self._note_waiting(now_s)

    def _note_waiting(self, now_s: float) -> None:
        """After a change of the vectors."""
        self._merged = None
        waiting = dict[ModelName, int]()
        for vector in self._vectors.values():
            for one in vector.demands:
                waiting[one.model] = waiting.get(one.model, 0) + one.waiting
        since_s, self._waiting = self._waiting_since_s, waiting
        self._waiting_since_s = {
            model: since_s.get(model, now_s) for model, count in waiting.items() if count > 0
        }

    def waiting_since_s(self) -> Mapping[ModelName, float]:
        """When this process first heard that a request waits for a model, of all for which one
        does. Not written to later.
        """
        return self._waiting_since_s

    def take_changed(self) -> Focus:
        """What was heard of since the last call, by name.

        A new leader looks at everything first, and needs none of it.
        """
        changed = Focus(
            models=frozenset(self._changed_models),
            workers=frozenset(self._changed_workers),
            nodes=frozenset(self._changed_nodes),
        )
        self._changed_models, self._changed_workers, self._changed_nodes = set(), set(), set()
        return changed

    def workers(self) -> Mapping[WorkerId, WorkerView]:
        """Every worker with its liveness."""
        return self.roster.workers

    def nodes(self) -> Mapping[NodeId, NodeFacts]:
        """Every node with its liveness, and whether it is to be empty."""
        nodes = dict(self.roster.nodes)
        for node_id in self.draining_since_s:
            if node_id in nodes:
                nodes[node_id] = replace(nodes[node_id], draining=True)
        return nodes

    def drains(self, now_s: float) -> tuple[NodeDrain, ...]:
        """Nodes that are to be empty, and for how long."""
        return tuple(
            NodeDrain(node_id=node_id, age_s=now_s - since_s)
            for node_id, since_s in self.draining_since_s.items()
        )

    def hear_epoch(self, epoch: Epoch) -> None:
        """Take an epoch that another leader has announced."""
        self._epoch_heard = max(self._epoch_heard, epoch)

    def epoch_seen(self) -> Epoch:
        """Highest epoch that any worker or loader has obeyed, or was announced: a new leader must
        be above it, whatever the lease row says.
        """
        return max(self._epoch_heard, self.roster.epoch_seen)


def _essence(facts: WorkerFacts) -> tuple[object, ...]:
    """What decisions depend on; counters that change with every report are left out."""
    stages = tuple(
        (
            held.instance_id,
            held.generation,
            held.state,
            held.device_bytes,
            held.in_flight > 0,
            held.reason,
        )
        for held in facts.held
    )
    return (facts.liveness, facts.engine_up, facts.device, facts.health, stages)


def _joined(one: Demand, other: Demand) -> Demand:
    oldest = one if one.oldest_age_s >= other.oldest_age_s else other
    return replace(
        oldest,
        waiting=one.waiting + other.waiting,
        deadline_in_s=min(one.deadline_in_s, other.deadline_in_s),
    )
