"""Emptying a node: which instances leave it now, which wait for their replacement, which copies are
struck from its host pool.

Nothing is placed on a node that drains: ``placement`` sees to that. What is there leaves within a
bounded time, whatever happens elsewhere: at once where no request needs it, else when its
replacement serves, else when there is no room for one or it takes too long. Leaving is draining:
requests in flight end where they run.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import NodeFacts, Tier
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.placement import PlacementRules, candidates
from pilotlight.policy.plan import Instance, Snapshot
from pilotlight.policy.scaling import Drain, Held


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRules:
    """Figures of the decision."""

    replace_within_s: float = 30.0
    """So long after it was asked for, a drain waits for no replacement any more."""
    recent_s: float = 10.0
    """An instance whose last request ended within this time is in use."""
    settle_s: float = 1.0
    """After an instance became ready, the requests that waited for it have this long to reach it.
    """
    placement: PlacementRules = field(default_factory=PlacementRules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model that is to have one more instance elsewhere, and why."""

    model: ModelName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """What to do about instances on nodes that drain. Empty when there are none."""

    drains: tuple[Drain, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    """Until it serves elsewhere; also while its start is under way, for a start without demand is
    cancelled."""
    held: tuple[Held, ...] = ()
    """What stays for now, and why."""


def leaving(snapshot: Snapshot) -> tuple[Instance, ...]:
    """Instances that start or serve with a stage on a node that drains."""
    drained = {drain.node_id for drain in snapshot.drains}
    return tuple(
        one
        for one in snapshot.instances
        if one.state in STARTING | SERVING and _is_on(one, drained)
    )


def staying(snapshot: Snapshot) -> Snapshot:
    """The snapshot without what leaves: scaling neither counts it nor drains it, so that
    replacements fit within the bounds.
    """
    gone = {one.instance_id for one in leaving(snapshot)}
    return replace(
        snapshot, instances=tuple(one for one in snapshot.instances if one.instance_id not in gone)
    )


def plan_drain(snapshot: Snapshot, rules: DrainRules) -> DrainPlan:
    """For each instance that leaves:

    1. its model was deleted, or changed its digest: it drains
    2. another instance of the model serves elsewhere: it drains
    3. the drain was asked for too long ago to wait for anything: it drains
    4. it is not needed (nothing waits, nothing runs, not used of late, no minimum to keep): it
       drains
    5. its replacement is under way: it stays until that serves
    6. there is room elsewhere, or it can be made: a replacement is wanted, and it stays until that
       serves
    7. no room elsewhere, but it still starts, or has just become ready: it stays for the requests
       that wait for it
    8. no room elsewhere: it drains
    """
    drains: list[Drain] = []
    wanted: dict[ModelName, Wanted] = {}
    held: list[Held] = []
    models = {model.name: model for model in snapshot.models}
    gone = leaving(snapshot)
    for instance in gone:
        why = _why_it_drains(
            instance, models.get(instance.model), snapshot, rules, {one.instance_id for one in gone}
        )
        if why.drains:
            drains.append(
                Drain(instance_id=instance.instance_id, model=instance.model, reason=why.reason)
            )
            continue
        held.append(Held(model=instance.model, reason=why.reason))
        if why.replaces:
            reason = f"{instance.instance_id} leaves a node that is being drained"
            wanted.setdefault(instance.model, Wanted(model=instance.model, reason=reason))
    return DrainPlan(drains=tuple(drains), wanted=tuple(wanted.values()), held=tuple(held))


@dataclass(frozen=True, slots=True)
class _Verdict:
    drains: bool
    reason: str
    replaces: bool = False


def _why_it_drains(
    instance: Instance,
    model: Model | None,
    snapshot: Snapshot,
    rules: DrainRules,
    gone: Set[InstanceId],
) -> _Verdict:
    if model is None or model.digest != instance.digest:  # 1
        return _Verdict(drains=True, reason="its model was deleted, or has another digest now")
    elsewhere = [
        one
        for one in snapshot.instances
        if one.model == model.name and one.digest == model.digest and one.instance_id not in gone
    ]
    if any(one.state in SERVING for one in elsewhere):  # 2
        return _Verdict(drains=True, reason="its node is being drained; the model serves elsewhere")
    nodes = {placement.node_id for placement in instance.placements}
    age_s = max(drain.age_s for drain in snapshot.drains if drain.node_id in nodes)
    if age_s >= rules.replace_within_s:  # 3
        return _Verdict(
            drains=True,
            reason=f"its node is being drained, and no replacement served within {age_s:.0f} s",
        )
    if not _is_needed(instance, model, snapshot, rules):  # 4
        return _Verdict(drains=True, reason="its node is being drained; nobody needs it")
    if any(one.state in STARTING for one in elsewhere):  # 5
        return _Verdict(drains=False, reason="its replacement starts", replaces=True)
    found = candidates(model, model.spec.whole, snapshot, rules.placement)
    if found.fitting or found.makeable:  # 6
        return _Verdict(drains=False, reason="its replacement is asked for", replaces=True)
    since_s = snapshot.now_s - instance.state_since_s
    if instance.state in STARTING or since_s < rules.settle_s:  # 7
        return _Verdict(drains=False, reason="there is no room elsewhere for those who wait for it")
    return _Verdict(
        drains=True, reason="its node is being drained, and there is no room elsewhere"
    )  # 8


def _is_needed(instance: Instance, model: Model, snapshot: Snapshot, rules: DrainRules) -> bool:
    if model.scaling.min_instances > 0 or instance.in_flight > 0:
        return True
    if any(one.model == model.name and one.waiting > 0 for one in snapshot.demand):
        return True
    return (
        instance.state in SERVING
        and instance.served
        and snapshot.now_s - instance.last_used_s < rules.recent_s
    )


def _is_on(instance: Instance, nodes: Set[NodeId]) -> bool:
    return any(placement.node_id in nodes for placement in instance.placements)


def copies_to_strike(node: NodeFacts, needed: Set[Digest]) -> tuple[Digest, ...]:
    """Host copies that a node that drains gives up: no lease reads them, none is being fetched, no
    instance there needs them.
    """
    fetched = {transfer.digest for transfer in node.transfers}
    return tuple(
        copy.digest
        for copy in node.copies
        if copy.tier is Tier.HOST
        and copy.leases == 0
        and copy.digest not in needed
        and copy.digest not in fetched
    )
