"""How many instances groups are to become, and what comes of each of their workers."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.cluster import HeldStage, HeldState, WorkerView
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.growing import growth_of, most_targets, plan_growth
from pilotlight.policy.control.reconcile import (
    Change,
    ReconcileRules,
    moved,
    reconcile,
    retargeted,
)
from pilotlight.policy.control.splitting import instances_of
from pilotlight.policy.control.testing import view
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Epoch, InstanceId, WorkerId
from pilotlight.policy.instance import SERVING, InstanceEvent
from pilotlight.policy.load import promised
from pilotlight.policy.model import Stage
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.scaling import ScalingRules, plan_scaling
from pilotlight.policy.targets import plan_targets
from pilotlight.policy.testing import NOW_S, demand, held, instance, model, world

WHOLE = Stage(0, 4)
PARTS = (Stage(0, 1), Stage(1, 2), Stage(2, 3), Stage(3, 4))
FULL_BYTES = stage_room(model(), WHOLE).least_bytes
"""The whole model, and some KV."""
RULES = ReconcileRules(term_started_s=NOW_S - 1000, hold_deadline_s=10.0)
SCALING = ScalingRules(instance_requests=4)
EPOCH = Epoch(1)


def group(
    *,
    state: InstanceState = InstanceState.READY,
    targets: int = 1,
    size: int = 4,
    full: int = 4,
    name: str = "i",
) -> Instance:
    """Of up to four stages; the first workers have room for the whole model."""
    one = instance(state=state, since_s=NOW_S - 5)
    places = tuple(
        replace(
            one.placements[0],
            worker_id=WorkerId(f"w{at}"),
            stage=replace(stage, stop=4) if at == size - 1 else stage,
            device_bytes=FULL_BYTES if at < full else 40,
        )
        for at, stage in enumerate(PARTS[:size])
    )
    return replace(one, instance_id=InstanceId(name), placements=places, targets=targets)


def grown(one: Instance) -> Instance:
    """With the room that was asked for."""
    (order,) = plan_growth([Record(instance=one, model=model())])
    everyone = {place.worker_id for place in order.placements}
    return moved(one, growth_of(order, one, model(), everyone), EPOCH, NOW_S)


Said = Mapping[int, HeldStage]


def views(one: Instance, said: Said) -> dict[WorkerId, WorkerView]:
    """Workers by the number of their stage; those that are not named are dead."""
    return {
        place.worker_id: view(int(place.worker_id[1:]), stages=(stage,), heard_s=NOW_S + 1)
        for place in one.placements
        if (stage := said.get(int(place.worker_id[1:]))) is not None
    }


def judged(one: Instance, said: Said) -> Change | None:
    """What reports say of a group."""
    found = reconcile([Record(instance=one, model=model())], views(one, said), NOW_S + 20, RULES)
    return found[0] if found else None


def stage_of(one: Instance, at: int, *, whole: bool) -> HeldStage:
    place = next(place for place in one.placements if place.worker_id == f"w{at}")
    has = place.stage if whole else place.held or place.stage
    return replace(held(instance_id=one.instance_id), generation=one.generation, stage=has)


def test_as_many_workers_grow_as_instances_are_wanted() -> None:
    """Those with the room first, the lead always; a refused one is promised no more."""
    for targets in (1, 2, 4):
        one = grown(group(targets=targets))
        assert [place.stage for place in one.placements].count(WHOLE) == targets
        assert [place.held for place in one.placements] == list(PARTS)
        assert (one.state, one.targets) == (InstanceState.CONSOLIDATING, targets)
    (order,) = plan_growth([Record(instance=group(targets=3), model=model())])
    change = growth_of(order, group(targets=3), model(), {WorkerId("w0"), WorkerId("w2")})
    assert [place.stage == WHOLE for place in change.placements] == [True, False, True, False]
    assert change.targets == 2


def test_a_worker_with_free_memory_may_become_an_instance_too() -> None:
    one = group(targets=3, full=1)
    assert most_targets(one, model(), lambda _: (0, 1)) == 1
    roomy = {WorkerId("w2"): (500, 1)}
    assert most_targets(one, model(), lambda name: roomy.get(name, (0, 1))) == 2
    (order,) = plan_growth(
        [Record(instance=one, model=model())], lambda name: roomy.get(name, (0, 1))
    )
    assert [place.stage == WHOLE for place in order.placements] == [True, False, True, False]
    assert order.placements[2].device_bytes > 40


def test_what_is_added_in_a_burst_leaves_what_is_under_way() -> None:
    one = grown(group(targets=2))
    more = moved(
        one, Change(instance_id=one.instance_id, events=(), reason="", targets=4), EPOCH, NOW_S + 9
    )
    assert (more.generation, more.state_since_s) == (one.generation, one.state_since_s)
    after = grown(more)
    assert [place.stage for place in after.placements] == [WHOLE] * 4
    assert [place.held for place in after.placements] == list(PARTS)
    assert after.generation == one.generation + 1
    assert not plan_growth([Record(instance=after, model=model())])


def test_a_group_becomes_instances_one_after_the_other() -> None:
    one = grown(group(targets=3))
    nobody = {at: stage_of(one, at, whole=False) for at in range(4)}
    assert judged(one, nobody) is None
    others = nobody | {1: stage_of(one, 1, whole=True)}
    assert judged(one, others) is None, "the lead runs the pipeline still"
    change = judged(one, others | {0: stage_of(one, 0, whole=True)})
    assert change is not None
    assert change.events == ()
    alone = moved(one, change, EPOCH, NOW_S + 1)
    assert [place.worker_id for place in alone.placements] == ["w0", "w2"], "the fourth is let go"
    assert (alone.state, alone.targets) == (InstanceState.CONSOLIDATING, 2)
    assert alone.placements[0].held == WHOLE
    (new,) = instances_of(one, change.become, EPOCH, NOW_S + 1)
    assert new.lead == "w1"
    assert new.placements[0].grown_from == one.instance_id
    assert not new.placements[0].parts_of(model().spec), "there is nothing to fetch"
    assert promised([alone, new]) == 3
    last = {0: stage_of(alone, 0, whole=True), 2: stage_of(alone, 2, whole=False)}
    assert judged(alone, last) is None
    change = judged(alone, last | {2: stage_of(alone, 2, whole=True)})
    assert change is not None
    assert change.events == (InstanceEvent.CONSOLIDATION_DONE,)
    done = moved(alone, change, EPOCH, NOW_S + 2)
    assert (done.state, done.targets, len(done.placements)) == (InstanceState.READY, 1, 1)
    (second,) = instances_of(alone, change.become, EPOCH, NOW_S + 2)
    assert second.instance_id != new.instance_id


def test_a_lead_that_is_whole_loses_nothing_with_the_others() -> None:
    one = grown(group(targets=4))
    lead = {0: stage_of(one, 0, whole=True)}
    change = judged(one, lead)
    assert change is not None
    assert change.events == (InstanceEvent.CONSOLIDATION_DONE,), "the others are dead"
    failed = replace(stage_of(one, 1, whole=False), state=HeldState.FAILED, reason="no bytes")
    change = judged(one, {**lead, 1: failed, 2: stage_of(one, 2, whole=False)})
    assert change is not None
    assert [place.worker_id for place in change.placements] == ["w0", "w2"]
    change = judged(one, {1: stage_of(one, 1, whole=True)})
    assert change is not None
    assert change.events == (InstanceEvent.FAIL,), "without its lead it is lost"


@given(
    st.integers(1, 4),
    st.integers(2, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["grow", "die", "more", "less"])), max_size=12
    ),
)
@settings(max_examples=300, deadline=None)
def test_no_order_of_events_loses_a_worker_or_uses_it_twice(
    targets: int, size: int, events: list[tuple[int, str]]
) -> None:
    """Whatever grows, dies or is asked for: nobody's worker is in two instances, there are never
    more instances than were promised, and the group ends as one.
    """
    one = grown(group(targets=min(targets, size), size=size))
    whole, dead = set[int](), set[int]()
    made: list[Instance] = []
    events = [(at % size, what) for at, what in events]
    for at, what in [*events, *((at, "grow") for at in range(size))]:
        if what == "grow":
            whole.add(at)
        elif what == "die" and at > 0:
            dead.add(at)
        elif what in ("more", "less") and one.state is InstanceState.CONSOLIDATING:
            change = Change(instance_id=one.instance_id, events=(), reason="", targets=1 + at)
            one = moved(one, change, EPOCH, NOW_S)
            for order in plan_growth([Record(instance=one, model=model())]):
                everyone = {place.worker_id for place in order.placements}
                one = moved(one, growth_of(order, one, model(), everyone), EPOCH, NOW_S)
        if one.state is not InstanceState.CONSOLIDATING:
            continue
        said = {
            number: stage_of(one, number, whole=number in whole)
            for place in one.placements
            if (number := int(place.worker_id[1:])) not in dead
        }
        change = judged(one, said)
        if change is None:
            continue
        promised_before = promised([one])
        if InstanceEvent.FAIL in change.events:
            assert dead, "nothing else fails"
            return
        new = instances_of(one, change.become, EPOCH, NOW_S)
        made += new
        one = moved(one, change, EPOCH, NOW_S)
        assert promised([one, *new]) <= max(1, promised_before)
        used = [place.worker_id for each in (one, *made) for place in each.placements]
        assert len(used) == len(set(used))
        assert len({each.instance_id for each in (one, *made)}) == 1 + len(made)
    assert one.state is InstanceState.READY
    assert len(one.placements) == 1


# Targets.


def at_most(_: Instance) -> int:
    return 4


def seen(*instances: Instance, waits: int = 0, max_instances: int = 8) -> Snapshot:
    asked = (demand(waiting=waits),) if waits else ()
    return world(*instances, waiting=asked, models=(model(max_instances=max_instances),))


@pytest.mark.parametrize("state", [InstanceState.LOADING, *sorted(SERVING)])
def test_a_burst_grows_what_a_group_is_to_become(state: InstanceState) -> None:
    """While it loads, serves and consolidates; before anything is started for it."""
    one = replace(group(state=state), in_flight=4 if state in SERVING else 0)
    (said,) = plan_targets(seen(one, waits=9), SCALING, at_most)
    assert said.targets == (4 if state in SERVING else 3)
    assert "9 requests wait" in said.reason
    after = moved(one, retargeted(said), EPOCH, NOW_S)
    assert after.reason == one.reason
    now = seen(after, waits=9)
    assert not plan_targets(now, SCALING, at_most)
    assert not plan_scaling(now, SCALING).starts, "its instances are on their way"
    more = seen(after, waits=40)
    assert not plan_targets(more, SCALING, lambda _: 3), "no more than its workers have room for"


def test_what_is_over_shrinks_them() -> None:
    one = replace(group(targets=4, state=InstanceState.CONSOLIDATING), in_flight=3)
    assert not plan_targets(seen(replace(one, in_flight=9)), SCALING, at_most)
    (said,) = plan_targets(seen(one), SCALING, at_most)
    assert said.targets == 2, "more runs than half of what one carries"
    fresh = replace(one, state_since_s=NOW_S)
    assert not plan_targets(seen(fresh), SCALING, at_most), "requests are on their way"
    loading = replace(group(targets=4, state=InstanceState.LOADING), last_used_s=NOW_S)
    assert not plan_targets(seen(loading), SCALING, at_most)
    (said,) = plan_targets(seen(replace(loading, last_used_s=NOW_S - 2)), SCALING, at_most)
    assert said.targets == 1


@given(
    st.integers(0, 60),
    st.integers(0, 60),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 6),
)
@settings(max_examples=300, deadline=None)
def test_targets_come_to_rest(
    waits: int, runs: int, targets: list[int], max_instances: int
) -> None:
    """Asked again after its own word it says nothing new; it stays within bounds, and promises no
    fewer than the requests need, as far as there is room.
    """
    groups = [
        replace(
            group(targets=number, state=InstanceState.CONSOLIDATING, name=f"i{at}"),
            in_flight=runs if at == 0 else 0,
        )
        for at, number in enumerate(targets)
    ]
    before = promised(groups)

    def said(groups: list[Instance]) -> dict[InstanceId, int]:
        now = seen(*groups, waits=waits, max_instances=max_instances)
        return {one.instance_id: one.targets for one in plan_targets(now, SCALING, at_most)}

    news = said(groups)
    after = [replace(one, targets=news.get(one.instance_id, one.targets)) for one in groups]
    assert said(after) == {}
    assert all(1 <= one.targets <= 4 for one in after)
    wanted = min(max(1, -(-(waits + runs) // 4)), max_instances)
    assert promised(after) >= min(wanted, 4 * len(groups), before)
    if promised(after) > before:
        assert promised(after) <= wanted
