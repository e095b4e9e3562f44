"""How many instances each model should have: which to start, which to drain, and why."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pilotlight.policy.failures import failed_starts_s
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.load import carried, expected_requests, further_requests, promised
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, Snapshot
from pilotlight.policy.request import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """Figures of the decision."""

    instance_requests: int = 16
    """Waiting requests that one instance is expected to carry within its SLO."""
    settle_s: float = 1.0
    """After an instance became ready, its held requests are given this long to reach it before
    another is started for them."""
    cancel_after_s: float = 1.0
    """A cold start without a waiting request for this long is cancelled: longer than any gap
    between two demand vectors."""
    forecast: bool = False
    """Requests that are expected while a start is under way count with those that wait, and with
    those that run."""
    low_load: float = 0.5
    """Of what instances carry. One less may have so much at most, or it is needed; and a start
    ahead is for instances that have more."""
    failure_pause_s: float = 0.5
    """Pause after a second failed cold start in a row, doubled with each further one. The first is
    tried again at once."""
    failure_pause_limit_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One more instance of a model."""

    model: ModelName
    reason: str
    ahead: bool = False
    """No request waits for it: it takes free room alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """One instance less."""

    instance_id: InstanceId
    model: ModelName
    reason: str
    within_s: float | None = None
    """Its requests may run on for so long, then they go on elsewhere. None: until they end."""
    makes_way_for: ModelName | None = None
    """The model that waits for its room."""
    unless_pinned: bool = False
    """A pin that was not known yet when this was planned is in its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A model that has demand and gets no more instances now, and why."""

    model: ModelName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """What to change. Empty when everything is as it should be."""

    starts: tuple[Start, ...] = ()
    drains: tuple[Drain, ...] = ()
    held: tuple[Held, ...] = ()
    surplus_since_s: Mapping[ModelName, float] = field(default_factory=dict[ModelName, float])
    """Since when models have had an instance too many."""
    busy: frozenset[ModelName] = frozenset()
    """Models for which time alone may ask for a start ahead."""


@dataclass(slots=True)
class _Draft:
    starts: list[Start] = field(default_factory=list[Start])
    drains: list[Drain] = field(default_factory=list[Drain])
    held: list[Held] = field(default_factory=list[Held])
    surplus_since_s: dict[ModelName, float] = field(default_factory=dict[ModelName, float])
    busy: set[ModelName] = field(default_factory=set[ModelName])


def plan_scaling(
    snapshot: Snapshot,
    rules: ScalingRules,
    surplus_since_s: Mapping[ModelName, float] = MappingProxyType({}),
) -> ScalePlan:
    """Compare each model's instances with its demand and bounds.

    1. an instance whose model was deleted, or changed its digest, drains
    2. more instances than ``max_instances``: the surplus drains, what starts first, then what is
       idle longest
    3. a cold start without a waiting request drains, down to ``min_instances``; not while the
       others have more than ``low_load``
    4. an instance that has been idle for the keep-alive time drains, the longest idle first, down
       to ``min_instances``; a pinned model's stays. One drains that is a surplus: for the
       keep-alive time without interruption the others would have had ``low_load`` at most. It is
       the one with the fewest requests, and the next one goes a keep-alive time later
    5. wanted: one instance for every ``instance_requests`` that wait, or are expected until it
       serves (``expected_requests``), at least ``min_instances``, at most ``max_instances``; what
       starts already counts, so one start is under way for each such share of these requests. A
       group counts as the instances that it is to become (``targets``).
       Where none waits, one more if those that serve have more than ``low_load``, and will have
       more than they carry before it serves (``load.further_requests``)
    6. no start while an instance that has just become ready takes over the held requests, or the
       KV of one that serves grows for them
    7. no start within the pause that follows failed ones, and one alone until one has served: what
       cannot start must not be tried by the dozen

    Args:
        snapshot: Instances, models and demand, as of its ``now_s``.
        rules: Figures of the decision.
        surplus_since_s: As the plan before had it.
    """
    draft = _Draft()
    models = {model.name: model for model in snapshot.models}
    active: dict[ModelName, list[Instance]] = defaultdict(list)
    every: dict[ModelName, list[Instance]] = defaultdict(list)
    for instance in snapshot.instances:
        every[instance.model].append(instance)
        if instance.state not in STARTING | SERVING:
            continue
        model = models.get(instance.model)
        if model is None or model.digest != instance.digest:  # 1
            why = "its model was deleted" if model is None else "its model has another digest now"
            draft.drains.append(
                Drain(instance_id=instance.instance_id, model=instance.model, reason=why)
            )
        else:
            active[instance.model].append(instance)
    waiting = {demand.model: demand for demand in snapshot.demand if demand.waiting > 0}
    growing = _growing(snapshot) if waiting else frozenset[InstanceId]()
    for model in snapshot.models:
        demand, ours = waiting.get(model.name), active.get(model.name)
        if not ours and demand is None and not model.scaling.min_instances:
            continue  # Most of ten thousand.
        since_s = surplus_since_s.get(model.name, snapshot.now_s)
        left = _shrink(model, ours, demand, snapshot.now_s, rules, draft) if ours else []
        if left and demand is None:
            left = _less_surplus(model, left, since_s, snapshot.now_s, rules, draft)
        known = every.get(model.name)
        failed_s = failed_starts_s(model, known) if known else ()
        _grow(model, left, demand, growing, failed_s, snapshot, rules, draft)
    return ScalePlan(
        starts=tuple(draft.starts),
        drains=tuple(draft.drains),
        held=tuple(draft.held),
        surplus_since_s=draft.surplus_since_s,
        busy=frozenset(draft.busy),
    )


def _shrink(
    model: Model,
    active: list[Instance],
    demand: Demand | None,
    now_s: float,
    rules: ScalingRules,
    draft: _Draft,
) -> list[Instance]:
    """Rules 2 to 4, but for the surplus; the instances that stay."""
    bounds = model.scaling
    left = sorted(
        active,
        key=lambda one: (one.state in SERVING, one.in_flight > 0, one.last_used_s, one.instance_id),
    )

    def drain(instance: Instance, reason: str, *, unless_pinned: bool = False) -> None:
        left.remove(instance)
        draft.drains.append(
            Drain(
                instance_id=instance.instance_id,
                model=model.name,
                reason=reason,
                unless_pinned=unless_pinned,
            )
        )

    for instance in left[: max(0, len(left) - bounds.max_instances)]:  # 2
        drain(instance, f"at most {bounds.max_instances} instances are allowed")
    if demand is not None:
        return left
    for instance in left.copy():
        idle_s = instance.idle_s(now_s)
        if len(left) <= bounds.min_instances:
            break
        if instance.state in STARTING and instance.placements[0].grown_from is None:  # 3
            if idle_s >= rules.cancel_after_s and not _is_busy(left, rules):
                drain(instance, f"nobody has waited for it for {idle_s:.1f} s")
        elif (
            instance.state in SERVING
            and instance.in_flight == 0
            and idle_s >= bounds.keep_alive_s
            and not model.pinned
        ):  # 4
            drain(
                instance,
                f"idle for {idle_s:.1f} s, it is kept for {bounds.keep_alive_s:g} s",
                unless_pinned=True,
            )
    return left


def _less_surplus(
    model: Model,
    left: list[Instance],
    since_s: float,
    now_s: float,
    rules: ScalingRules,
    draft: _Draft,
) -> list[Instance]:
    """Rule 4, of the surplus; the instances that stay.

    Args:
        model: For which no request waits.
        left: Its instances.
        since_s: Since when it has had a surplus, if it had one.
        now_s: The time, in seconds.
        rules: Which load is low.
        draft: Takes the drain.
    """
    serving, requests = carried(left)
    bounds = model.scaling
    if (
        serving < len(left)
        or serving <= max(1, bounds.min_instances)
        or model.pinned
        or requests > rules.low_load * rules.instance_requests * (serving - 1)
    ):
        return left
    if now_s - since_s < bounds.keep_alive_s:
        draft.surplus_since_s[model.name] = since_s
        return left
    spare = min(left, key=lambda one: (one.in_flight, one.last_used_s, one.instance_id))
    draft.drains.append(
        Drain(
            instance_id=spare.instance_id,
            model=model.name,
            reason=f"{requests} requests run on {serving} instances: for {now_s - since_s:.1f} s "
            "one less would have been enough",
            unless_pinned=True,
        )
    )
    return [one for one in left if one is not spare]


def _is_busy(instances: Iterable[Instance], rules: ScalingRules) -> bool:
    """Whether those that serve have more than the low load."""
    serving, requests = carried(instances)
    return requests > rules.low_load * rules.instance_requests * serving


def _growing(snapshot: Snapshot) -> frozenset[InstanceId]:
    """Instances whose requests are about to have more KV."""
    return frozenset(
        held.instance_id for worker in snapshot.workers for held in worker.held if held.kv_grows
    )


def _grow(
    model: Model,
    left: list[Instance],
    demand: Demand | None,
    growing: frozenset[InstanceId],
    failed_s: Sequence[float],
    snapshot: Snapshot,
    rules: ScalingRules,
    draft: _Draft,
) -> None:
    """Rules 5 to 7.

    Args:
        model: Which may get more instances.
        left: Those that stay.
        demand: What waits for it.
        growing: Instances whose requests are about to have more KV.
        failed_s: When its last starts failed, the latest first.
        snapshot: The facts.
        rules: Figures of the decision.
        draft: Takes the starts.
    """
    bounds = model.scaling
    total = promised(left)
    starting = total - sum(instance.state in SERVING for instance in left)
    waiting = demand.waiting if demand is not None else 0
    expected = expected_requests(model, snapshot) if rules.forecast and waiting > 0 else 0.0
    for_demand = math.ceil((waiting + expected) / rules.instance_requests) - starting
    ahead = False
    may_grow = rules.forecast and waiting == 0 and total < bounds.max_instances
    if may_grow and _is_busy(left, rules):
        draft.busy.add(model.name)
        serving, requests = carried(left)
        expected = further_requests(model, snapshot)
        room = rules.instance_requests * (serving + starting)
        ahead = requests + expected > room
        for_demand = 1 if ahead else 0
    count = min(max(for_demand, bounds.min_instances - total), bounds.max_instances - total)  # 5
    if count <= 0:
        if waiting > 0 and starting == 0:
            draft.held.append(
                Held(
                    model=model.name, reason=f"it has its {bounds.max_instances} instances already"
                )
            )
        return
    for_minimum = total < bounds.min_instances
    settling = any(
        one.state in SERVING and snapshot.now_s - one.state_since_s < rules.settle_s for one in left
    )
    if settling and not for_minimum:  # 6
        draft.held.append(
            Held(model=model.name, reason="an instance that has just become ready takes over")
        )
        return
    if not for_minimum and any(one.state in SERVING and one.instance_id in growing for one in left):
        draft.held.append(
            Held(model=model.name, reason="the KV of an instance that serves is growing")
        )
        return
    pause_s = failure_pause_s(failed_s, snapshot.now_s, rules)
    if pause_s > 0:  # 7
        draft.held.append(
            Held(
                model=model.name,
                reason=f"its last cold start failed: the next one in {pause_s:.1f} s",
            )
        )
        return
    if failed_s:
        count = min(count, max(0, 1 - starting))
    if for_minimum and for_demand <= 0:
        why = f"at least {bounds.min_instances} instances are asked for"
    elif ahead:
        why = f"{carried(left)[1]} requests run, {expected:.1f} more are expected"
    else:
        why = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        why += f", {expected:.1f} more are expected" if expected else ""
    draft.starts.extend(
        Start(model=model.name, reason=why, ahead=ahead and not for_minimum) for _ in range(count)
    )


def next_change_s(
    model: Model,
    active: Iterable[Instance],
    after_s: float,
    rules: ScalingRules,
    surplus_since_s: float = math.inf,
) -> float:
    """When, after a time, rule 3 or 4 could next drain one of a model's instances if nothing
    happens; infinite: never.

    Args:
        model: gives its minimum of instances and how long an idle one is kept.
        active: the model's instances.
        after_s: only times after this one count, in seconds of the snapshot's clock.
        rules: give how long a start without a waiting request is kept.
        surplus_since_s: since when it has had an instance too many; infinite: it has not.
    """
    instances = [one for one in active if one.state in STARTING | SERVING]
    if len(instances) <= model.scaling.min_instances:
        return math.inf
    times = [
        one.last_used_s
        + (rules.cancel_after_s if one.state in STARTING else model.scaling.keep_alive_s)
        for one in instances
        if one.state in STARTING or (one.in_flight == 0 and not model.pinned)
    ]
    times.append(surplus_since_s + model.scaling.keep_alive_s)
    return min((at_s for at_s in times if at_s > after_s), default=math.inf)


def failure_pause_s(failed_s: Sequence[float], now_s: float, rules: ScalingRules) -> float:
    """How long the next cold start of a model must still wait because the last ones failed; 0 when
    it need not.
    """
    if len(failed_s) < 2:
        return 0.0
    pause_s = min(
        rules.failure_pause_limit_s, rules.failure_pause_s * 2 ** min(len(failed_s) - 2, 16)
    )
    return max(0.0, failed_s[0] + pause_s - now_s)
