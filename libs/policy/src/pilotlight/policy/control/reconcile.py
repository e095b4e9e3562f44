"""From reports to events of instances.

Pure: instances, workers and the time in; changes with reasons out.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from pilotlight.policy.cluster import HeldStage, HeldState, Liveness, WorkerView
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.splitting import Settled, settled
from pilotlight.policy.ids import Epoch, Generation, InstanceId, WorkerId
from pilotlight.policy.instance import ENDED, SERVING, STARTING, InstanceEvent, path, step
from pilotlight.policy.liveness import DEAD_AFTER_S
from pilotlight.policy.phase import Moment
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.policy.scaling import Drain
from pilotlight.policy.targets import Retarget

WORKER_LOST, ENGINE_FAILED = "worker_lost", "engine_failed"
"""Codes of the taxonomy (``common.errors``): an instance's reason begins with one, and clients are
told it."""

_FREE = frozenset({HeldState.EVICTED, HeldState.FAILED})
"""Takes no room any more; the worker only waits to be told that it may forget it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Legal moves of one instance, in order, and why."""

    instance_id: InstanceId
    events: tuple[InstanceEvent, ...]
    reason: str
    heard_s: float = 0.0
    """When the report came that says so; 0 where silence does."""
    loaded: Moment | None = None
    """When the last stage of an instance that became ready was loaded, as its worker says."""
    drain_within_s: float | None = None
    """How long its requests may run on when it drains; None: until they end."""
    placements: tuple[Placement, ...] = ()
    """Its stages from now on, where a stage grows or its lead moves; empty: as they were."""
    become: tuple[Placement, ...] = ()
    """Stages that are instances of their own from now on."""
    targets: int | None = None
    """How many instances it is to become; None: as many as before."""
    lost: tuple[WorkerId, ...] = ()
    """Of a group that fails: the workers by which it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileRules:
    """Figures of the judgement."""

    term_started_s: float
    """Reports that are missing since then are missing; what was missed before says nothing."""
    hold_deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One placement beside what its worker says of it."""

    placement: Placement
    worker: WorkerView | None
    held: HeldStage | None
    dead: bool
    absent: bool
    """A report that is younger than the instance's last change does not list the stage."""


def reconcile(
    tracked: Iterable[Record],
    workers: Mapping[WorkerId, WorkerView],
    now_s: float,
    rules: ReconcileRules,
) -> tuple[Change, ...]:
    """What the reports say of each instance.

    1. ended: nothing
    2. draining, and no live worker holds a stage of it: released
    3. a worker of it is dead: failed
    4. a stage failed: failed, with the worker's reason
    5. a stage was evicted, or its worker lets it go by itself: it drains; if none is left it is
       released with that
    6. a stage that was held is not held any more: the worker was started anew, failed
    7. a live worker has not taken up its stage within the deadline: failed
    8. every stage is ready, and those of a group are joined: ready, with the moves that were missed
       in between. What stages say that had not heard of a repair yet does not count
    9. some stage is held: loading
    10. a group whose lead has the whole model, or that is a shorter pipeline: what comes of the
        others (``splitting``); they are no part of it any more, so that the rules before look at
        those that stay alone

    Args:
        tracked: The instances that are looked at.
        workers: What their workers say, with liveness.
        now_s: The moment, monotonic.
        rules: Deadlines.
    """
    changes: list[Change] = []
    for one in tracked:
        parts = [
            _part(one.instance, placement, workers, now_s, rules)
            for placement in one.instance.placements
        ]
        change = _judge(one, parts, now_s, rules)
        if change is not None:
            changes.append(change)
    return tuple(changes)


def _judge(one: Record, parts: list[_Part], now_s: float, rules: ReconcileRules) -> Change | None:
    instance = one.instance
    state = instance.state
    heard_s = max((part.worker.heard_s for part in parts if part.worker is not None), default=0.0)

    def change(reason: str, *events: InstanceEvent) -> Change:
        return Change(
            instance_id=instance.instance_id, events=events, reason=reason, heard_s=heard_s
        )

    if state in ENDED:  # 1
        return None
    held = {part.placement.worker_id: part.held for part in parts if part.held is not None}
    group = settled(instance, held) if state is InstanceState.CONSOLIDATING else None
    if group is not None:  # 10
        staying = {one.worker_id for one in group.stays}
        parts = [part for part in parts if part.placement.worker_id in staying]
    all_free = all(
        part.dead or part.absent or (part.held is not None and part.held.state in _FREE)
        for part in parts
    )
    if state is InstanceState.DRAINING:  # 2
        return change(instance.reason, InstanceEvent.RELEASED) if all_free else None
    failures = [(part, _failure(one, part, len(parts), now_s, rules)) for part in parts]
    lost = {part.placement.worker_id: why for part, why in failures if why is not None}
    if lost:  # 3, 4, 6, 7
        failed = change(next(iter(lost.values())), InstanceEvent.FAIL)
        return replace(failed, lost=tuple(lost))
    leaving = next(
        (part.held for part in parts if part.held is not None and part.held.state in _LEAVING), None
    )
    if leaving is not None:  # 5
        reason = leaving.reason or f"its worker reports it as {leaving.state.value}"
        return change(reason, InstanceEvent.DRAIN, *((InstanceEvent.RELEASED,) if all_free else ()))
    if group is not None:
        return _settling(instance, group, change)
    if state in SERVING:
        return None
    stages = [part.held for part in parts if part.held is not None]
    loaded = len(stages) == len(parts) and all(
        one.state is HeldState.READY
        and (not instance.repairs or one.generation >= instance.generation)
        for one in stages
    )
    if loaded and (len(parts) == 1 or stages[0].open):  # 8
        ready = change("every stage is ready", *path(state, InstanceState.READY))
        return replace(ready, loaded=_last_loaded(stages))
    if stages and state is not InstanceState.LOADING:  # 9
        return change("a worker loads its stage", *path(state, InstanceState.LOADING))
    return None


def _settling(instance: Instance, group: Settled, change: Callable[..., Change]) -> Change | None:
    """Rule 10: a worker has all layers, or some have them together; None where nothing has changed
    since that was written.
    """
    if not group.pending:
        reason, events = "a worker has the whole model", (InstanceEvent.CONSOLIDATION_DONE,)
        if len(group.stays) > 1:
            reason = f"{len(group.stays)} workers have the whole model together"
    elif group.placements != instance.placements or group.become:
        reason, events = f"{len(group.pending)} more are to have the whole model", ()
    else:
        return None
    if group.become:
        reason += f", and {len(group.become)} more have become instances"
    done = change(reason, *events)
    return replace(done, placements=group.placements, become=group.become, targets=group.targets)


def _last_loaded(stages: Iterable[HeldStage]) -> Moment | None:
    moments = [stage.loaded for stage in stages if stage.loaded is not None]
    return max(moments, key=lambda moment: moment.at_s + moment.wall_offset_s, default=None)


_LEAVING = frozenset({HeldState.EVICTED, HeldState.DRAINING})


def _failure(
    one: Record, part: _Part, stages: int, now_s: float, rules: ReconcileRules
) -> str | None:
    """Rules 3, 4, 6 and 7 for one of an instance's stages."""
    instance, worker_id = one.instance, part.placement.worker_id
    if part.dead:  # 3
        return f"{WORKER_LOST}: worker {worker_id} is gone"
    if part.held is not None and part.held.state is HeldState.FAILED:  # 4
        return part.held.reason or f"{ENGINE_FAILED}: worker {worker_id} could not load its stage"
    if not part.absent:
        return None
    loaded_alone = instance.state is InstanceState.LOADING and stages == 1
    if instance.state in SERVING or worker_id in one.seen_on or loaded_alone:  # 6
        return f"{WORKER_LOST}: worker {worker_id} was started anew and does not hold it any more"
    waited_s = now_s - max(instance.state_since_s, rules.term_started_s)
    if waited_s > rules.hold_deadline_s:  # 7
        return f"{ENGINE_FAILED}: worker {worker_id} did not take up its stage within {rules.hold_deadline_s:g} s"
    return None


def _part(
    instance: Instance,
    placement: Placement,
    workers: Mapping[WorkerId, WorkerView],
    now_s: float,
    rules: ReconcileRules,
) -> _Part:
    worker = workers.get(placement.worker_id)
    since_s = max(instance.state_since_s, rules.term_started_s)
    if worker is None:
        return _Part(
            placement=placement,
            worker=None,
            held=None,
            dead=now_s - since_s >= DEAD_AFTER_S,
            absent=False,
        )
    held = worker.held(instance.instance_id)
    return _Part(
        placement=placement,
        worker=worker,
        held=held,
        dead=worker.facts.liveness is Liveness.DEAD
        and now_s - rules.term_started_s >= _dead_grace_s(worker, rules),
        absent=held is None and worker.heard_s > since_s,
    )


def next_judgement_s(
    one: Record, workers: Mapping[WorkerId, WorkerView], after_s: float, rules: ReconcileRules
) -> float:
    """When silence alone could next change an instance, by rules 2, 3 and 7; infinite: never.

    Args:
        one: The instance.
        workers: What its workers say, with liveness.
        after_s: Moments before this one do not count, monotonic.
        rules: Deadlines.
    """
    instance = one.instance
    if not one.is_row:
        return math.inf
    since_s = max(instance.state_since_s, rules.term_started_s)
    times: list[float] = []
    for placement in instance.placements:
        worker = workers.get(placement.worker_id)
        if worker is None:
            times.append(since_s + DEAD_AFTER_S)
        elif worker.facts.liveness is Liveness.DEAD:
            times.append(rules.term_started_s + DEAD_AFTER_S)
        elif instance.state in STARTING and worker.held(instance.instance_id) is None:
            times.append(since_s + rules.hold_deadline_s)
    return min((at_s for at_s in times if at_s > after_s), default=math.inf)


def _dead_grace_s(worker: WorkerView, rules: ReconcileRules) -> float:
    """A worker that was last heard before the term began may have been missed by our own doing: it
    gets the full time anew.
    """
    return DEAD_AFTER_S if worker.heard_s < rules.term_started_s else 0.0


def moved(before: Instance, change: Change, epoch: Epoch, now_s: float) -> Instance:
    """The instance after its events.

    A drain is a new generation, and so are other stages: workers that already obey the old one must
    hear of it. Time spent in a state counts from the last event; that spent on the way to the first
    token is added up.

    Args:
        before: The instance.
        change: Its events, and what they bring.
        epoch: Of the leader that decides.
        now_s: The moment, monotonic.
    """
    state = before.state
    for event in change.events:
        state = step(state, event)
    drains = InstanceEvent.DRAIN in change.events and state not in ENDED
    lost = InstanceEvent.STAGE_LOST in change.events
    stays = not change.events and not change.placements
    placements = _placed(before, change.placements or before.placements, state)
    renewed = drains or _bare(placements) != _bare(before.placements)
    return replace(
        before,
        state=state,
        generation=Generation(before.generation + 1) if renewed else before.generation,
        placements=placements,
        load_s=before.load_s + now_s - before.state_since_s
        if before.state in STARTING and not stays
        else before.load_s,
        drain_within_s=change.drain_within_s if drains else before.drain_within_s,
        epoch=epoch,
        state_since_s=before.state_since_s if stays else now_s,
        last_used_s=now_s if lost or (state in SERVING and not stays) else before.last_used_s,
        in_flight=0 if state in ENDED or lost else before.in_flight,
        reason=before.reason if stays else change.reason,
        served=before.served or state in SERVING,
        targets=before.targets if change.targets is None else change.targets,
        repairs=before.repairs + lost,
    )


def _placed(
    before: Instance, placements: tuple[Placement, ...], state: InstanceState
) -> tuple[Placement, ...]:
    """Stages, while an instance consolidates with the ranges that their workers have already.

    A range that is being brought when the stages change again is not there yet: the one before it
    counts, unless the change says otherwise.
    """
    if state is InstanceState.LOADING:
        return placements  # A repair has said what is there (``repairing``), and nothing else does.
    if state is not InstanceState.CONSOLIDATING:
        return _bare(placements)
    anew = before.state is not InstanceState.CONSOLIDATING
    had = {one.worker_id: one.stage if anew else one.held for one in before.placements}
    return tuple(
        one if one.held is not None else replace(one, held=had.get(one.worker_id))
        for one in placements
    )


def _bare(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return tuple(one if one.held is None else replace(one, held=None) for one in placements)


def drain_of(drain: Drain) -> Change:
    """The change that takes an instance out of service."""
    return Change(
        instance_id=drain.instance_id,
        events=(InstanceEvent.DRAIN,),
        reason=drain.reason,
        drain_within_s=drain.within_s,
    )


def retargeted(retarget: Retarget) -> Change:
    """The change that has a group become another number of instances."""
    return Change(
        instance_id=retarget.instance_id,
        events=(),
        reason=retarget.reason,
        targets=retarget.targets,
    )
