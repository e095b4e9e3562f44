"""Whose turn it is: each rule by example, and safety rules over random worlds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.model import Slo
from pilotlight.policy.placement import PlacementRules, ServiceRules, candidates
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import ScalingRules, plan_scaling
from pilotlight.policy.testing import NOW_S, ROOM_BYTES, demand, instance, model, node, world
from pilotlight.policy.turns import TurnPlan, TurnRules, plan_turns

S = InstanceState
RULES = TurnRules()
PATIENCE_S = RULES.patience_s(model())


def waits(name: str, age_s: float) -> Demand:
    return replace(demand(name), oldest_age_s=age_s)


def serves(
    name: str,
    on: int,
    *,
    since_s: float = 50.0,
    in_flight: int = 2,
    load_s: float = 1.0,
    state: S = S.READY,
    **more: float,
) -> Instance:
    """An instance that has served for so long; its worker's report is made by ``world``."""
    used_s = NOW_S if in_flight else NOW_S - 20
    one = instance(
        name,
        f"i-{name}-{on}",
        state=state,
        worker_id=f"w{on}",
        since_s=NOW_S - since_s,
        used_s=used_s,
        in_flight=in_flight,
        device_bytes=ROOM_BYTES,
    )
    return replace(one, load_s=load_s, **more)


def plan(snapshot: Snapshot, blocked: tuple[str, ...] = ()) -> TurnPlan:
    starts = plan_scaling(snapshot, ScalingRules()).starts
    return plan_turns(
        snapshot, (start.model for start in starts), RULES, frozenset(map(ModelName, blocked))
    )


def drained(snapshot: Snapshot) -> list[tuple[str, str | None]]:
    return [(one.instance_id, one.makes_way_for) for one in plan(snapshot).drains]


BUSY = (serves("a", 0, since_s=30), serves("b", 1, since_s=50), serves("c", 2, since_s=40))


def test_who_has_waited_for_too_long_gets_the_place_that_has_served_for_the_longest() -> None:
    found = plan(world(*BUSY, waiting=(waits("x", PATIENCE_S + 1),)))
    (drain,) = found.drains
    assert (drain.instance_id, drain.makes_way_for) == ("i-b-1", "x")
    assert drain.within_s == PATIENCE_S
    assert "has waited" in drain.reason
    assert found.longest_wait_s == PATIENCE_S + 1
    assert found.turns[0].left == frozenset()


@pytest.mark.parametrize(
    "snapshot",
    [
        world(*BUSY, waiting=()),
        world(*BUSY, waiting=(waits("x", PATIENCE_S - 0.1),)),  # 3: it has patience left
        world(*BUSY, waiting=(waits("a", 100.0),)),  # 3: it is served
        world(*BUSY[:2], waiting=(waits("x", 100.0),)),  # 1: a place is empty
        world(
            *BUSY[:2], serves("c", 2, in_flight=0), waiting=(waits("x", 100.0),)
        ),  # 1: one is idle
        world(
            *BUSY[:2], serves("c", 2, state=S.DRAINING, since_s=1), waiting=(waits("x", 100.0),)
        ),  # 2: one drains
        world(
            *(replace(one, load_s=26.0) for one in BUSY), waiting=(waits("x", 100.0),), places=3
        ),  # none has served for 52 s
        world(
            *BUSY,
            waiting=(waits("x", 100.0),),
            models=tuple(model(name, pinned=True) for name in "abc"),
        ),
        world(
            *BUSY,
            waiting=(waits("x", 100.0),),
            models=tuple(model(name, min_instances=1) for name in "abc"),
        ),
        world(
            *BUSY, waiting=(waits("x", 100.0),), models=(model("x", part_bytes=1000),)
        ),  # it fits nowhere
        replace(
            world(*BUSY, waiting=(waits("x", 100.0),)), nodes=(node(pool_bytes=50),)
        ),  # nor in the host pool
    ],
)
def test_nobody_makes_room_without_need_or_before_its_time(snapshot: Snapshot) -> None:
    assert drained(snapshot) == []


def test_a_drain_that_does_not_end_is_not_counted_on() -> None:
    stuck = serves("c", 2, state=S.DRAINING, since_s=RULES.overdue_s + PATIENCE_S + 1)
    assert drained(world(*BUSY[:2], stuck, waiting=(waits("x", 100.0),))) == [("i-b-1", "x")]
    limited = replace(stuck, drain_within_s=PATIENCE_S + 2)
    assert drained(world(*BUSY[:2], limited, waiting=(waits("x", 100.0),))) == []


def test_a_model_that_could_not_be_loaded_twice_disturbs_nobody() -> None:
    failed = [
        replace(
            instance("x", f"f{n}", state=S.FAILED, worker_id="w0", since_s=NOW_S - 40 - n),
            served=False,
        )
        for n in range(2)
    ]
    assert drained(world(*BUSY, failed[0], waiting=(waits("x", 100.0),))) == [("i-b-1", "x")]
    assert drained(world(*BUSY, *failed, waiting=(waits("x", 100.0),))) == []


def test_the_oldest_goes_first_and_the_others_leave_its_room() -> None:
    empty = world(*BUSY[:2], waiting=(waits("x", 3.0), waits("y", 5.0), waits("z", 1.0)))
    first, second, third = plan(empty).turns
    assert (first.model, second.model, third.model) == ("y", "x", "z")
    assert (first.left, second.left, third.left) == (frozenset(), {"w2"}, {"w2"})
    making = world(
        *BUSY[:2],
        serves("c", 2, state=S.DRAINING, since_s=1),
        waiting=(waits("x", 3.0), waits("y", 5.0)),
    )
    assert [turn.left for turn in plan(making).turns] == [frozenset(), {"w2"}]


def test_ages_count_in_the_patience_of_each() -> None:
    hasty = replace(model("x"), slo=Slo(ttft_ms=model().slo.ttft_ms / 10, tpot_ms=100))
    found = plan(world(*BUSY, waiting=(waits("x", 3.0), waits("y", 5.0)), models=(hasty,)))
    assert [turn.model for turn in found.turns] == ["x", "y"]


def test_whom_no_room_on_a_device_helps_nothing_is_kept_for() -> None:
    snapshot = world(*BUSY[:2], waiting=(waits("x", 100.0), waits("y", 5.0)))
    assert [(turn.model, turn.left) for turn in plan(snapshot, ("x",)).turns] == [
        ("y", frozenset()),
        ("x", {"w2"}),
    ]
    assert plan(world(*BUSY, waiting=(waits("x", 100.0),)), ("x",)).drains == ()


def test_a_second_instance_goes_before_an_only_one() -> None:
    snapshot = world(
        serves("a", 0),
        serves("b", 1, since_s=90),
        serves("a", 2, since_s=10),
        waiting=(waits("x", 100.0),),
    )
    assert drained(snapshot) == [("i-a-0", "x")]


def test_a_large_model_takes_the_worker_where_the_fewest_have_to_go() -> None:
    small = [replace(serves(name, 0), instance_id=f"i-{name}") for name in "abc"]
    mixed = (*small[:2], serves("d", 1, in_flight=1), serves("e", 2, since_s=0.5))
    snapshot = world(
        *mixed,
        waiting=(waits("x", 100.0),),
        models=(model("x", part_bytes=40),),
        place_bytes=2 * ROOM_BYTES,
    )
    assert len(plan(snapshot).drains) == 1


def test_an_instance_on_several_workers_makes_room_on_all_of_them_at_once() -> None:
    spread = serves("a", 0)
    both = (*spread.placements, replace(spread.placements[0], worker_id=WorkerId("w1")))
    snapshot = world(spread, waiting=(waits("x", 100.0), waits("y", 50.0)), places=2)
    stages = snapshot.workers[0].held
    snapshot = replace(
        snapshot,
        instances=(replace(spread, placements=both),),
        workers=tuple(replace(one, held=stages) for one in snapshot.workers),
    )
    assert drained(snapshot) == [(spread.instance_id, "x")]


def test_what_is_between_two_requests_is_not_evicted_before_its_time() -> None:
    rules = PlacementRules(service=ServiceRules(min_loads=2.0))
    snapshot = world(
        serves("a", 0, since_s=3, in_flight=0, load_s=2.0), waiting=(waits("x", 1.0),), places=1
    )
    between = replace(
        snapshot, instances=(replace(snapshot.instances[0], last_used_s=NOW_S - 0.1),)
    )
    for seen, makeable in ((snapshot, 1), (between, 0)):
        assert len(candidates(model("x"), model("x").spec.whole, seen, rules).makeable) == makeable


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    places = draw(st.integers(1, 4))
    pinned = [
        model(name, pinned=draw(st.booleans()), min_instances=draw(st.integers(0, 1)))
        for name in "abcdef"
    ]
    instances = [
        replace(
            serves(
                draw(st.sampled_from("abcdef")),
                index,
                since_s=draw(st.sampled_from([0.5, 3.0, 30.0])),
                in_flight=draw(st.sampled_from([0, 1, 5])),
                load_s=draw(st.sampled_from([0.0, 1.0, 10.0, 1000.0])),
                state=draw(
                    st.sampled_from([S.READY, S.READY, S.READY, S.DRAINING, S.LOADING, S.GONE])
                ),
            ),
            instance_id=f"i{index}-{number}",
        )
        for index in range(places)
        for number in range(draw(st.integers(0, 2)))
    ]
    ages = st.sampled_from([0.0, 1.0, PATIENCE_S, 30.0])
    waiting = tuple(waits(name, draw(ages)) for name in "abcdefxyz" if draw(st.booleans()))
    return world(
        *instances,
        waiting=waiting,
        places=places,
        place_bytes=draw(st.sampled_from([ROOM_BYTES, 2 * ROOM_BYTES])),
        models=tuple(pinned),
    )


@given(worlds())
def test_drains_are_never_unsafe_nor_more_than_needed(snapshot: Snapshot) -> None:
    found = plan(snapshot)
    starts = {start.model for start in plan_scaling(snapshot, ScalingRules()).starts}
    assert {turn.model for turn in found.turns} == starts
    known = {one.instance_id: one for one in snapshot.instances}
    models = {one.name: one for one in snapshot.models}
    ages = {one.model: one.oldest_age_s for one in snapshot.demand}
    served = {one.model for one in snapshot.instances if one.state in STARTING | SERVING}
    gone = [known[one.instance_id] for one in found.drains]
    assert len({one.instance_id for one in gone}) == len(gone)
    for drain, victim in zip(found.drains, gone, strict=True):
        assert victim.state in SERVING
        assert not models[victim.model].pinned
        assert RULES.placement.service.has_served(victim, snapshot.now_s)
        assert drain.makes_way_for is not None
        assert ages[drain.makes_way_for] >= PATIENCE_S
        assert drain.makes_way_for not in served
        assert drain.within_s is not None
    for name in {one.model for one in gone}:
        left = sum(
            one.model == name and one.state in SERVING and one not in gone
            for one in snapshot.instances
        )
        assert left >= models[name].scaling.min_instances
    # One worker's worth of room for each that waits too long, less what is there and what drains
    # already.
    drained_on = {one.lead for one in gone}
    starved = [name for name in starts - served if ages.get(name, 0.0) >= PATIENCE_S]
    assert len(drained_on) <= len(starved)
    after = replace(
        snapshot,
        instances=tuple(
            replace(one, state=S.DRAINING, state_since_s=NOW_S, drain_within_s=1.0)
            if one in gone
            else one
            for one in snapshot.instances
        ),
    )
    assert plan(after).drains == (), "what drains already is enough"
