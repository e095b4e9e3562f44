"""Lanes: which job goes next, and what is kept for others."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.lanes import (
    LaneBounds,
    LaneHolders,
    LaneJob,
    LaneLoad,
    admit_job,
    next_job,
    turn_of,
    waits_for_holder,
    wants_holder,
)


def job(
    number: int, owner: str = "a", model: str = "m", *, long: bool = False, turn: int = 0
) -> LaneJob:
    return LaneJob(number=number, owner=owner, model=model, long=long, turn=turn or number)


def test_short_jobs_go_first():
    assert next_job([job(1, long=True), job(2)], [], 2) == job(2)


def test_nothing_begins_when_every_process_works():
    assert next_job([job(3)], [job(1, model="x"), job(2, model="y")], 2) is None


def test_one_process_is_kept_for_short_jobs():
    running = [job(1, "b", "x", long=True)]
    assert next_job([job(2, model="y", long=True)], running, 2) is None
    assert next_job([job(2, model="y", long=True), job(3, model="z")], running, 2) == job(
        3, model="z"
    )


def test_no_model_has_every_process():
    assert next_job([job(2), job(3, model="other")], [job(1)], 2) == job(3, model="other")
    assert next_job([job(2)], [job(1)], 3) == job(2)


def test_no_owner_has_every_process_for_long_jobs():
    running = [job(1, model="x", long=True), job(2, model="y", long=True)]
    own, other = job(3, model="z", long=True), job(4, "b", "z", long=True)
    assert next_job([own], running, 4) is None
    assert next_job([own, other], running, 4) == other


def test_a_models_long_jobs_leave_a_process_for_its_short_ones():
    running = [job(1, long=True)]
    long, short = job(2, "b", long=True), job(3, "b")
    assert next_job([long, short], running, 3) == short
    assert next_job([long], running, 3) is None
    assert next_job([long], running, 4) == long


def test_what_runs_no_models_code_is_bounded_by_its_length_alone():
    assert next_job([job(2, model="")], [job(1, model="")], 2) == job(2, model="")


def test_owners_take_turns():
    """One owner's hundred do not stand in front of another's one, and no owner that comes later
    overtakes for ever.
    """
    waiting: list[LaneJob] = []
    now_turn = 0
    for number, owner in enumerate(["a"] * 100 + ["b", "b", "c"]):
        new = job(number, owner)
        waiting.append(replace(new, turn=turn_of(owner, waiting, now_turn)))
    order: list[str] = []
    while waiting:
        chosen = next_job(waiting, [], 2)
        assert chosen is not None
        now_turn = max(now_turn, chosen.turn)
        waiting.remove(chosen)
        order.append(chosen.owner)
    assert order[:5] == ["a", "b", "c", "a", "b"]
    assert turn_of("c", [], now_turn) == now_turn + 1, "an owner that was away has saved nothing up"


@given(
    bounds=st.builds(LaneBounds, jobs=st.integers(1, 50), bytes=st.integers(1, 500)),
    sizes=st.lists(st.integers(1, 60), max_size=80),
)
def test_one_owner_leaves_room_for_the_next(bounds: LaneBounds, sizes: list[int]):
    held: list[int] = []
    for size in sizes:
        own = LaneLoad(jobs=len(held), bytes=sum(held), own_jobs=len(held), own_bytes=sum(held))
        if admit_job(own, bounds, size):
            held.append(size)
    assert len(held) <= max(1, bounds.jobs // 2)
    assert len(held) <= 1 or sum(held) <= bounds.bytes // 2
    another = LaneLoad(jobs=len(held), bytes=sum(held), own_jobs=0, own_bytes=0)
    if bounds.jobs >= 3 and bounds.bytes >= sum(held) + 2:
        assert admit_job(another, bounds, 1)


def test_the_first_job_is_taken_whatever_its_size():
    nothing = LaneLoad(jobs=0, bytes=0, own_jobs=0, own_bytes=0)
    assert admit_job(nothing, LaneBounds(jobs=1, bytes=1), 1000)
    one = replace(nothing, jobs=1, bytes=1)
    assert not admit_job(one, LaneBounds(jobs=9, bytes=10), 5)
    assert admit_job(one, LaneBounds(jobs=9, bytes=10), 4)


@pytest.mark.parametrize(
    ("idle", "busy", "given", "waits", "wants"),
    [
        (True, False, False, False, False),
        (True, True, True, False, False),
        (False, True, False, True, True),
        (False, True, True, True, False),
        (False, False, True, True, False),
        (False, False, False, False, False),
    ],
    ids=["idle", "idle and others", "busy", "busy and given", "given", "none"],
)
def test_jobs_wait_for_who_holds_their_bundle(idle, busy, given, waits, wants):
    holders = LaneHolders(idle=idle, busy=busy, given=given)
    assert (waits_for_holder(holders), wants_holder(holders)) == (waits, wants)
