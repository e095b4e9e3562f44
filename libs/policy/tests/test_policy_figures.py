"""Costs, coverage, estimates, admission, liveness, and the lifecycle's table."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.admission import QueueBounds, QueueFacts, admit_held
from pilotlight.policy.cluster import DeviceKind, Liveness
from pilotlight.policy.cost import (
    StageCost,
    group_tpot_s,
    group_ttft_s,
    share_bytes_per_s,
    transfer_s,
)
from pilotlight.policy.coverage import MAX_TRANSIT_S, coverage_of, departed_s, union
from pilotlight.policy.estimates import ColdStartSample, learn
from pilotlight.policy.ids import ModelName
from pilotlight.policy.instance import (
    ENDED,
    TRANSITIONS,
    IllegalTransition,
    InstanceEvent,
    path,
    step,
)
from pilotlight.policy.liveness import liveness_of
from pilotlight.policy.phase import Moment, Phase, PhaseName
from pilotlight.policy.plan import InstanceState


def phase(name: PhaseName, start_s: float, end_s: float, offset_s: float = 0.0) -> Phase:
    return Phase(name=name, start_s=start_s, end_s=end_s, wall_offset_s=offset_s, process="p")


intervals = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(intervals, max_size=12))
def test_the_union_covers_exactly_the_same_points(some: list[tuple[int, int]]) -> None:
    merged = union([(float(a), float(b)) for a, b in some])
    for unit in range(41):
        inside = any(a <= unit < b for a, b in some)
        assert inside == any(a <= unit < b for a, b in merged)
    assert all(first[1] < second[0] for first, second in pairwise(merged))


@given(
    st.lists(st.tuples(st.sampled_from(list(PhaseName)), intervals), max_size=12),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_coverage_counts_each_point_of_the_window_once(
    some: list[tuple[PhaseName, tuple[int, int]]], start: int, length: int
) -> None:
    phases = [phase(name, a, b) for name, (a, b) in some]
    figures = coverage_of(
        phases,
        Moment(at_s=start, wall_offset_s=0.0),
        Moment(at_s=start + length, wall_offset_s=0.0),
    )
    points = [
        u
        for u in range(start, start + length)
        if any(a <= u < b for n, (a, b) in some if n is not PhaseName.QUEUE)
    ]
    assert figures.covered_s == pytest.approx(len(points))
    assert figures.coverage == pytest.approx(len(points) / length if length else 1.0)
    assert sum(gap.end_s - gap.start_s for gap in figures.gaps) == pytest.approx(
        length - len(points)
    )


def test_intervals_of_other_hosts_are_laid_on_one_axis() -> None:
    here, there = 1_000_000.0, 999_000.0
    figures = coverage_of(
        [
            phase(PhaseName.FETCH, 1100.0, 1101.0, there),
            phase(PhaseName.LOAD, 101.0, 102.0, here + 0.01),
        ],
        Moment(at_s=100.0, wall_offset_s=here),
        Moment(at_s=102.0, wall_offset_s=here),
    )
    assert figures.coverage == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("sent", "departed"),
    [
        (None, 500.0),
        (Moment(at_s=499.8, wall_offset_s=0.0), 499.8),
        (Moment(at_s=499.8, wall_offset_s=0.04), 499.8),
        (Moment(at_s=9.8, wall_offset_s=490.0), 499.8),
        (Moment(at_s=500.1, wall_offset_s=0.0), 500.0),
        (Moment(at_s=499.8, wall_offset_s=0.5), 500.0),
        (Moment(at_s=500.0 - MAX_TRANSIT_S, wall_offset_s=0.0), 500.0 - MAX_TRANSIT_S),
        (Moment(at_s=499.9 - MAX_TRANSIT_S, wall_offset_s=0.0), 500.0),
        (Moment(at_s=499.8, wall_offset_s=-3600.0), 500.0),
    ],
    ids=[
        "not-said",
        "one-host",
        "offsets-of-one-host",
        "other-host",
        "later",
        "other-host-later",
        "longest",
        "too-long",
        "hours",
    ],
)
def test_a_phase_begins_when_its_message_left(sent: Moment | None, departed: float) -> None:
    assert departed_s(sent, Moment(at_s=500.0, wall_offset_s=0.0)) == pytest.approx(departed)


def test_reports_before_the_window_count_as_seconds_only() -> None:
    figures = coverage_of(
        [
            phase(PhaseName.QUEUE, 0, 10),
            phase(PhaseName.SCHEDULE, 5, 10),
            phase(PhaseName.FETCH, 10, 14),
            phase(PhaseName.FETCH, 12, 15),
        ],
        Moment(at_s=10.0, wall_offset_s=0.0),
        Moment(at_s=20.0, wall_offset_s=0.0),
    )
    assert figures.coverage == pytest.approx(0.5)
    assert {one.name.value: one.seconds for one in figures.seconds} == {
        "queue": 10,
        "schedule": 5,
        "fetch": 5,
    }


def test_costs() -> None:
    assert transfer_s(0, 0) == 0
    assert transfer_s(1, 0) == math.inf
    assert share_bytes_per_s(100, 1) == 50
    one = StageCost(fetch_s=2.0, load_s=1.0, prefill_s=0.5, decode_s=0.1)
    assert group_ttft_s((one,), wait_s=1.0) == pytest.approx(3.5)
    assert group_tpot_s((one,)) == pytest.approx(0.1)
    late = StageCost(fetch_s=2.4, load_s=1.0, prefill_s=0.5, decode_s=0.1)
    assert group_ttft_s((one, late), hop_s=0.0) == pytest.approx(3.0), (
        "a later stage may be ready later by what runs before it"
    )
    assert group_tpot_s((one, late), hop_s=0.01) == pytest.approx(0.22)


def test_estimates_follow_and_ignore_what_was_not_measured() -> None:
    def sample(ttft_s: float, fetch: float | None) -> ColdStartSample:
        return ColdStartSample(
            model=ModelName("m"), device_kind=DeviceKind.CPU, ttft_s=ttft_s, fetch_bytes_per_s=fetch
        )

    first = learn(None, sample(1.0, 100.0))
    assert (first.cold_ttft_s, first.fetch_bytes_per_s, first.samples) == (1.0, 100.0, 1)
    second = learn(first, sample(2.0, None))
    assert second.cold_ttft_s == pytest.approx(1.3)
    assert second.fetch_bytes_per_s == 100.0
    assert learn(learn(None, sample(1.0, None)), sample(1.0, 50.0)).fetch_bytes_per_s == 50.0


def test_held_requests_are_bounded_and_told_when_to_come_back() -> None:
    bounds = QueueBounds(total_requests=10, model_requests=4)
    assert admit_held(QueueFacts(total_requests=9, model_requests=3), bounds, None).admitted
    full = admit_held(
        QueueFacts(total_requests=9, model_requests=4, oldest_age_s=2.0), bounds, None
    )
    assert not full.admitted
    assert full.retry_after_s == pytest.approx(3.0)
    assert not admit_held(QueueFacts(total_requests=10, model_requests=0), bounds, None).admitted


def test_liveness() -> None:
    ages = [0.0, 0.99, 1.0, 2.9, 3.0]
    assert [liveness_of(age) for age in ages] == [
        Liveness.ALIVE,
        Liveness.ALIVE,
        Liveness.SUSPECT,
        Liveness.SUSPECT,
        Liveness.DEAD,
    ]


@given(st.sampled_from(list(InstanceState)), st.sampled_from(list(InstanceState)))
def test_every_path_is_legal_and_leads_to_its_end(start: InstanceState, end: InstanceState) -> None:
    try:
        events = path(start, end)
    except IllegalTransition:
        assert end is not start
        return
    state = start
    for event in events:
        state = step(state, event)
    assert state is end


@given(st.lists(st.sampled_from(list(InstanceEvent)), max_size=12))
def test_whatever_happens_an_instance_ends_and_stays_ended(events: list[InstanceEvent]) -> None:
    state = InstanceState.PLANNED
    for event in events:
        if (state, event) in TRANSITIONS:
            assert state not in ENDED
            state = step(state, event)
        else:
            with pytest.raises(IllegalTransition):
                step(state, event)
    if state not in ENDED:
        assert step(state, InstanceEvent.FAIL) is InstanceState.FAILED
