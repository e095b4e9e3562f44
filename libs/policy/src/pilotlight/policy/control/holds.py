"""What every worker and node is to hold, made of the books alone.

A hold is the whole desired state of its receiver.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from pilotlight.policy.cluster import FetchPriority, HeldState, Member, NodeFacts, WorkerView
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.ids import Digest, Generation, InstanceId, NodeId, WorkerId
from pilotlight.policy.instance import BRINGING, SERVING
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.multicast import chains_of
from pilotlight.policy.plan import Instance, InstanceState

Upstreams = Mapping[tuple[NodeId, Digest], tuple[NodeId, ...]]
"""The nodes from which a node takes the parts of a model, the first to be asked first."""


class Wanted(Protocol):
    """A stage that a worker is to hold, as far as its report can contradict it."""

    @property
    def instance_id(self) -> InstanceId:
        """Which it is of."""
        ...

    @property
    def generation(self) -> Generation:
        """Of its instance."""
        ...

    @property
    def draining(self) -> bool:
        """As in ``StageHold``."""
        ...


class Essence(NamedTuple):
    """What makes a stage another one to hold than that before."""

    instance_id: InstanceId
    generation: Generation
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHold:
    """One stage that a worker is to hold. Idempotent by (instance_id, generation)."""

    instance_id: InstanceId
    generation: Generation
    model: Model
    stage: Stage
    device_bytes: int
    """Granted room: parameters plus KV."""
    draining: bool
    """Take no new request; the stage is let go when the last one has ended."""
    drain_within_s: float | None
    """While ``draining``: how long requests may run on before they go on elsewhere. None: until
    they end."""
    trace_parent: str
    members: tuple[Member, ...] = ()
    """The group, in the order of its stages, without addresses; empty where one worker holds the
    model."""
    grown_from: InstanceId | None = None
    """As in ``Placement``."""

    @property
    def essence(self) -> Essence:
        """What makes it another hold than that before."""
        return Essence(self.instance_id, self.generation, self.draining)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFetch:
    """Parts of one model that a node is to fetch for an instance.

    The instance is on its way, or a stage of it grows.
    """

    instance_id: InstanceId
    generation: Generation
    model: Model
    parts: tuple[int, ...]
    trace_parent: str
    upstreams: tuple[NodeId, ...]
    priority: FetchPriority = FetchPriority.COLD_START

    @property
    def essence(self) -> tuple[object, ...]:
        """What makes it another fetch than that before."""
        return self.instance_id, self.generation, self.upstreams


def stages_of(worker_id: WorkerId, books: Books) -> tuple[StageHold, ...]:
    """Everything that one worker is to hold, by instance."""
    holds = [
        hold
        for record in books.on_worker(worker_id)
        for hold in _stages_of(_Same(record), worker_id)
    ]
    return tuple(sorted(holds, key=lambda hold: hold.instance_id))


class _Same:
    """A record as a key: it is equal to itself alone, and its fields are not hashed."""

    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        self.record = record

    def __hash__(self) -> int:
        return id(self.record)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.record is self.record


@lru_cache(maxsize=1024)
def _stages_of(of: _Same, worker_id: WorkerId) -> tuple[StageHold, ...]:
    """Of one instance on one worker, which has dozens and is told of all when one has changed."""
    record = of.record
    return tuple(
        StageHold(
            instance_id=record.instance.instance_id,
            generation=record.instance.generation,
            model=record.model,
            stage=placement.stage,
            device_bytes=placement.device_bytes,
            draining=record.instance.state is InstanceState.DRAINING,
            drain_within_s=record.instance.drain_within_s,
            trace_parent=record.trace_parent,
            members=members_of(record.instance),
            grown_from=placement.grown_from,
        )
        for placement in record.instance.placements
        if placement.worker_id == worker_id
    )


def essences_of(worker_id: WorkerId, books: Books) -> list[tuple[Essence, Instance]]:
    """The same in short, each with its instance: most looks at a worker find that it was told."""
    found = [
        (
            Essence(
                record.instance.instance_id,
                record.instance.generation,
                record.instance.state is InstanceState.DRAINING,
            ),
            record.instance,
        )
        for record in books.on_worker(worker_id)
        for placement in record.instance.placements
        if placement.worker_id == worker_id
    ]
    return sorted(found, key=lambda one: one[0].instance_id)


def members_of(instance: Instance) -> tuple[Member, ...]:
    """An instance's workers as a group; none where it has one alone."""
    if len(instance.placements) < 2:
        return ()
    members = (
        Member(worker_id=one.worker_id, node_id=one.node_id, stage=one.stage)
        for one in instance.placements
    )
    return tuple(sorted(members, key=lambda member: member.stage.start))


def reached_at(
    member: Member,
    nodes: Mapping[NodeId, NodeFacts],
    workers: Mapping[WorkerId, WorkerView],
    of: InstanceId,
) -> Member:
    """A member with its address, as far as reports tell.

    Args:
        member: Of an instance's group.
        nodes: Nodes by name: the host.
        workers: Workers by id: the port.
        of: The instance.
    """
    node, worker = nodes.get(member.node_id), workers.get(member.worker_id)
    held = worker.held(of) if worker is not None else None
    return replace(
        member,
        host=node.dataplane_host if node is not None else "",
        port=held.port if held is not None else 0,
    )


def fetches_of(node_id: NodeId, books: Books, upstreams: Upstreams) -> tuple[PartFetch, ...]:
    """Everything that one node is to fetch, and from whom, by instance.

    The parts of instances that are on their way, and those of the added layers where a stage grows.
    The latter serve no request sooner, so they yield to what cold starts wait for: their group
    answers meanwhile.
    """
    fetches = [
        PartFetch(
            instance_id=record.instance.instance_id,
            generation=record.instance.generation,
            model=record.model,
            parts=parts,
            trace_parent=record.trace_parent,
            upstreams=upstreams.get((node_id, record.model.digest), ()),
            priority=(
                FetchPriority.PREFETCH
                if record.instance.state in SERVING
                else FetchPriority.COLD_START
            ),
        )
        for record in books.bringing_on(node_id)
        for placement in record.instance.placements
        if placement.node_id == node_id and (parts := placement.parts_of(record.model.spec))
    ]
    return tuple(sorted(fetches, key=lambda fetch: fetch.instance_id))


def upstreams_of(records: Iterable[Record], nodes: Mapping[NodeId, NodeFacts]) -> Upstreams:
    """The nodes that each node asks for the parts that it is to fetch (BlitzScale, section 5.1).
    Made of rows and reports alone, so that every leader makes the same.
    """
    starting = [record for record in records if record.instance.state in BRINGING]
    models = {record.model.digest: record.model for record in starting}
    told: dict[tuple[NodeId, Digest], tuple[NodeId, ...]] = {}
    for digest, model in models.items():
        plan = chains_of(model, nodes.values(), [record.instance for record in starting])
        for node_id, upstreams in plan.upstreams.items():
            told[node_id, digest] = tuple(upstreams)
    return told


def upstreams_at(
    node_ids: Iterable[NodeId], books: Books, nodes: Mapping[NodeId, NodeFacts]
) -> Upstreams:
    """The nodes that some nodes ask; of models that start elsewhere nothing."""
    here = (record for node_id in node_ids for record in books.bringing_on(node_id))
    digests = dict.fromkeys(record.instance.digest for record in here)
    return upstreams_of((record for digest in digests for record in books.of_digest(digest)), nodes)


def disagreement(holds: Iterable[Wanted], worker: WorkerView) -> str | None:
    """What a worker's report shows otherwise than it was told; None when it agrees.

    1. it holds a stage that it is not to hold (a stage that it drains is on its way out)
    2. it does not hold a stage that it is to hold; one that is to drain may be gone already
    3. it holds a stage at an older generation; one that drains keeps the number that it began with
    4. it is not draining a stage that it is to drain
    """
    wanted = {one.instance_id: one for one in holds}
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
            return (
                f"it holds {instance_id} at generation {stage.generation}, not {desired.generation}"
            )
    missing = [
        one.instance_id
        for one in wanted.values()
        if one.instance_id not in held and not one.draining
    ]  # 2
    return f"it does not hold {missing[0]}" if missing else None
