"""Groups that go on when one of their stages is lost: another worker brings it, and the others keep
what they have on their devices.

::

    placements      worker 1        worker 2            worker 3
    ready           [0, 4)          [4, 8)
    worker 2 lost   [0, 4) 0..4                         [4, 8)      loading, a new generation
    loaded again    [0, 4)                              [4, 8)      ready

Requests lose their keys and values, as with every loss: the stages that are left drop them, and
they go on from their tokens when the group is whole again. Everything is in the row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pilotlight.policy.cluster import HealthState, HeldState, NodeFacts, Tier, WorkerView
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.plan import Room
from pilotlight.policy.control.reconcile import ENGINE_FAILED, WORKER_LOST, Change
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.instance import SERVING, STARTING, InstanceEvent
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.placement import why_unusable
from pilotlight.policy.plan import Instance, InstanceState, Placement

MAX_REPAIRS = 3
"""Of one group: one that loses stages more often is started anew, where the scheduler would put it
now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spares:
    """What could bring a stage."""

    books: Books
    workers: Mapping[WorkerId, WorkerView]
    nodes: Mapping[NodeId, NodeFacts]
    room: Room
    """What workers have free."""


def with_repairs(changes: Iterable[Change], spares: Spares) -> tuple[Change, ...]:
    """The changes, with repairs in the place of the failures of groups that can be repaired.

    Of two groups of one tick that would take the same worker, one is left to fail.

    Args:
        changes: As reports show them.
        spares: Where stages could go.
    """
    found: list[Change] = []
    taken: set[WorkerId] = set()
    for change in changes:
        record = spares.books.get(change.instance_id)
        repair = repair_of(change, record, spares, taken) if record is not None else None
        if repair is not None:
            taken |= {one.worker_id for one in repair.placements}
        found.append(repair or change)
    return tuple(found)


def repair_of(
    change: Change, record: Record, spares: Spares, taken: Iterable[WorkerId] = ()
) -> Change | None:
    """What becomes of a group instead of failing; None where it is to fail.

    1. a group that is ready or loads, and has not been repaired too often. One that consolidates
       has a lead that may go on alone, or is replaced
    2. one stage is lost, by its worker or its engine; a stage that cannot be loaded would not be
       loaded elsewhere either
    3. some worker has free room for the stage on its device, and its node in the host pool:
       nothing is evicted for it, and no worker is taken that has the model or had a stage of the
       group. Of several the one whose node lacks the fewest bytes, then the roomiest
    4. the others keep their stages: nothing is fetched for them

    Args:
        change: The failure.
        record: The group.
        spares: Where its stage could go.
        taken: Workers that others take.
    """
    instance, model = record.instance, record.model
    if (
        change.events != (InstanceEvent.FAIL,)
        or len(instance.placements) < 2
        or instance.state not in (InstanceState.READY, InstanceState.LOADING)
        or instance.repairs >= MAX_REPAIRS
    ):  # 1
        return None
    code = change.reason.partition(":")[0]
    if len(change.lost) != 1 or code not in (WORKER_LOST, ENGINE_FAILED):  # 2
        return None
    (lost,) = (one for one in instance.placements if one.worker_id == change.lost[0])
    spare = _spare(lost, record, spares, frozenset(taken))  # 3
    if spare is None:
        return None
    placements = tuple(
        spare if one is lost else _kept(one, instance, spares.workers)
        for one in instance.placements
    )
    return replace(
        change,
        events=(InstanceEvent.STAGE_LOST,),
        placements=placements,
        lost=(),
        reason=f"{change.reason}; {spare.worker_id} of {spare.node_id} brings its layers "
        f"[{lost.stage.start}, {lost.stage.stop}) of {model.spec.num_layers}",
    )


def _kept(
    placement: Placement, instance: Instance, workers: Mapping[WorkerId, WorkerView]
) -> Placement:
    """Rule 4. A stage that was still loading goes on with that."""
    view = workers.get(placement.worker_id)
    held = view.held(instance.instance_id) if view is not None else None
    if held is None or held.state is not HeldState.READY:
        return placement
    return replace(placement, held=placement.stage, source="", fetch_bytes=0, fetch_deadline_s=None)


def _spare(
    lost: Placement, record: Record, spares: Spares, taken: frozenset[WorkerId]
) -> Placement | None:
    """Rule 3."""
    had = {one.worker_id for one in record.instance.placements} | record.seen_on | taken
    found: list[tuple[bool, int, int, WorkerId, Placement]] = []
    for worker_id, view in spares.workers.items():
        node = spares.nodes.get(view.facts.node_id)
        if (
            worker_id in had
            or node is None
            or why_unusable(view.facts, node) is not None
            or _has(record.model, worker_id, spares.books)
        ):
            continue
        free_bytes, granule_bytes = spares.room(worker_id)
        needed = stage_room(record.model, lost.stage, granule_bytes)
        missing_bytes = _pool_bytes(record.model, lost.stage, node)
        if free_bytes < needed.least_bytes or missing_bytes > node.pool_free_bytes:
            continue
        placement = Placement(
            worker_id=worker_id,
            node_id=view.facts.node_id,
            stage=lost.stage,
            device_bytes=max(needed.least_bytes, min(lost.device_bytes, free_bytes)),
        )
        degraded = view.facts.health.state is HealthState.DEGRADED
        found.append((degraded, missing_bytes, -free_bytes, worker_id, placement))
    return min(found, key=lambda one: one[:4])[4] if found else None


def _has(model: Model, worker_id: WorkerId, books: Books) -> bool:
    """Whether a worker has an instance of the model, or is to have one."""
    instances = (books.records[one].instance for one in books.by_worker.get(worker_id, ()))
    return any(one.model == model.name and one.state in STARTING | SERVING for one in instances)


def _pool_bytes(model: Model, stage: Stage, node: NodeFacts) -> int:
    """What a node's host pool is to take of a stage that it does not have."""
    copies = [one for one in node.copies if one.digest == model.digest and one.tier is Tier.HOST]
    have = {part for one in copies for part in one.parts}
    missing = (part for part in model.spec.parts_of(stage) if part not in have)
    return node.pool_room_bytes(tuple(model.spec.part_bytes[part] for part in missing))
