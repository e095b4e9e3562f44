"""Groups that become shorter pipelines, or stay what they are."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.cluster import HeldStage
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.growing import growth_of, plan_growth
from pilotlight.policy.control.reconcile import ReconcileRules, moved, reconcile
from pilotlight.policy.control.shortening import plan_shorter
from pilotlight.policy.control.testing import view
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Epoch, Generation, WorkerId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.model import Stage
from pilotlight.policy.placement import ServiceRules
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.policy.remaining import remaining
from pilotlight.policy.testing import NOW_S, held, instance, model

PARTS = (Stage(0, 1), Stage(1, 2), Stage(2, 3), Stage(3, 4))
RULES = ReconcileRules(term_started_s=NOW_S - 1000, hold_deadline_s=10.0)
EPOCH = Epoch(1)
MODEL = model(part_bytes=1000)
"""Of which KV is a small part."""


def group(stages: tuple[Stage, ...] = PARTS) -> Instance:
    """Each worker has what its stage needs."""
    one = instance(state=InstanceState.READY, since_s=NOW_S - 5)
    places = tuple(
        replace(
            one.placements[0],
            worker_id=WorkerId(f"w{at}"),
            stage=stage,
            device_bytes=stage_room(MODEL, stage).least_bytes,
        )
        for at, stage in enumerate(stages)
    )
    return replace(one, placements=places, generation=Generation(1))


def room(*free_bytes: int):
    """Free bytes of each worker."""
    return lambda worker_id: (free_bytes[int(worker_id[1:])], 1)


def more(stage: Stage, longer: Stage) -> int:
    """What a worker needs beside what it has."""
    return stage_room(MODEL, longer).least_bytes - stage_room(MODEL, stage).least_bytes


def stages_of(placements: tuple[Placement, ...]) -> list[Stage]:
    return [one.stage for one in placements]


TWO = more(PARTS[0], Stage(0, 2))
THREE = more(PARTS[0], Stage(0, 3))
WHOLE = more(PARTS[0], Stage(0, 4))
HALF = more(PARTS[2], Stage(2, 4))
"""Of the third worker; the last one has a head already, and needs less."""


@pytest.mark.parametrize(
    ("free_bytes", "stages"),
    [
        ((TWO, 0, HALF, 0), [Stage(0, 2), PARTS[1], Stage(2, 4), PARTS[3]]),
        ((TWO, 0, 0, HALF), [Stage(0, 2), PARTS[1], PARTS[2], Stage(2, 4)]),
        ((THREE, 0, 0, 0), [Stage(0, 3), PARTS[1], PARTS[2], PARTS[3]]),
        ((TWO, 0, 0, 0), [Stage(0, 2), PARTS[1], PARTS[2], PARTS[3]]),
        ((THREE, 0, HALF, 0), [Stage(0, 2), PARTS[1], Stage(2, 4), PARTS[3]]),
        ((WHOLE, 0, HALF, 0), [Stage(0, 4), PARTS[1], PARTS[2], PARTS[3]]),
    ],
)
def test_the_fewest_workers_with_the_room_remain(free_bytes, stages) -> None:
    """The whole model on the lead before all, then the pipeline with the smallest stages."""
    (order,) = plan_growth([Record(instance=group(), model=MODEL)], room(*free_bytes))
    assert stages_of(order.placements) == stages


def test_a_group_stays_where_its_lead_has_no_room_for_more() -> None:
    records = [Record(instance=group(), model=MODEL)]
    assert not plan_growth(records, room(0, WHOLE, WHOLE, WHOLE))
    assert not plan_growth(records, room(TWO - 1, 0, 0, 0))
    assert not plan_growth(records, room(WHOLE, 0, 0, 0), shorter=False)
    two = group(stages=(Stage(0, 2), Stage(2, 4)))
    assert not plan_growth([Record(instance=two, model=MODEL)], room(0, 0))


def test_requests_keep_as_many_blocks_as_the_group_has() -> None:
    """A worker needs KV for the tokens of the smallest stage, not the least there is."""
    one = group()
    per_token = MODEL.spec.kv_bytes_per_token(PARTS[1], MODEL.dtype)
    ample = tuple(
        replace(place, device_bytes=place.device_bytes + 1000 * per_token)
        for place in one.placements
    )
    order = plan_shorter(replace(one, placements=ample), MODEL, room(TWO, 0, HALF, 0))
    assert order is None
    most = HALF + 1000 * per_token
    order = plan_shorter(replace(one, placements=ample), MODEL, room(most, 0, most, 0))
    assert order is not None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, WHOLE - 1), min_size=4, max_size=4),
    st.sampled_from([PARTS, (Stage(0, 1), Stage(1, 3), Stage(3, 4)), (Stage(0, 2), *PARTS[2:])]),
)
def test_it_is_the_shortest_of_all(free_bytes: list[int], stages: tuple[Stage, ...]) -> None:
    """Against all ways to share the layers out."""
    one = group(stages=stages)
    order = plan_shorter(one, MODEL, room(*free_bytes))
    able = {
        at: {
            longer
            for longer in itertools.starmap(Stage, itertools.combinations(range(5), 2))
            if place.stage.is_within(longer)
            and place.device_bytes + free_bytes[at] >= stage_room(MODEL, longer).least_bytes
        }
        for at, place in enumerate(one.placements)
    }
    edges = {0, *(stage.stop for stage in stages)}
    ways = [
        kept
        for size in range(2, len(stages))
        for workers in itertools.combinations(range(len(stages)), size)
        for kept in itertools.product(*(able[at] for at in workers))
        if workers[0] == 0
        and kept[0] != stages[0]
        and kept[0].start == 0
        and kept[-1].stop == 4
        and all(a.stop == b.start for a, b in itertools.pairwise(kept))
        and all(stage.stop in edges for stage in kept)
    ]
    if order is None:
        assert not ways
        return
    found = [order.placements[at].stage for at in remaining(stages_of(order.placements))]
    shortest = min(map(len, ways))
    assert len(found) == shortest
    largest = min(
        max(MODEL.device_bytes(stage) for stage in kept) for kept in ways if len(kept) == shortest
    )
    assert max(map(MODEL.device_bytes, found)) == largest
    for at, place in enumerate(order.placements):
        assert place.device_bytes <= one.placements[at].device_bytes + free_bytes[at]
        assert place.device_bytes >= one.placements[at].device_bytes


def consolidating() -> Instance:
    one = group()
    (order,) = plan_growth([Record(instance=one, model=MODEL)], room(TWO, 0, HALF, 0))
    everyone = {place.worker_id for place in order.placements}
    return moved(one, growth_of(order, one, MODEL, everyone), EPOCH, NOW_S)


def test_nothing_is_written_before_every_worker_has_its_room() -> None:
    one = group()
    (order,) = plan_growth([Record(instance=one, model=MODEL)], room(TWO, 0, HALF, 0))
    change = growth_of(order, one, MODEL, {WorkerId("w0")})
    assert not change.events
    assert not change.placements
    after = consolidating()
    assert after.state is InstanceState.CONSOLIDATING
    assert [place.held for place in after.placements] == list(PARTS)
    assert after.targets == 1
    assert not plan_growth([Record(instance=after, model=MODEL)], room(WHOLE, 0, 0, 0))


def judged(one: Instance, said: Mapping[int, HeldStage | None]):
    """What reports say; workers of which they say nothing are dead."""
    views = {
        WorkerId(f"w{at}"): view(at, stages=(stage,) if stage else (), heard_s=NOW_S + 1)
        for at, stage in said.items()
    }
    changes = reconcile([Record(instance=one, model=MODEL)], views, NOW_S + 60, RULES)
    return changes[0] if changes else None


def says(one: Instance, at: int, stage: Stage, *, new: bool = True) -> HeldStage:
    generation = one.generation if new else Generation(one.generation - 1)
    return replace(
        held(), instance_id=one.instance_id, stage=stage, generation=generation, open=at == 0
    )


def test_it_is_shorter_when_all_that_remain_say_so() -> None:
    one = consolidating()
    said = {at: says(one, at, stage) for at, stage in enumerate(PARTS)}
    assert judged(one, said) is None
    said[2] = says(one, 2, Stage(2, 4))
    assert judged(one, said) is None, "the lead goes on in the longer ring"
    said[0] = says(one, 0, Stage(0, 2), new=False)
    assert judged(one, said) is None
    said[0] = says(one, 0, Stage(0, 2))
    change = judged(one, said)
    assert change is not None
    assert change.events == (InstanceEvent.CONSOLIDATION_DONE,)
    after = moved(one, change, EPOCH, NOW_S + 60)
    assert after.state is InstanceState.READY
    assert [(place.worker_id, place.stage, place.held) for place in after.placements] == [
        ("w0", Stage(0, 2), None),
        ("w2", Stage(2, 4), None),
    ]
    assert after.generation == one.generation + 1
    # What is left behind is no part of it: that it is gone says nothing.
    assert judged(one, {at: stage for at, stage in said.items() if at in (0, 2)}) == change


@pytest.mark.parametrize("lost", range(4))
def test_a_worker_that_is_lost_before_fails_the_group(lost: int) -> None:
    one = consolidating()
    said = {at: says(one, at, stage) for at, stage in enumerate(PARTS) if at != lost}
    change = judged(one, said)
    assert change is not None
    assert change.events == (InstanceEvent.FAIL,)


def test_what_remains_of_stages() -> None:
    assert remaining(PARTS) == ()
    assert remaining((Stage(0, 4), *PARTS[1:])) == ()
    assert remaining((Stage(0, 2), PARTS[1], Stage(2, 4), PARTS[3])) == (0, 2)
    assert remaining((PARTS[3], Stage(2, 4), PARTS[1], Stage(0, 2))) == (3, 1)
    assert remaining((Stage(0, 3), PARTS[1], PARTS[2], PARTS[3])) == (0, 3)
    assert remaining((Stage(0, 3), PARTS[1], Stage(2, 4), PARTS[3])) == (), "they share a layer"


def test_a_group_that_has_requests_is_evicted_nowhere() -> None:
    """Its followers look idle on their workers."""
    one = replace(group(), in_flight=1, state_since_s=NOW_S - 1000, last_used_s=NOW_S - 1000)
    assert ServiceRules().keeps(one, NOW_S)
    assert not ServiceRules().keeps(replace(one, in_flight=0), NOW_S)
    alone = replace(one, placements=one.placements[:1])
    assert not ServiceRules().keeps(alone, NOW_S)
