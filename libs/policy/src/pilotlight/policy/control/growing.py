"""Groups that become whole instances (ParaServe, section 6; decision 32)."""

from collections.abc import Container, Iterable
from dataclasses import replace

from pilotlight.policy.control.books import Record
from pilotlight.policy.control.plan import GrowOrder, Room
from pilotlight.policy.control.reconcile import Change
from pilotlight.policy.control.shortening import plan_shorter
from pilotlight.policy.control.splitting import taker_of
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.instance import SERVING, InstanceEvent
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.policy.remaining import remaining


def no_room(_: WorkerId) -> tuple[int, int]:
    """Workers have what they were granted."""
    return 0, 1


def plan_growth(
    records: Iterable[Record], room: Room = no_room, *, shorter: bool = True
) -> tuple[GrowOrder, ...]:
    """What groups that serve are to become.

    1. a group whose stages are all ready has one worker take on the whole model, so that it pays
       for its pipeline no longer than its start takes
    2. the worker of the first stage that has room for that: the first one leads, and a lead that
       stays moves no request
    3. a group in which no worker has it: its lead, where its device has it free; else a shorter
       pipeline, where fewer workers have it together (``shortening``); else it stays as it is
    4. where the lead takes over, others take the model on, too: as many as the group's targets ask
       for, those first that have the room already, then those on whose devices it is free. Each
       becomes an instance of its own (``splitting``)
    5. targets that grow while it consolidates are added to those that are under way

    Args:
        records: Instances that may have changed.
        room: What workers have free beside what was granted to them.
        shorter: Groups may take what is free for it; else what was granted has to be enough.
    """
    orders: list[GrowOrder] = []
    for record in records:
        instance, model = record.instance, record.model
        if not record.is_row or len(instance.placements) < 2 or instance.state not in SERVING:
            continue
        whole = model.spec.whole
        if instance.state is InstanceState.READY:
            taker = _first_with_room(instance, model)
            begins = True
            if taker is None and shorter:  # 3
                orders += _in_free_room(instance, model, room)
        else:
            taker, begins = taker_of(instance), False
        if taker is None or taker.held == whole:
            continue
        more = _others(instance, model, room, taker)
        if not begins and not more:
            continue
        longer = {one.worker_id: one for one in more}
        if begins:
            longer[taker.worker_id] = replace(taker, stage=whole)
        reason = (
            f"its stages are ready, and {taker.worker_id} has room for the whole model"
            if begins
            else "more instances are wanted than it was to become"
        )
        if more:
            reason += (
                f"; so have {', '.join(one.worker_id for one in more)}, for instances of their own"
            )
        orders.append(
            GrowOrder(
                instance_id=instance.instance_id,
                placements=tuple(longer.get(one.worker_id, one) for one in instance.placements),
                reason=reason,
            )
        )
    return tuple(orders)


def growth_of(
    order: GrowOrder, seen: Instance, model: Model, granted: Container[WorkerId]
) -> Change:
    """What is written when the room for an order was asked for.

    Args:
        order: What was to be.
        seen: The group.
        model: Its model.
        granted: Workers that got their room. The others stay as they were, and no instance is
            promised for them any more. Of a shorter pipeline all have got it, or nothing changes.
    """
    before = {one.worker_id: one for one in seen.placements}
    if is_shorter(order) and any(
        one != before[one.worker_id] and one.worker_id not in granted for one in order.placements
    ):
        return Change(instance_id=seen.instance_id, events=(), reason=order.reason)
    placements = tuple(
        one if one.worker_id in granted else before[one.worker_id] for one in order.placements
    )
    begins = seen.state is InstanceState.READY
    return Change(
        instance_id=seen.instance_id,
        events=(InstanceEvent.CONSOLIDATION_STARTED,) if begins else (),
        reason=order.reason,
        placements=placements if placements != seen.placements else (),
        targets=max(1, sum(one.stage == model.spec.whole for one in placements)),
    )


def most_targets(instance: Instance, model: Model, room: Room) -> int:
    """How many instances a group can become: those of its workers that have room for the whole
    model, where its lead is one of them. A group of which the lead is whole becomes no more than it
    is about to.

    Args:
        instance: The group.
        model: Its model.
        room: What workers have free.
    """
    taker = taker_of(instance) or _first_with_room(instance, model)
    if taker is None or taker is not instance.placements[0] or taker.held == model.spec.whole:
        return max(1, instance.targets)
    return sum(_with_room(one, model, room) is not None for one in instance.placements)


def is_shorter(order: GrowOrder) -> bool:
    """Whether an order has a group become a shorter pipeline."""
    return bool(remaining([one.stage for one in order.placements]))


def _in_free_room(instance: Instance, model: Model, room: Room) -> tuple[GrowOrder, ...]:
    """Rule 3."""
    lead, *others = instance.placements
    if (whole := _with_room(lead, model, room)) is not None:
        order = GrowOrder(
            instance_id=instance.instance_id,
            placements=(whole, *others),
            reason=f"its stages are ready, and the device of {lead.worker_id} has room for the whole model",
        )
        return (order,)
    order = plan_shorter(instance, model, room)
    return () if order is None else (order,)


def _first_with_room(instance: Instance, model: Model) -> Placement | None:
    """Rule 2."""
    able = (one for one in instance.placements if _was_granted_all(one, model))
    return min(able, key=lambda one: one.stage, default=None)


def _was_granted_all(placement: Placement, model: Model) -> bool:
    """Whether a worker has what the whole model needs at least: its parameters, and some KV."""
    return placement.device_bytes >= stage_room(model, model.spec.whole).least_bytes


def _others(
    instance: Instance, model: Model, room: Room, taker: Placement
) -> tuple[Placement, ...]:
    """Rule 4: placements with the whole model, beside that of the lead and those that have it."""
    if taker is not instance.placements[0]:
        return ()
    others = [one for one in instance.placements if one is not taker]
    left = instance.targets - 1 - sum(one.stage == model.spec.whole for one in others)
    able = [
        (longer.device_bytes > one.device_bytes, longer)
        for one in others
        if one.stage != model.spec.whole and (longer := _with_room(one, model, room)) is not None
    ]
    able.sort(key=lambda one: one[0])
    return tuple(longer for _, longer in able[: max(0, left)])


def _with_room(placement: Placement, model: Model, room: Room) -> Placement | None:
    """A worker with the whole model; None where it has not the room."""
    whole = model.spec.whole
    if _was_granted_all(placement, model):
        return replace(placement, stage=whole)
    free_bytes, granule_bytes = room(placement.worker_id)
    needed = stage_room(model, whole, granule_bytes)
    could_bytes = placement.device_bytes + free_bytes
    if could_bytes < needed.least_bytes:
        return None
    return replace(placement, stage=whole, device_bytes=needed.granted_bytes(could_bytes))
