"""Control: reports become changes, books stay indexed, and holds follow from the books."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import FetchPriority, HeldState, Liveness, WorkerView
from pilotlight.policy.control.books import Books, Record, refreshed
from pilotlight.policy.control.holds import (
    StageHold,
    disagreement,
    fetches_of,
    reached_at,
    stages_of,
)
from pilotlight.policy.control.reconcile import Change, ReconcileRules, moved, reconcile
from pilotlight.policy.control.testing import record, view
from pilotlight.policy.ids import Epoch, Generation, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import BRINGING, ENDED, InstanceEvent, step
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import Moment
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import NOW_S, held, instance, model, node

S = InstanceState
H = HeldState
E = InstanceEvent
RULES = ReconcileRules(term_started_s=NOW_S - 500, hold_deadline_s=10.0)


def judged(
    one: Instance, *views: WorkerView, seen: bool = False, now_s: float = NOW_S
) -> tuple[InstanceEvent, ...]:
    tracked = Record(
        instance=one, model=model(), seen_on=frozenset({one.lead}) if seen else frozenset()
    )
    changes = reconcile([tracked], {each.facts.worker_id: each for each in views}, now_s, RULES)
    return changes[0].events if changes else ()


# Reconciliation


def test_a_start_follows_its_worker() -> None:
    fetching = instance(state=S.FETCHING, since_s=NOW_S - 0.2)
    assert judged(fetching, view()) == ()
    assert judged(fetching, view(stages=(held(state=H.LOADING),))) == (E.LOAD_STARTED,)
    assert judged(fetching, view(stages=(held(),))) == (E.LOAD_STARTED, E.ALL_STAGES_READY)
    loading = replace(fetching, state=S.LOADING)
    assert judged(loading, view(stages=(held(state=H.LOADING),))) == ()
    assert judged(loading, view(stages=(held(),))) == (E.ALL_STAGES_READY,)


def test_what_was_held_and_is_not_any_more_has_failed() -> None:
    assert judged(instance(state=S.READY), view()) == (E.FAIL,)
    assert judged(instance(state=S.LOADING), view()) == (E.FAIL,)
    assert judged(instance(state=S.FETCHING, since_s=NOW_S - 1), view(), seen=True) == (E.FAIL,)
    assert judged(instance(state=S.READY, since_s=NOW_S), view(heard_s=NOW_S - 0.1)) == (), (
        "a report older than the change says nothing"
    )


def test_death_failure_and_refusal_to_hold() -> None:
    assert judged(instance(), view(stages=(held(),), liveness=Liveness.DEAD)) == (E.FAIL,)
    assert judged(instance(), view(stages=(held(),), liveness=Liveness.SUSPECT)) == ()
    assert judged(instance(state=S.LOADING), view(stages=(held(state=H.FAILED),))) == (E.FAIL,)
    assert judged(instance(state=S.FETCHING, since_s=NOW_S - 11), view()) == (E.FAIL,)
    assert judged(instance(), now_s=NOW_S) == (E.FAIL,), (
        "a worker that was silent for the dead time"
    )


def test_an_evicted_stage_is_released_with_its_drain() -> None:
    assert judged(instance(), view(stages=(held(state=H.EVICTED),))) == (E.DRAIN, E.RELEASED)
    assert judged(instance(), view(stages=(held(state=H.DRAINING),))) == (E.DRAIN,)


def test_a_draining_instance_is_gone_when_nobody_holds_it() -> None:
    draining = instance(state=S.DRAINING, since_s=NOW_S - 1)
    assert judged(draining, view(stages=(held(state=H.DRAINING),))) == ()
    assert judged(draining, view()) == (E.RELEASED,)
    assert judged(draining, view(stages=(held(state=H.DRAINING),), liveness=Liveness.DEAD)) == (
        E.RELEASED,
    )


@given(
    st.sampled_from([state for state in S if state not in ENDED]),
    st.none() | st.sampled_from(list(H)),
    st.sampled_from(list(Liveness)),
    st.sampled_from([0.0, 0.5, 20.0]),
    st.booleans(),
)
def test_reconciliation_makes_legal_moves_and_comes_to_rest(
    state: InstanceState, stage: HeldState | None, liveness: Liveness, age_s: float, seen: bool
) -> None:
    one = instance(state=state, since_s=NOW_S - age_s)
    worker_view = view(stages=(held(state=stage),) if stage is not None else (), liveness=liveness)
    for _ in range(4):
        events = judged(one, worker_view, seen=seen)
        if not events:
            return
        following = one.state
        for event in events:
            following = step(following, event)
        one = replace(one, state=following, state_since_s=NOW_S)
    pytest.fail("the same report goes on changing the instance")


# Holds


def test_holds_are_the_whole_desired_state() -> None:
    books = Books().put(
        record(instance(instance_id="a", state=S.FETCHING), "00-aa-bb-01"),
        record(instance(instance_id="b", state=S.DRAINING)),
        record(instance(instance_id="c", worker_id="w1")),
        replace(record(instance(instance_id="d", state=S.PLANNED)), tentative=True),
    )
    holds = stages_of(WorkerId("w0"), books)
    assert [(hold.instance_id, hold.draining, hold.trace_parent) for hold in holds] == [
        ("a", False, "00-aa-bb-01"),
        ("b", True, ""),
    ]
    (fetch,) = fetches_of(node().node_id, books, {})
    assert fetch.instance_id == "a", "what is loaded, or leaves, is fetched no more"
    assert fetch.parts == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("state", sorted(BRINGING))
def test_what_a_group_grows_by_yields_to_what_cold_starts_wait_for(state: InstanceState) -> None:
    (fetch,) = fetches_of(node().node_id, Books().put(record(instance(state=state))), {})
    assert (fetch.priority is FetchPriority.PREFETCH) == (state is S.CONSOLIDATING)


def test_a_report_that_disagrees_is_told_again() -> None:
    one = instance()

    def holds(*instances: Instance) -> tuple[StageHold, ...]:
        return stages_of(WorkerId("w0"), Books().put(*(record(each) for each in instances)))

    has = view(stages=(held(),))
    assert disagreement(holds(one), has) is None
    assert disagreement(holds(one), view())
    assert disagreement(holds(replace(one, generation=Generation(2))), has)
    drain = holds(replace(one, state=S.DRAINING, generation=Generation(2)))
    assert disagreement(drain, has)
    assert disagreement(drain, view(stages=(held(state=H.DRAINING),))) is None
    assert disagreement(drain, view()) is None
    assert disagreement((), has)
    assert disagreement((), view(stages=(held(state=H.DRAINING),))) is None


def test_a_drain_is_a_new_generation_and_readiness_is_remembered() -> None:
    loading = instance(state=S.LOADING)
    changes = reconcile([record(loading)], {WorkerId("w0"): view(stages=(held(),))}, NOW_S, RULES)
    ready = moved(loading, changes[0], Epoch(4), NOW_S)
    assert (ready.state, ready.generation, ready.epoch, ready.served, ready.last_used_s) == (
        S.READY,
        1,
        4,
        True,
        NOW_S,
    )
    changes = reconcile(
        [record(ready)], {WorkerId("w0"): view(stages=(held(state=H.DRAINING),))}, NOW_S, RULES
    )
    assert moved(ready, changes[0], Epoch(4), NOW_S).generation == 2


def test_a_group_names_its_members_and_where_they_are_reached() -> None:
    whole = instance(state=S.LOADING)
    assert stages_of(WorkerId("w0"), Books().put(record(whole)))[0].members == ()
    first, second = (
        replace(
            instance(worker_id=f"w{index}").placements[0], stage=Stage(2 * index, 2 * index + 2)
        )
        for index in range(2)
    )
    books = Books().put(record(replace(whole, placements=(second, first))))
    for worker_id in ("w0", "w1"):
        (hold,) = stages_of(WorkerId(worker_id), books)
        assert [(one.worker_id, one.stage) for one in hold.members] == [
            ("w0", Stage(0, 2)),
            ("w1", Stage(2, 4)),
        ]
    known = view(0, stages=(replace(held(), port=7),))
    nodes = {NodeId("n0"): replace(node(), dataplane_host="h")}
    reached = [
        reached_at(one, nodes, {WorkerId("w0"): known}, InstanceId("i")) for one in hold.members
    ]
    assert [(one.host, one.port) for one in reached] == [("h", 7), ("h", 0)]
    assert reached_at(hold.members[0], {}, {}, InstanceId("i")) == hold.members[0]


def test_other_stages_are_a_new_generation() -> None:
    before = instance(state=S.READY)
    longer = (replace(before.placements[0], stage=Stage(0, 6), device_bytes=9),)
    change = Change(instance_id=before.instance_id, events=(), reason="it grows", placements=longer)
    after = moved(before, change, Epoch(4), NOW_S)
    assert (after.placements, after.generation, after.state) == (
        longer,
        before.generation + 1,
        S.READY,
    )
    assert moved(after, change, Epoch(4), NOW_S).generation == after.generation, (
        "said twice is said once"
    )


def test_an_instance_is_activated_from_when_its_last_stage_was_loaded() -> None:
    stages = instance(state=S.LOADING)
    two = replace(stages, placements=(stages.placements[0], instance(worker_id="w1").placements[0]))
    early, late = Moment(at_s=990.0, wall_offset_s=5.0), Moment(at_s=12.0, wall_offset_s=984.0)

    def loaded(*moments: Moment | None) -> Moment | None:
        views = {
            WorkerId(f"w{index}"): view(index, stages=(replace(held(), loaded=moment, open=True),))
            for index, moment in enumerate(moments)
        }
        (change,) = reconcile([record(two)], views, NOW_S, RULES)
        assert change.events[-1] is E.ALL_STAGES_READY
        return change.loaded

    assert loaded(early, late) == late
    assert loaded(late, early) == late
    assert loaded(early, None) == early
    assert loaded(None, None) is None


# Books


def test_use_is_read_from_reports_and_waiting() -> None:
    books = Books().put(
        record(instance(instance_id="i")),
        record(instance(instance_id="s", state=S.FETCHING)),
    )
    idle = replace(held(), idle_s=5.0)
    used = refreshed(books, [view(stages=(idle,))], [ModelName("m")], NOW_S)
    assert used.records[InstanceId("i")].instance.last_used_s == NOW_S - 5
    assert used.records[InstanceId("i")].seen_on == {WorkerId("w0")}
    assert used.records[InstanceId("s")].instance.last_used_s == NOW_S
    assert books.records[InstanceId("i")].instance.last_used_s == NOW_S - 100, (
        "books are never written to"
    )
    later = refreshed(used, [view(stages=(replace(held(), in_flight=2),))], [], NOW_S + 9)
    busy = later.records[InstanceId("i")].instance
    assert (busy.last_used_s, busy.idle_s(NOW_S + 9)) == (NOW_S, 0.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["m", "n"]),
        st.lists(st.integers(0, 3), max_size=3),
        st.booleans(),
    ),
    max_size=30,
)


@given(STEPS)
def test_indexes_are_those_of_the_records(steps: list[tuple[str, str, list[int], bool]]) -> None:
    books = Books()
    for name, of_model, workers, forget in steps:
        if forget:
            books = books.without((InstanceId(name),))
            continue
        one = instance(of_model, name)
        places = tuple(instance(worker_id=f"w{index}").placements[0] for index in workers)
        if name in books.records:
            one = replace(one, model=books.records[InstanceId(name)].instance.model)
        books = books.put(record(replace(one, placements=places)))
    models: dict[str, set[str]] = {}
    workers_of: dict[str, set[str]] = {}
    for key, kept in books.records.items():
        models.setdefault(kept.instance.model, set()).add(key)
        for placement in kept.instance.placements:
            workers_of.setdefault(placement.worker_id, set()).add(key)
    assert {key: set(ids) for key, ids in books.by_model.items()} == models
    assert {key: set(ids) for key, ids in books.by_worker.items()} == workers_of
