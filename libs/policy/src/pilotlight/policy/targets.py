"""How many instances each group is to become (ParaServe, section 6: the number of workers that
remain).

A group has as many workers as its start took, and becomes between one and that many instances. The
number follows the demand: it grows in a burst, while the group loads and while it consolidates, and
shrinks when the burst is over, as long as the workers have not become instances yet.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.load import carried, expected_requests, promised
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, Snapshot
from pilotlight.policy.scaling import ScalingRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Retarget:
    """A group that is to become another number of instances than it was."""

    instance_id: InstanceId
    model: ModelName
    targets: int
    reason: str


def plan_targets(
    snapshot: Snapshot, rules: ScalingRules, most: Callable[[Instance], int]
) -> tuple[Retarget, ...]:
    """Compare what each model's groups are to become with its demand.

    1. wanted: one instance for every ``instance_requests`` that wait, run, or are expected while a
       start is under way: arrivals of the sliding window (``load.expected_requests``). They count
       where requests wait or run alone. At least one, at most ``max_instances``
    2. more wanted than instances are there or promised: groups become more, the oldest first, each
       as many as its workers have room for. That comes before any start: their workers have a part
       of the model already
    3. fewer, and nothing waits: groups become fewer, the youngest first, while what is left has
       ``low_load`` at most. Not in the first moments of a state: requests are on their way then
       from gateways to workers

    Args:
        snapshot: Instances, models, demand and arrivals.
        rules: Figures of the decision.
        most: How many instances a group can become: workers with room for the whole model.
    """
    active: dict[ModelName, list[Instance]] = defaultdict(list)
    for one in snapshot.instances:
        if one.state in STARTING | SERVING:
            active[one.model].append(one)
    waiting = {one.model: one.waiting for one in snapshot.demand}
    found: list[Retarget] = []
    grouped = {
        name for name, ones in active.items() if any(len(one.placements) > 1 for one in ones)
    }
    for model in snapshot.models if grouped else ():
        if model.name not in grouped:
            continue
        ours = [one for one in active[model.name] if one.digest == model.digest]
        groups = sorted(
            (one for one in ours if len(one.placements) > 1), key=lambda one: one.instance_id
        )
        if groups:
            waits = waiting.get(model.name, 0)
            found += _of_model(model, ours, groups, waits, snapshot, rules, most)
    return tuple(found)


def _of_model(
    model: Model,
    ours: list[Instance],
    groups: list[Instance],
    waits: int,
    snapshot: Snapshot,
    rules: ScalingRules,
    most: Callable[[Instance], int],
) -> list[Retarget]:
    """Rules 1 to 3 for one model.

    Args:
        model: Which.
        ours: Its instances.
        groups: Those of them that are groups.
        waits: Requests that wait at gateways.
        snapshot: Arrivals, and how long its cold starts took.
        rules: Figures of the decision.
        most: See ``plan_targets``.
    """
    running = carried(ours)[1]
    load = waits + running
    expected = expected_requests(model, snapshot) if load else 0.0
    wanted = math.ceil((load + expected) / rules.instance_requests)  # 1
    wanted = min(max(1, wanted, model.scaling.min_instances), model.scaling.max_instances)
    there = promised(ours)
    why = f"{waits} requests wait, {running} run, {expected:.1f} more are expected"
    found: list[Retarget] = []
    for one in groups if wanted > there else ():  # 2
        targets = min(most(one), one.targets + wanted - there)
        if targets > one.targets:
            there += targets - one.targets
            found.append(_retarget(one, targets, why))
    if wanted >= there or waits:
        return found
    for one in reversed(groups):  # 3
        targets = one.targets
        while (
            targets > 1
            and there > wanted
            and _is_settled(one, snapshot.now_s, rules)
            and load + expected <= rules.low_load * rules.instance_requests * (there - 1)
        ):
            targets, there = targets - 1, there - 1
        if targets < one.targets:
            found.append(_retarget(one, targets, why))
    return found


def _is_settled(instance: Instance, now_s: float, rules: ScalingRules) -> bool:
    """What it has of requests is known."""
    if instance.state in SERVING:
        return now_s - instance.state_since_s >= rules.settle_s
    return instance.idle_s(now_s) >= rules.cancel_after_s


def _retarget(instance: Instance, targets: int, why: str) -> Retarget:
    return Retarget(
        instance_id=instance.instance_id,
        model=instance.model,
        targets=targets,
        reason=f"{why}: its group is to become {targets} of {len(instance.placements)}",
    )
