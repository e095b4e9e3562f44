"""Groups that become whole instances (ParaServe, section 6; decision 32)."""

from collections.abc import Iterable
from dataclasses import replace

from pilotlight.policy.control.books import Record
from pilotlight.policy.control.plan import GrowOrder
from pilotlight.policy.plan import InstanceState


def plan_growth(records: Iterable[Record]) -> tuple[GrowOrder, ...]:
    """What groups that serve are to become.

    1. a group whose stages are all ready has one worker take on the whole model, so that it pays
       for its pipeline no longer than its start takes
    2. the worker of the first stage that has room for that: the first one leads, and a lead that
       stays moves no request
    3. a group in which no worker has the room stays as it is

    Here every group becomes one instance; ``scaling`` starts others where they are wanted.

    Args:
        records: Instances that may have changed.
    """
    orders: list[GrowOrder] = []
    for record in records:
        instance, model = record.instance, record.model
        if not record.is_row or instance.state is not InstanceState.READY:
            continue
        if len(instance.placements) < 2:
            continue
        whole = model.spec.whole
        full_bytes = model.device_bytes(whole)
        chosen = min(
            (one for one in instance.placements if one.device_bytes >= full_bytes),
            key=lambda one: one.stage,
            default=None,
        )
        if chosen is None:  # 3
            continue
        orders.append(
            GrowOrder(
                instance_id=instance.instance_id,
                placements=tuple(
                    replace(one, stage=whole) if one is chosen else one
                    for one in instance.placements
                ),
                reason=f"its stages are ready, and {chosen.worker_id} has room for the whole model",
            )
        )
    return tuple(orders)
