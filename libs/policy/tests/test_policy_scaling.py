import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import ArrivalCount, ArrivalWindows, CounterLife
from pilotlight.policy.cluster import KvLoan
from pilotlight.policy.ids import Epoch, GatewayId, ModelName
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.model import Model, Slo
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import ScalePlan, ScalingRules, plan_scaling
from pilotlight.policy.testing import NOW_S, demand, held, instance, model, worker

RULES = ScalingRules()
S = InstanceState


def plan(models: list[Model], instances: list[Instance], waiting: list[Demand]) -> ScalePlan:
    return plan_scaling(
        Snapshot(
            now_s=NOW_S,
            epoch=Epoch(1),
            models=tuple(models),
            instances=tuple(instances),
            demand=tuple(waiting),
        ),
        RULES,
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Model], list[Instance], list[Demand]]:
    models: list[Model] = []
    instances: list[Instance] = []
    waiting: list[Demand] = []
    for index in range(draw(st.integers(0, 3))):
        name = f"m{index}"
        maximum = draw(st.integers(1, 4))
        minimum = draw(st.integers(0, maximum))
        if draw(st.sampled_from([True, True, False])):
            models.append(
                model(
                    name,
                    min_instances=minimum,
                    max_instances=maximum,
                    keep_alive_s=draw(st.sampled_from([0.0, 10.0])),
                    pinned=draw(st.booleans()),
                )
            )
        instances.extend(
            instance(
                name,
                f"{name}-{number}",
                state=draw(st.sampled_from(list(S))),
                since_s=NOW_S - draw(st.sampled_from([0.0, 0.3, 5.0, 100.0])),
                used_s=NOW_S - draw(st.sampled_from([0.0, 0.5, 9.0, 11.0, 100.0])),
                in_flight=draw(st.sampled_from([0, 0, 2])),
                digest=draw(st.sampled_from(["", "", "another"])),
            )
            for number in range(draw(st.integers(0, 5)))
        )
        if draw(st.booleans()):
            waiting.append(demand(name, draw(st.integers(0, 100))))
    return models, instances, waiting


@given(worlds())
def test_scaling_never_breaks_bounds(
    world: tuple[list[Model], list[Instance], list[Demand]],
) -> None:
    models, instances, waiting = world
    result = plan(models, instances, waiting)
    by_name = {one.name: one for one in models}
    by_id = {one.instance_id: one for one in instances}
    drained = [drain.instance_id for drain in result.drains]
    assert len(set(drained)) == len(drained)
    for drain in result.drains:
        assert by_id[drain.instance_id].state in STARTING | SERVING
        assert drain.reason
    for one in models:
        current = [
            i
            for i in instances
            if i.model == one.name and i.digest == one.digest and i.state in STARTING | SERVING
        ]
        left = [i for i in current if i.instance_id not in drained]
        starts = [start for start in result.starts if start.model == one.name]
        assert len(left) + len(starts) <= max(one.scaling.max_instances, 0)
        assert len(left) >= min(one.scaling.min_instances, len(current)), (
            "drained below the minimum"
        )
        waits = any(d.waiting for d in waiting if d.model == one.name)
        gone = [i for i in current if i.instance_id in drained]
        if gone and len(current) <= one.scaling.max_instances:
            assert not waits
            busy = [i for i in gone if i.in_flight and i.state in SERVING]
            if busy:
                (spare,) = busy
                assert not one.pinned
                assert all(i.state in SERVING and i.in_flight >= spare.in_flight for i in left)
                running = spare.in_flight + sum(i.in_flight for i in left)
                assert running <= RULES.low_load * RULES.instance_requests * len(left), "no surplus"
        count = sum(d.waiting for d in waiting if d.model == one.name)
        starting = sum(i.state in STARTING for i in left)
        needed = max(
            math.ceil(count / RULES.instance_requests) - starting,
            one.scaling.min_instances - len(left),
            0,
        )
        assert len(starts) <= needed
    assert all(start.model in by_name for start in result.starts)
    orphans = [
        i
        for i in instances
        if i.state in STARTING | SERVING
        and (i.model not in by_name or by_name[i.model].digest != i.digest)
    ]
    assert {i.instance_id for i in orphans} <= set(drained)


@given(st.integers(0, 3), st.integers(1, 4), st.floats(0.1, 60), st.booleans())
def test_a_quiet_model_shrinks_to_its_minimum_and_stays_there(
    minimum: int, count: int, keep_alive_s: float, starting: bool
) -> None:
    the_model = model(min_instances=minimum, max_instances=4, keep_alive_s=keep_alive_s)
    state = S.FETCHING if starting else S.READY
    instances = [
        instance(instance_id=f"i{n}", state=state, used_s=NOW_S - 61) for n in range(count)
    ]
    result = plan([the_model], instances, [])
    left = [
        one
        for one in instances
        if one.instance_id not in {drain.instance_id for drain in result.drains}
    ]
    assert len(left) + len(result.starts) == max(minimum, 0)
    again = plan([the_model], [replace(one) for one in left], [])
    assert not again.drains


def test_one_request_starts_one_instance_and_only_one() -> None:
    assert len(plan([model()], [], [demand()]).starts) == 1
    assert not plan([model()], [instance(state=S.PLANNED, used_s=NOW_S)], [demand()]).starts


def test_many_requests_start_several_at_once() -> None:
    assert len(plan([model(max_instances=4)], [], [demand(waiting=33)]).starts) == 3
    assert len(plan([model(max_instances=2)], [], [demand(waiting=33)]).starts) == 2


def test_a_fresh_instance_is_given_time_to_take_the_held_requests() -> None:
    ready = instance(since_s=NOW_S - 0.2)
    result = plan([model(max_instances=2)], [ready], [demand()])
    assert not result.starts
    assert "takes over" in result.held[0].reason
    assert plan(
        [model(max_instances=2)], [replace(ready, state_since_s=NOW_S - 2)], [demand()]
    ).starts


def test_no_instance_is_started_while_the_kv_of_another_grows() -> None:
    serves = instance(since_s=NOW_S - 100)
    loan = KvLoan(wanted_bytes=50, offered_bytes=100, limit_tokens=400)
    short = replace(held(instance_id=serves.instance_id), kv_capacity_tokens=100, loan=loan)
    snapshot = Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=(model(max_instances=2),),
        instances=(serves,),
        demand=(demand(),),
        workers=(worker(held_stages=(short,)),),
    )
    result = plan_scaling(snapshot, RULES)
    assert not result.starts
    assert "growing" in result.held[0].reason
    for grown in (
        replace(short, kv_capacity_tokens=400),
        replace(short, loan=replace(loan, lent_bytes=50)),
        replace(short, loan=KvLoan()),
    ):
        after = replace(snapshot, workers=(worker(held_stages=(grown,)),))
        assert plan_scaling(after, RULES).starts


def test_a_cold_start_that_nobody_waits_for_is_cancelled_after_a_while() -> None:
    assert not plan([model()], [instance(state=S.LOADING, used_s=NOW_S - 0.5)], []).drains
    assert plan([model()], [instance(state=S.LOADING, used_s=NOW_S - 1.5)], []).drains
    assert not plan(
        [model(min_instances=1)], [instance(state=S.LOADING, used_s=NOW_S - 1.5)], []
    ).drains


def test_a_pinned_model_outlives_its_keep_alive() -> None:
    assert not plan([model(pinned=True)], [instance(used_s=NOW_S - 1000)], []).drains
    assert plan([model()], [instance(used_s=NOW_S - 1000)], []).drains


def test_failed_cold_starts_slow_the_next_ones_down() -> None:
    failed = [instance(instance_id=f"f{n}", state=S.FAILED, since_s=NOW_S - 0.1) for n in range(3)]
    assert plan([model()], failed[:1], [demand()]).starts, (
        "the first failure is tried again at once"
    )
    assert not plan([model()], failed, [demand()]).starts
    served = [replace(one, served=True) for one in failed]
    assert plan([model()], served, [demand()]).starts, (
        "a worker's death under a serving instance says nothing against the model"
    )
    later = [replace(one, state_since_s=NOW_S - 2) for one in failed]
    assert plan([model()], later, [demand()]).starts


@pytest.mark.parametrize(("used_s", "starts"), [(0.05, True), (0.2, False)])
def test_failures_before_an_instance_that_has_served_and_ended_are_forgiven(
    used_s: float, starts: bool
) -> None:
    """As where a node dies now and then: each time a start had been planned for it."""
    failed = [instance(instance_id=f"f{n}", state=S.FAILED, since_s=NOW_S - 0.1) for n in range(3)]
    lost = instance(instance_id="lost", state=S.FAILED, since_s=NOW_S, used_s=NOW_S - used_s)
    assert bool(plan([model()], [*failed, replace(lost, served=True)], [demand()]).starts) is starts
    assert not plan([model()], [*failed, lost], [demand()]).starts, "it has not served"


def test_requests_that_are_expected_get_their_instances_at_once() -> None:
    """Twenty wait; two a second come, and a start takes ten seconds."""
    windows = ArrivalWindows(NOW_S - 100)
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=50.0)
    windows.hear(life, [], NOW_S - 50, NOW_S - 50)
    for back in range(20):
        count = ArrivalCount(model=ModelName("m"), total=2 * (back + 1), idle_s=0.0)
        windows.hear(life, [count], NOW_S - 19.5 + back, NOW_S)
    slow = replace(model(max_instances=8), slo=Slo(ttft_ms=10_000, tpot_ms=100))
    snapshot = Snapshot(
        now_s=NOW_S + 0.0,
        epoch=Epoch(1),
        models=(slow,),
        demand=(demand(waiting=20),),
        arrivals=windows.recent(),
    )
    rate = windows.recent().burst_per_s(ModelName("m"), NOW_S)
    assert 1.0 <= rate <= 2.0
    asked = len(plan_scaling(snapshot, replace(RULES, forecast=True)).starts)
    assert asked == math.ceil((20 + 10 * rate) / RULES.instance_requests)
    assert asked > len(plan_scaling(snapshot, replace(RULES, forecast=False)).starts) == 2
    at_rest = replace(snapshot, demand=())
    assert plan_scaling(at_rest, replace(RULES, forecast=True)) == plan_scaling(at_rest, RULES)


def test_old_arrivals_are_no_burst() -> None:
    """The window of a burst ends after two slots."""
    windows = ArrivalWindows(0.0)
    life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=1.0)
    windows.hear(life, [ArrivalCount(model=ModelName("m"), total=50, idle_s=0.0)], 5.0, 5.0)
    assert windows.recent().burst_per_s(ModelName("m"), 9.0) == 5.0
    assert windows.recent().burst_per_s(ModelName("m"), 15.0) == 50 / 15
    assert windows.recent().burst_per_s(ModelName("m"), 20.0) == 0.0
    assert windows.recent().burst_per_s(ModelName("other"), 9.0) == 0.0
