"""Scaling by load: a surplus drains, and a load that grows gets its next instance ahead."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import ArrivalCount, ArrivalWindows, CounterLife, RecentArrivals
from pilotlight.policy.ids import Epoch, GatewayId, ModelName
from pilotlight.policy.load import further_requests, may_need_another
from pilotlight.policy.model import Model, Slo
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.scaling import ScalePlan, ScalingRules, plan_scaling
from pilotlight.policy.testing import NOW_S, demand, instance, model

RULES = ScalingRules(instance_requests=10, forecast=True)
KEPT_S = 60.0
M = ModelName("m")


def of_four(**changes: object) -> Model:
    one = model("m", max_instances=4, keep_alive_s=KEPT_S, **changes)
    return replace(one, slo=Slo(ttft_ms=10_000, tpot_ms=100))


def serving(*loads: int, now_s: float = NOW_S) -> list[Instance]:
    return [
        replace(
            instance("m", f"i{at}", in_flight=load), last_used_s=now_s, state_since_s=now_s - 500
        )
        for at, load in enumerate(loads)
    ]


def starting(waited_for_s: float) -> Instance:
    one = instance("m", "i9", state=InstanceState.LOADING)
    return replace(one, last_used_s=waited_for_s)


def seen(
    one: Model, instances: list[Instance], now_s: float, arrivals: RecentArrivals | None = None
) -> Snapshot:
    return Snapshot(
        now_s=now_s,
        epoch=Epoch(1),
        models=(one,),
        instances=tuple(instances),
        arrivals=arrivals or RecentArrivals(),
    )


def arrived(per_slot: list[int]) -> RecentArrivals:
    """Requests in slots of 10 s, the last of which ends now."""
    began_s = NOW_S - 10 * len(per_slot)
    windows, total = ArrivalWindows(began_s), 0
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=0.0)
    for at, count in enumerate(per_slot):
        total += count
        counts = [ArrivalCount(model=M, total=total, idle_s=0.0)]
        windows.hear(life, counts, began_s + 10 * at + 5, began_s)
    return windows.recent()


def test_a_surplus_drains_after_the_keep_alive_time() -> None:
    """Twelve requests on three instances of ten: two would be enough, and not half full."""
    one, loads = of_four(), serving(3, 2, 3)
    first = plan_scaling(seen(one, loads, NOW_S), RULES)
    assert (first.drains, first.surplus_since_s) == ((), {M: NOW_S})
    soon = plan_scaling(seen(one, loads, NOW_S + KEPT_S - 1), RULES, first.surplus_since_s)
    assert (soon.drains, soon.surplus_since_s) == ((), {M: NOW_S})
    then = plan_scaling(seen(one, loads, NOW_S + KEPT_S), RULES, soon.surplus_since_s)
    assert [drain.instance_id for drain in then.drains] == ["i1"], "the one with the fewest"
    assert not then.surplus_since_s, "the next one has its own time"


@pytest.mark.parametrize(
    ("one", "instances"),
    [
        (of_four(), serving(6, 5, 6)),
        (of_four(), serving(1)),
        (of_four(min_instances=3), serving(1, 1, 1)),
        (of_four(pinned=True), serving(1, 1, 1)),
        (of_four(), [*serving(1, 1), starting(NOW_S)]),
    ],
    ids=["half full", "the last", "the minimum", "pinned", "one starts"],
)
def test_what_is_no_surplus_stays(one: Model, instances: list[Instance]) -> None:
    plan = plan_scaling(seen(one, instances, NOW_S), RULES, {M: 0.0})
    assert not plan.drains
    assert not plan.surplus_since_s


def test_requests_that_wait_end_a_surplus() -> None:
    busy = replace(seen(of_four(), serving(1, 1, 1), NOW_S), demand=(demand("m"),))
    plan = plan_scaling(busy, RULES, {M: 0.0})
    assert not plan.drains
    assert not plan.surplus_since_s


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=60))
def test_instances_go_one_at_a_time_and_never_below_the_load(
    story: list[tuple[int, int]],
) -> None:
    """However requests come and go, between two drains the load was low for the keep-alive time,
    and what stays carries twice what runs.
    """
    one, count, now_s = of_four(), 4, NOW_S
    since_s: dict[ModelName, float] = {}
    low_since_s: float | None = None
    for after_s, requests in story:
        now_s += after_s
        loads = [requests // count + (at < requests % count) for at in range(count)]
        # Idle ones are not idle for long: their keep-alive is another rule's.
        plan = plan_scaling(seen(one, serving(*loads, now_s=now_s), now_s), RULES, since_s)
        since_s = dict(plan.surplus_since_s)
        if count == 1 or requests > 5 * (count - 1):
            low_since_s = None
        elif low_since_s is None:
            low_since_s = now_s
        assert len(plan.drains) <= 1
        if plan.drains:
            assert low_since_s is not None
            assert now_s - low_since_s >= KEPT_S
            assert count >= 2
            count, low_since_s = count - 1, None


def ahead(plan: ScalePlan) -> list[bool]:
    return [start.ahead for start in plan.starts]


def test_a_load_that_grows_gets_its_next_instance_ahead() -> None:
    """One request a second for four minutes, then two; a start takes ten seconds."""
    growing = arrived([10] * 24 + [20, 20])
    assert 5 < further_requests(of_four(), seen(of_four(), [], NOW_S, growing)) < 10
    plan = plan_scaling(seen(of_four(), serving(8), NOW_S, growing), RULES)
    assert ahead(plan) == [True]
    assert plan.busy == {M}
    off = replace(RULES, forecast=False)
    assert not plan_scaling(seen(of_four(), serving(8), NOW_S, growing), off).starts
    under_way = [*serving(8), starting(NOW_S - 30)]
    waits = plan_scaling(seen(of_four(), under_way, NOW_S, growing), RULES)
    assert not waits.drains, "nobody waits for it, and it is needed"
    assert not ahead(waits)


def test_a_steady_load_gets_none() -> None:
    """What comes takes the place of what ends, however much it is."""
    for rate in (10, 30, 80):
        plan = plan_scaling(seen(of_four(), serving(9), NOW_S, arrived([rate] * 26)), RULES)
        assert not plan.starts


@given(
    st.lists(st.integers(0, 60), min_size=26, max_size=26),
    st.lists(st.integers(0, 10), min_size=1, max_size=4),
)
def test_what_is_started_ahead_is_no_surplus(slots: list[int], loads: list[int]) -> None:
    """Neither follows from the other: with one more, one less is not enough."""
    plan = plan_scaling(seen(of_four(), serving(*loads), NOW_S, arrived(slots)), RULES)
    if ahead(plan):
        after = serving(*loads, 0)
        again = plan_scaling(seen(of_four(), after, NOW_S, arrived(slots)), RULES, {M: 0.0})
        assert not again.surplus_since_s
        assert not again.drains


def test_the_next_instance_is_foreseen_from_half_of_the_load_on() -> None:
    calm = seen(of_four(), [], NOW_S, arrived([10] * 26))
    growing = seen(of_four(), [], NOW_S, arrived([10] * 24 + [20, 20]))
    assert not may_need_another(of_four(), 1, 5, 5.0, calm)
    assert may_need_another(of_four(), 1, 6, 5.0, calm)
    assert may_need_another(of_four(), 1, 1, 5.0, growing), "by the time a start would take"
    assert not may_need_another(of_four(), 2, 6, 5.0, calm)
    assert not may_need_another(of_four(), 4, 40, 5.0, growing), "it may have no more"
    assert not may_need_another(of_four(), 0, 0, 5.0, growing), "that is a start for requests"


@given(
    st.lists(st.integers(0, 60), min_size=26, max_size=26),
    st.lists(st.integers(0, 10), min_size=1, max_size=3),
)
def test_what_is_started_ahead_was_foreseen(slots: list[int], loads: list[int]) -> None:
    """A copy costs less than an instance, and is begun no later."""
    snapshot = seen(of_four(), serving(*loads), NOW_S, arrived(slots))
    if ahead(plan_scaling(snapshot, RULES)):
        low = RULES.low_load * RULES.instance_requests
        assert may_need_another(of_four(), len(loads), sum(loads), low, snapshot)
