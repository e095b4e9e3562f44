"""What a command asks of a worker, for any command and anything held."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.hold import Hold
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Epoch, Generation, InstanceId
from pilotlight.policy.model import Model, Stage
from pilotlight.worker.lifecycle import (
    RESIDENT,
    TRANSITIONS,
    HeldEvent,
    HeldView,
    HoldPlan,
    IllegalMove,
    plan,
    step,
)
from pilotlight.worker.loading import epoch_in_pool

ROOM = 100
NAMES = [InstanceId(f"inst-{index}") for index in range(4)]


def hold(
    model: Model, name: str = "inst-0", generation: int = 1, size: int = 40, **other: object
) -> Hold:
    return Hold(
        instance_id=InstanceId(name),
        generation=Generation(generation),
        model=model,
        stage=other.pop("stage", model.spec.whole),
        device_bytes=size,
        **other,
    )


def test_moves_outside_the_table_are_errors() -> None:
    for state, event in product([None, *HeldState], HeldEvent):
        if (state, event) not in TRANSITIONS:
            with pytest.raises(IllegalMove):
                step(state, event)


def test_every_state_can_be_left_and_reached() -> None:
    assert {state for state, _ in TRANSITIONS} == {None, *HeldState}
    assert set(TRANSITIONS.values()) == {None, *HeldState}


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[int, int, HeldState, int]], list[tuple[str, int, int, bool, int]]]:
    """Generations, sizes, states or drains, and where stages end."""
    stops = st.integers(1, 2)
    held = {
        name: (
            draw(st.integers(1, 3)),
            draw(st.integers(1, 50)),
            draw(st.sampled_from(list(HeldState))),
            draw(stops),
        )
        for name in draw(st.sets(st.sampled_from(NAMES)))
    }
    desired = [
        (name, draw(st.integers(1, 3)), draw(st.integers(1, 60)), draw(st.booleans()), draw(stops))
        for name in draw(st.sets(st.sampled_from(NAMES)))
    ]
    return held, desired


@given(situation=situations())
@settings(max_examples=300, deadline=None)
def test_safety_of_every_plan(model: Model, situation: tuple[dict, list]) -> None:
    held_now, desired_now = situation
    held = {
        name: HeldView(hold=hold(model, name, generation, size, stage=Stage(0, stop)), state=state)
        for name, (generation, size, state, stop) in held_now.items()
    }
    desired = [
        hold(model, name, generation, size, draining=draining, stage=Stage(0, stop))
        for name, generation, size, draining, stop in desired_now
    ]
    todo = plan(held, {}, desired, ROOM)
    wanted = {one.instance_id: one for one in desired}

    resident = sum(view.hold.device_bytes for view in held.values() if view.state in RESIDENT)
    started = sum(one.device_bytes for one in todo.start)
    started += sum(
        max(0, one.device_bytes - held[one.instance_id].device_bytes) for one in todo.grow
    )
    assert not started or resident + started <= ROOM, (
        "no device is over-committed, the leaving counted"
    )
    acted = [
        one.instance_id for one in (*todo.start, *todo.refuse, *todo.renew, *todo.grow)
    ] + list(todo.let_go)
    assert len(acted) == len(set(acted))
    assert all(
        one.instance_id not in held and not one.draining for one in (*todo.start, *todo.refuse)
    )
    for name, view in held.items():
        if name not in wanted and view.state is not HeldState.DRAINING:
            assert name in todo.let_go, "what is not desired is let go"
        if (
            name in wanted
            and wanted[name].generation == view.hold.generation
            and not wanted[name].draining
        ):
            assert name not in todo.let_go, "what is desired as it is stays"
        if name in wanted and wanted[name].generation < view.hold.generation:
            assert name not in acted, "an older generation changes nothing"
    assert all(held[name].state is not HeldState.DRAINING for name in todo.let_go)
    for one in todo.grow:
        assert (held[one.instance_id].state, HeldEvent.GROW) in TRANSITIONS
        assert one.stage.stop > held[one.instance_id].hold.stage.stop
    assert all((held[name].state, HeldEvent.LET_GO) in TRANSITIONS for name in todo.let_go)


@given(situation=situations())
@settings(max_examples=100, deadline=None)
def test_doing_the_plan_leaves_nothing_to_do(model: Model, situation: tuple[dict, list]) -> None:
    held_now, desired_now = situation
    held = {
        name: HeldView(hold=hold(model, name, generation, size, stage=Stage(0, stop)), state=state)
        for name, (generation, size, state, stop) in held_now.items()
    }
    gone: dict[InstanceId, Generation] = {}
    desired = [
        hold(model, name, generation, size, draining=draining, stage=Stage(0, stop))
        for name, generation, size, draining, stop in desired_now
    ]
    for _ in range(4):
        todo = plan(held, gone, desired, ROOM)
        for name in todo.let_go:
            held.pop(name)
        for name in [name for name, view in held.items() if view.state is HeldState.DRAINING]:
            held.pop(name)
        for one in todo.start:
            held[one.instance_id] = HeldView(hold=one, state=HeldState.READY)
        for one in todo.refuse:
            held[one.instance_id] = HeldView(hold=one, state=HeldState.FAILED)
        for one in (*todo.renew, *todo.grow):
            held[one.instance_id] = replace(held[one.instance_id], hold=one)
    assert plan(held, gone, desired, ROOM) == HoldPlan()


def test_failed_and_evicted_are_not_loaded_again_under_their_generation(model: Model) -> None:
    for state in (HeldState.FAILED, HeldState.EVICTED):
        held = {NAMES[0]: HeldView(hold=hold(model), state=state)}
        assert plan(held, {}, [hold(model)], ROOM) == HoldPlan()
        newer = plan(held, {}, [hold(model, generation=2)], ROOM)
        assert newer.let_go == (NAMES[0],)
        assert [one.generation for one in newer.later] == [2]


def test_the_given_up_stays_gone(model: Model) -> None:
    gone = {NAMES[0]: Generation(1)}
    assert plan({}, gone, [hold(model)], ROOM) == HoldPlan()
    assert plan({}, gone, [hold(model, generation=2)], ROOM).start == (hold(model, generation=2),)


def test_a_load_waits_for_what_leaves_and_fails_when_nothing_does(model: Model) -> None:
    ready = {NAMES[0]: HeldView(hold=hold(model, size=80), state=HeldState.READY)}
    swap = plan(ready, {}, [hold(model, "inst-1")], ROOM)
    assert (swap.let_go, swap.start, swap.refuse) == ((NAMES[0],), (), ())
    assert swap.later == (hold(model, "inst-1"),)
    both = plan(ready, {}, [hold(model, size=80), hold(model, "inst-1")], ROOM)
    assert both == HoldPlan(refuse=(hold(model, "inst-1"),))


def test_a_newer_generation_of_the_same_stage_is_taken_over(model: Model) -> None:
    ready = {NAMES[0]: HeldView(hold=hold(model), state=HeldState.READY)}
    newer = hold(model, generation=2)
    assert plan(ready, {}, [newer], ROOM) == HoldPlan(renew=(newer,))
    moved = hold(model, generation=2, stage=Stage(1, 2))
    assert plan(ready, {}, [moved], ROOM) == HoldPlan(let_go=(NAMES[0],), later=(moved,))


@pytest.mark.parametrize("stage", [Stage(0, 1), Stage(1, 2)])
def test_a_stage_grows_at_either_end(model: Model, stage: Stage) -> None:
    ready = {NAMES[0]: HeldView(hold=hold(model, stage=stage, size=30), state=HeldState.READY)}
    longer = hold(model, generation=2, size=60)
    assert plan(ready, {}, [longer], 60) == HoldPlan(grow=(longer,))
    other = hold(model, generation=2, stage=Stage(1 - stage.start, 2 - stage.start))
    assert plan(ready, {}, [other], ROOM) == HoldPlan(let_go=(NAMES[0],), later=(other,))


def test_a_ready_stage_grows_in_place_where_there_is_room(model: Model) -> None:
    short, longer = hold(model, stage=Stage(0, 1), size=30), hold(model, generation=2, size=60)
    ready = {NAMES[0]: HeldView(hold=short, state=HeldState.READY)}
    assert plan(ready, {}, [longer], 60) == HoldPlan(grow=(longer,))
    assert plan(ready, {}, [longer], 59) == HoldPlan(), "the next command asks again"
    assert plan(ready, {}, [short], ROOM) == HoldPlan()
    both = plan(ready, {}, [longer, hold(model, "inst-1")], ROOM)
    assert both == HoldPlan(grow=(longer,), start=(hold(model, "inst-1"),))
    both = plan(ready, {}, [longer, hold(model, "inst-1")], ROOM - 1)
    assert both == HoldPlan(grow=(longer,), refuse=(hold(model, "inst-1"),)), (
        "what it is to take counts"
    )


def test_one_growth_at_a_time_and_none_while_a_stage_loads(model: Model) -> None:
    short, longer = hold(model, stage=Stage(0, 1), size=30), hold(model, generation=2, size=60)
    loading = {NAMES[0]: HeldView(hold=short, state=HeldState.LOADING)}
    assert plan(loading, {}, [longer], ROOM) == HoldPlan()
    growing = {NAMES[0]: HeldView(hold=short, state=HeldState.READY, growing=longer)}
    assert plan(growing, {}, [longer], ROOM) == HoldPlan()
    beside = plan(growing, {}, [longer, hold(model, "inst-1", size=41)], ROOM)
    assert beside.refuse == (hold(model, "inst-1", size=41),), "it takes 60 already"
    assert plan(growing, {}, [], ROOM) == HoldPlan(let_go=(NAMES[0],))


def test_the_loaders_epoch_is_read_from_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    assert epoch_in_pool(str(path)) == 0
    path.write_bytes(b"something else")
    assert epoch_in_pool(str(path)) == 0
    path.unlink()
    pool = HostPool.open(path, 1 << 20, ManualClock())
    pool.raise_epoch(Epoch(7))
    assert epoch_in_pool(str(path)) == 7
    pool.close(remove=True)
