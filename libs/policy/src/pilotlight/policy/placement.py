"""Which workers may take a stage of a model, and which may not, and why.

Without a policy of ``coldstart`` a newcomer shares its node's link equally with the transfers that
are reported there; with one, the books of fetches say what it gets, and whether it may.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import HealthState, HeldState, Liveness, NodeFacts, WorkerFacts
from pilotlight.policy.cost import stage_room
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionPlan,
    EvictionPolicy,
    EvictionRules,
    RoomRequest,
    plan_eviction,
)
from pilotlight.policy.eviction.candidates import CandidateFacts, MissFacts, on_device, registered
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.ids import InstanceId, ModelName, WorkerId
from pilotlight.policy.instance import ENDED, SERVING, STARTING
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.plan import Instance, InstanceState, Placement, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRules:
    """What an instance is owed for its load: to serve for a multiple of what that took."""

    min_loads: float = 2.0
    """Of its life, at least ``min_loads / (1 + min_loads)`` is then service, however many others
    wait."""
    limit_s: float = 60.0
    """However long its load took: requests that wait are given up in the end."""
    recent_s: float = 0.5
    """An instance that has been idle for longer is not between two requests of one client: it may
    go before its time."""

    def owed_s(self, instance: Instance) -> float:
        """How long an instance may serve before it makes room for others, in seconds since it
        became ready.
        """
        return min(self.min_loads * instance.load_s, self.limit_s)

    def has_served(self, instance: Instance, now_s: float) -> bool:
        """Whether an instance that serves has had what it is owed."""
        return now_s - instance.state_since_s >= self.owed_s(instance)

    def is_settling_in(self, instance: Instance, now_s: float) -> bool:
        """Whether an instance is in use, and too young to be evicted as soon as it is idle for a
        moment.
        """
        in_use = instance.idle_s(now_s) < self.recent_s
        return instance.state in SERVING and in_use and not self.has_served(instance, now_s)

    def keeps(self, instance: Instance, now_s: float) -> bool:
        """Whether an instance stays whatever it is worth: it is on its way, or owed service, or a
        group that has requests, of which the workers behind its lead say nothing.
        """
        busy = len(instance.placements) > 1 and instance.in_flight > 0
        return instance.state in STARTING or busy or self.is_settling_in(instance, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """How workers are chosen."""

    eviction: EvictionRules = field(default_factory=EvictionRules)
    policy: EvictionPolicy = field(default_factory=Lru)
    """The cache's, told of the same accesses and reports. It only orders here, which changes
    nothing in it."""
    service: ServiceRules = field(default_factory=ServiceRules)
    avoid_after_failure_s: float = 30.0
    """A worker on which the model just failed is taken only when there is no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that may take the stage."""

    worker: WorkerFacts
    node: NodeFacts
    free_bytes: int
    """Neither held nor promised to an instance on its way."""
    evictable_bytes: int
    """What the cache could free at most."""
    failed_here: bool = False

    @property
    def degraded(self) -> bool:
        """Its device is not as it should be."""
        return self.worker.health.state is HealthState.DEGRADED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A worker that may not, and why."""

    worker_id: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Workers by what they could do for one stage of one model."""

    fitting: tuple[Candidate, ...] = ()
    """Room is free."""
    makeable: tuple[Candidate, ...] = ()
    """Room can be made by eviction."""
    rejected: tuple[Rejection, ...] = ()


def candidates(
    model: Model,
    stage: Stage,
    snapshot: Snapshot,
    rules: PlacementRules,
    excluding: frozenset[WorkerId] = frozenset(),
    *,
    evicts: bool = True,
) -> Candidates:
    """Sort every worker into fitting (ParaServe's algorithm 1), makeable or rejected.

    1. the caller excludes it: it has just refused, or is left to models that have waited longer
    2. it is not alive, its device has failed, or its engine is down
    3. its node is not known, not alive, or draining
    4. it holds, or is about to hold, an instance of the model that serves or starts: a second one
       there adds nothing
    5. the least room is free: fitting
    6. eviction could free the least room: makeable
    7. otherwise there is no room

    Args:
        model: what is to be started.
        stage: the layers, [start, stop), that the worker is to hold.
        snapshot: workers, nodes and instances, as of its ``now_s``.
        rules: limits of eviction, and how long a failure counts.
        excluding: workers that rule 1 rejects.
        evicts: also say what eviction could free where enough is free.
    """
    nodes = {node.node_id: node for node in snapshot.nodes}
    on, models = by_worker(snapshot), {model.name: model for model in snapshot.models}
    fitting: list[Candidate] = []
    makeable: list[Candidate] = []
    rejected: list[Rejection] = []
    least = {
        granule_bytes: stage_room(model, stage, granule_bytes).least_bytes
        for granule_bytes in {worker.device.granule_bytes for worker in snapshot.workers}
    }
    for worker in snapshot.workers:
        node = nodes.get(worker.node_id)
        least_bytes = least[worker.device.granule_bytes]
        here = seen_on(worker, snapshot, on, models)
        refusal = _refusal(model, worker, node, here, excluding)  # 1 - 4
        if refusal is not None or node is None:
            rejected.append(
                Rejection(worker_id=worker.worker_id, reason=refusal or "its node is not known")
            )
            continue
        free_bytes = worker.device.memory_bytes - committed_bytes(worker, here)
        looks = evicts or free_bytes < least_bytes
        candidate = Candidate(
            worker=worker,
            node=node,
            free_bytes=free_bytes,
            evictable_bytes=evictable_bytes(worker, here, rules) if looks else 0,
            failed_here=_failed_here(model, worker, here, rules),
        )
        if candidate.free_bytes >= least_bytes:  # 5
            fitting.append(candidate)
        elif candidate.free_bytes + candidate.evictable_bytes >= least_bytes:  # 6
            makeable.append(candidate)
        else:  # 7
            reason = f"{least_bytes} bytes are needed, {candidate.free_bytes} are free, {candidate.evictable_bytes} could be freed"
            reason += _pins_in_the_way(candidate, least_bytes, here, rules)
            rejected.append(Rejection(worker_id=worker.worker_id, reason=reason))
    return Candidates(fitting=tuple(fitting), makeable=tuple(makeable), rejected=tuple(rejected))


def by_worker(snapshot: Snapshot) -> Mapping[WorkerId, list[Instance]]:
    """Instances by the workers on which they have a stage."""
    on: dict[WorkerId, list[Instance]] = defaultdict(list)
    for instance in snapshot.instances:
        if len(instance.placements) == 1:
            on[instance.placements[0].worker_id].append(instance)
            continue
        for worker_id in dict.fromkeys(placement.worker_id for placement in instance.placements):
            on[worker_id].append(instance)
    return on


def seen_on(
    worker: WorkerFacts,
    snapshot: Snapshot,
    on: Mapping[WorkerId, Sequence[Instance]],
    models: Mapping[ModelName, Model],
) -> Snapshot:
    """The snapshot with the instances and held models of one worker alone: what is asked of it is
    then no matter of all others.

    Args:
        worker: The worker.
        snapshot: Of all.
        on: Instances by worker.
        models: By name.
    """
    held = (models.get(name) for name in dict.fromkeys(one.model for one in worker.held))
    instances = tuple(on.get(worker.worker_id, ()))
    return replace(
        snapshot, instances=instances, models=tuple(one for one in held if one is not None)
    )


def committed_bytes(worker: WorkerFacts, snapshot: Snapshot) -> int:
    """Device bytes that are held, or promised to an instance that the worker does not report
    yet.
    """
    reported = {held.instance_id for held in worker.held}
    promised = sum(
        placement.device_bytes
        for instance_id, placement in _promised(worker, snapshot)
        if instance_id not in reported
    )
    return worker.used_bytes + promised


def room_on(worker: WorkerFacts, snapshot: Snapshot, rules: PlacementRules) -> int:
    """Device bytes that are free, or free as soon as they are asked for."""
    return (
        worker.device.memory_bytes
        - committed_bytes(worker, snapshot)
        + evictable_bytes(worker, snapshot, rules)
    )


def _promised(worker: WorkerFacts, snapshot: Snapshot) -> Iterator[tuple[str, Placement]]:
    for instance in snapshot.instances:
        if instance.state in STARTING:
            for placement in instance.placements:
                if placement.worker_id == worker.worker_id:
                    yield instance.instance_id, placement


def _refusal(
    model: Model,
    worker: WorkerFacts,
    node: NodeFacts | None,
    snapshot: Snapshot,
    excluding: frozenset[WorkerId],
) -> str | None:
    if worker.worker_id in excluding:  # 1
        return "it has just refused, or is left to those who have waited longer"
    unusable = why_unusable(worker, node)  # 2, 3
    if unusable is not None:
        return unusable
    for instance in snapshot.instances:  # 4
        if instance.model != model.name or instance.state not in STARTING | SERVING:
            continue
        if any(placement.worker_id == worker.worker_id for placement in instance.placements):
            return f"it has {instance.instance_id} of the same model"
    return None


def why_unusable(worker: WorkerFacts, node: NodeFacts | None) -> str | None:
    """Why nothing can be placed on a worker, whatever its room; None when it can."""
    if worker.liveness is not Liveness.ALIVE:
        return f"it is {worker.liveness.value}"
    if worker.health.state is HealthState.FAILED:
        return f"its device has failed: {worker.health.reason}"
    if not worker.engine_up:
        return "its engine is down"
    if node is None:
        return "its node is not known"
    if node.liveness is not Liveness.ALIVE:
        return f"its node is {node.liveness.value}"
    if node.draining:
        return "its node is draining"
    return None


def evictable_bytes(worker: WorkerFacts, snapshot: Snapshot, rules: PlacementRules) -> int:
    """What eviction could free on a worker at most, of what it holds and of what need not stay for
    now.
    """
    idle = tuple(one for one in worker.held if one.state is HeldState.READY and one.in_flight == 0)
    if not idle:
        return 0
    pinned = {one.name for one in snapshot.models if one.pinned}
    here = {one.instance_id: one for one in snapshot.instances if one.state not in ENDED}
    now_s, service, least_s = snapshot.now_s, rules.service, rules.eviction.min_residency_s
    size_bytes = 0
    # ``why_kept``, without a candidate of each: this is asked many times for each start.
    for held in idle:
        one = here.get(held.instance_id)
        if held.model in pinned or (one is None and now_s < least_s):
            continue
        if one is not None and (now_s - one.state_since_s < least_s or service.keeps(one, now_s)):
            continue
        size_bytes += held.device_bytes
    return size_bytes


def eviction_plan(
    model: Model, stage: Stage, candidate: Candidate, snapshot: Snapshot, rules: PlacementRules
) -> EvictionPlan:
    """What would go for the least room of a stage, and at what loss.

    The cache decides, by newer facts.

    Args:
        model: Whose stage it is.
        stage: What room is needed for.
        candidate: Where.
        snapshot: Its models, copies, arrivals and estimates say what a miss costs.
        rules: The policy, and what may stay.
    """
    worker = candidate.worker
    misses = MissFacts(estimates=snapshot.estimates, arrivals=snapshot.arrivals)
    request, found = _eviction(worker, candidate.node, snapshot, rules, misses)
    least_bytes = stage_room(model, stage, worker.device.granule_bytes).least_bytes
    request = replace(request, need_bytes=least_bytes, free_bytes=candidate.free_bytes)
    return plan_eviction(rules.policy, request, found, rules.eviction)


def _pins_in_the_way(
    candidate: Candidate, least_bytes: int, here: Snapshot, rules: PlacementRules
) -> str:
    """What would have to be unpinned for a stage, as the end of a sentence; empty where pins are
    not all that is in the way for long. What keeps a copy besides passes by itself: requests, loads
    and drains end, leases and what a load is owed run out, residency grows.
    """
    if not any(model.pinned for model in here.models):
        return ""
    request, found = _eviction(candidate.worker, candidate.node, here, rules, None)
    request = replace(
        request,
        need_bytes=least_bytes,
        free_bytes=candidate.free_bytes,
        protected=frozenset(),
    )
    at_rest = (replace(one, in_flight=0, leases=0, busy=False) for one in found)
    for_long = replace(rules.eviction, min_residency_s=0.0)
    unpin = plan_eviction(rules.policy, request, at_rest, for_long).unpin
    return f"; unpin {', '.join(unpin)} to make room" if unpin else ""


def _eviction(
    worker: WorkerFacts,
    node: NodeFacts | None,
    snapshot: Snapshot,
    rules: PlacementRules,
    misses: MissFacts | None,
) -> tuple[RoomRequest, tuple[EvictionCandidate, ...]]:
    """What the cache would ask of its policy.

    Instances that are owed service are protected: a start names them to the cache, which knows
    nothing of them.
    """
    here = {held.instance_id for held in worker.held}
    known = [
        one for one in snapshot.instances if one.instance_id in here and one.state not in ENDED
    ]
    named = {held.model for held in worker.held}
    facts = CandidateFacts(
        now_s=snapshot.now_s,
        models=registered(model for model in snapshot.models if model.name in named),
        since_s={
            **dict.fromkeys(here, 0.0),
            **{one.instance_id: one.state_since_s for one in known},
        },
        misses=misses,
    )
    owed = frozenset(owed_service(known, rules.service, snapshot.now_s))
    request = RoomRequest(need_bytes=0, free_bytes=0, now_s=snapshot.now_s, protected=owed)
    return request, on_device(worker, node, facts)


def owed_service(
    instances: Iterable[Instance], service: ServiceRules, now_s: float
) -> tuple[InstanceId, ...]:
    """Instances that stay whatever they are worth: those that are owed service for their load, and
    those of which a stage is ready and another still loads.
    """
    return tuple(one.instance_id for one in instances if service.keeps(one, now_s))


def _failed_here(
    model: Model, worker: WorkerFacts, snapshot: Snapshot, rules: PlacementRules
) -> bool:
    return any(
        instance.state is InstanceState.FAILED
        and instance.digest == model.digest
        and snapshot.now_s - instance.state_since_s < rules.avoid_after_failure_s
        and any(placement.worker_id == worker.worker_id for placement in instance.placements)
        for instance in snapshot.instances
    )
