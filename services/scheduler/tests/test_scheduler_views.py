"""World, reconciliation, commands and records: pure functions of what was heard."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.messages.demand import DemandVector
from pilotlight.common.messages.phases import FirstToken, PhaseReport
from pilotlight.common.messages.reports import LoaderReport, WorkerReport
from pilotlight.policy.instance import ENDED, InstanceEvent, step
from pilotlight.policy.testing import demand, held, instance, model, node, worker
from pilotlight.policy.types import (
    DecisionId,
    DeviceKind,
    Epoch,
    GatewayId,
    Generation,
    HeldStage,
    HeldState,
    Instance,
    InstanceId,
    InstanceState,
    Liveness,
    ModelName,
    Moment,
    NodeDrain,
    NodeId,
    Phase,
    PhaseName,
    RequestId,
    WorkerId,
)
from pilotlight.scheduler.applier import moved
from pilotlight.scheduler.book import Book, Entry
from pilotlight.scheduler.commands import disagreement, node_hold, worker_hold
from pilotlight.scheduler.reconcile import ReconcileRules, Tracked, reconcile
from pilotlight.scheduler.records import ColdStart, merged, readied, reported, sample_of
from pilotlight.scheduler.world import WorkerView, World

NOW_S = 1000.0
S = InstanceState
H = HeldState
E = InstanceEvent
RULES = ReconcileRules(term_started_s=NOW_S - 500, hold_deadline_s=10.0)


def report(index: int = 0, *, stages: tuple[HeldStage, ...] = (), incarnation: str = "a", epoch_seen: int = 0) -> WorkerReport:
    return WorkerReport(facts=worker(index, held_stages=stages), incarnation=incarnation, epoch_seen=Epoch(epoch_seen))


def loader(*dead: str) -> LoaderReport:
    return LoaderReport(
        facts=node(), incarnation="l", epoch_seen=Epoch(0), dead_workers=tuple(WorkerId(worker_id) for worker_id in dead)
    )


def vector(gateway: str, *demands: tuple[str, int]) -> DemandVector:
    return DemandVector(gateway_id=GatewayId(gateway), demands=tuple(demand(name, waiting) for name, waiting in demands))


def view(
    index: int = 0, *, stages: tuple[HeldStage, ...] = (), liveness: Liveness = Liveness.ALIVE, heard_s: float = NOW_S
) -> WorkerView:
    facts = worker(index, held_stages=stages, liveness=liveness)
    return WorkerView(facts=facts, heard_s=heard_s, incarnation="a", epoch_seen=Epoch(1))


def judged(one: Instance, *views: WorkerView, seen: bool = False, now_s: float = NOW_S) -> tuple[InstanceEvent, ...]:
    tracked = Tracked(instance=one, seen_on=frozenset({one.lead}) if seen else frozenset())
    changes = reconcile([tracked], {each.facts.worker_id: each for each in views}, now_s, RULES)
    return changes[0].events if changes else ()


# World


def test_a_silent_worker_becomes_suspect_then_dead_and_lives_again_when_heard() -> None:
    world = World(listening_since_s=0.0)
    assert world.hear_worker(report(), NOW_S)
    assert not world.hear_worker(report(), NOW_S)

    def liveness(at_s: float) -> Liveness:
        return world.workers(at_s)[WorkerId("w0")].facts.liveness

    assert [liveness(NOW_S + age_s) for age_s in (0.5, 1.5, 3.5)] == [Liveness.ALIVE, Liveness.SUSPECT, Liveness.DEAD]
    assert world.hear_worker(report(), NOW_S + 4)
    assert liveness(NOW_S + 4) is Liveness.ALIVE


def test_a_loader_declares_a_worker_dead_at_once_and_only_that_run_of_it() -> None:
    world = World(listening_since_s=0.0)
    world.hear_worker(report(), NOW_S)
    assert world.hear_loader(loader("w0"), NOW_S + 0.1)
    assert world.workers(NOW_S + 0.1)[WorkerId("w0")].facts.liveness is Liveness.DEAD
    assert not world.hear_worker(report(), NOW_S + 0.2), "its last words"
    assert world.hear_worker(report(incarnation="b"), NOW_S + 0.3)
    assert not world.hear_loader(loader("w0"), NOW_S + 0.4), "the list still names the run before"
    assert world.workers(NOW_S + 0.4)[WorkerId("w0")].facts.liveness is Liveness.ALIVE


def test_demand_is_summed_over_gateways_and_dropped_with_a_silent_one() -> None:
    world = World(listening_since_s=0.0)
    assert world.hear_demand(vector("g1", ("m", 2)), NOW_S)
    assert world.hear_demand(vector("g2", ("m", 3), ("n", 1)), NOW_S + 0.5)
    assert {one.model: one.waiting for one in world.demand(NOW_S + 0.6)} == {"m": 5, "n": 1}
    assert world.demand(NOW_S + 0.6)[0].oldest_age_s == pytest.approx(0.7)
    assert world.waiting_since_s(ModelName("m")) == NOW_S
    assert {one.model: one.waiting for one in world.demand(NOW_S + 1.2)} == {"m": 3, "n": 1}
    assert world.hear_demand(vector("g2"), NOW_S + 1.3)
    assert world.demand(NOW_S + 1.3) == ()
    assert world.waiting_since_s(ModelName("m")) is None


def test_ages_stand_still_while_nothing_can_be_heard() -> None:
    world = World(listening_since_s=0.0)
    world.hear_worker(report(), NOW_S)
    world.hear_loader(loader(), NOW_S)
    world.hear_demand(vector("g", ("m", 1)), NOW_S)
    world.hear_connection(False, NOW_S + 0.2)
    world.hear_connection(False, NOW_S + 5)
    assert world.workers(NOW_S + 30)[WorkerId("w0")].facts.liveness is Liveness.ALIVE
    assert world.demand(NOW_S + 30)
    world.hear_connection(True, NOW_S + 30)
    assert world.workers(NOW_S + 30.5)[WorkerId("w0")].facts.liveness is Liveness.ALIVE
    assert world.demand(NOW_S + 30.5)
    assert world.workers(NOW_S + 33)[WorkerId("w0")].facts.liveness is Liveness.DEAD
    assert world.nodes(NOW_S + 33)[node().node_id].liveness is Liveness.DEAD
    assert world.demand(NOW_S + 33) == ()
    assert world.workers(NOW_S + 33)[WorkerId("w0")].heard_s == NOW_S, "when it was heard is not made up"


def test_a_drain_is_as_old_as_the_database_says_when_it_was_first_heard_of() -> None:
    world = World(listening_since_s=NOW_S)
    world.hear_loader(loader(), NOW_S)
    version = world.version
    assert world.hear_drains({NodeId("n0"): 5.0}, NOW_S)
    assert world.version > version
    assert not world.hear_drains({NodeId("n0"): 5.9}, NOW_S + 1.0)
    assert world.drains(NOW_S + 1.0) == (NodeDrain(node_id=NodeId("n0"), age_s=6.0),)
    assert world.nodes(NOW_S + 1.0)[NodeId("n0")].draining
    assert world.hear_drains({NodeId("n0"): 0.5}, NOW_S + 2.0), "taken back and asked for again between two lists"
    assert world.drains(NOW_S + 3.0) == (NodeDrain(node_id=NodeId("n0"), age_s=1.5),)
    assert world.hear_drains({}, NOW_S + 3.0)
    assert not world.nodes(NOW_S + 3.0)[NodeId("n0")].draining


def test_the_highest_epoch_that_anybody_obeyed_is_known() -> None:
    world = World(listening_since_s=0.0)
    world.hear_worker(report(epoch_seen=7), NOW_S)
    world.hear_loader(loader(), NOW_S)
    assert world.epoch_seen() == 7


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
    assert judged(instance(), now_s=NOW_S) == (E.FAIL,), "a worker that nobody has heard for the dead time"


def test_an_evicted_stage_is_released_with_its_drain() -> None:
    assert judged(instance(), view(stages=(held(state=H.EVICTED),))) == (E.DRAIN, E.RELEASED)
    assert judged(instance(), view(stages=(held(state=H.DRAINING),))) == (E.DRAIN,)


def test_a_draining_instance_is_gone_when_nobody_holds_it() -> None:
    draining = instance(state=S.DRAINING, since_s=NOW_S - 1)
    assert judged(draining, view(stages=(held(state=H.DRAINING),))) == ()
    assert judged(draining, view()) == (E.RELEASED,)
    assert judged(draining, view(stages=(held(state=H.DRAINING),), liveness=Liveness.DEAD)) == (E.RELEASED,)


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


# Commands


def entry(one: Instance, trace_parent: str = "") -> Entry:
    return Entry(instance=one, model=model(), trace_parent=trace_parent)


def test_commands_are_the_whole_desired_state() -> None:
    entries = (
        entry(instance(instance_id="a", state=S.FETCHING), "00-aa-bb-01"),
        entry(instance(instance_id="b", state=S.DRAINING)),
        entry(instance(instance_id="c", worker_id="w1")),
    )
    command = worker_hold(WorkerId("w0"), entries, Epoch(3))
    assert [(hold.instance_id, hold.draining, hold.trace_parent) for hold in command.holds] == [
        ("a", False, "00-aa-bb-01"),
        ("b", True, ""),
    ]
    fetch = node_hold(entries[0].instance.placements[0].node_id, entries, {}, Epoch(3))
    assert [one.instance_id for one in fetch.fetches] == ["a"], "what is loaded, or leaves, is fetched no more"
    assert fetch.fetches[0].parts == (0, 1, 2, 3, 4, 5)


def test_a_report_that_disagrees_is_told_again() -> None:
    one = instance()
    command = worker_hold(WorkerId("w0"), [entry(one)], Epoch(1))
    newer = worker_hold(WorkerId("w0"), [entry(replace(one, generation=Generation(2)))], Epoch(1))
    drain = worker_hold(WorkerId("w0"), [entry(replace(one, state=S.DRAINING, generation=Generation(2)))], Epoch(1))
    nothing = worker_hold(WorkerId("w0"), [], Epoch(1))
    has = view(stages=(held(),))
    assert disagreement(command, has) is None
    assert disagreement(command, view())
    assert disagreement(newer, has)
    assert disagreement(drain, has)
    assert disagreement(drain, view(stages=(held(state=H.DRAINING),))) is None
    assert disagreement(drain, view()) is None
    assert disagreement(nothing, has)
    assert disagreement(nothing, view(stages=(held(state=H.DRAINING),))) is None


def test_a_drain_is_a_new_generation_and_readiness_is_remembered() -> None:
    loading = instance(state=S.LOADING)
    changes = reconcile([Tracked(instance=loading)], {WorkerId("w0"): view(stages=(held(),))}, NOW_S, RULES)
    ready = moved(loading, changes[0], Epoch(4), NOW_S)
    assert (ready.state, ready.generation, ready.epoch, ready.served, ready.last_used_s) == (S.READY, 1, 4, True, NOW_S)
    changes = reconcile([Tracked(instance=ready)], {WorkerId("w0"): view(stages=(held(state=H.DRAINING),))}, NOW_S, RULES)
    assert moved(ready, changes[0], Epoch(4), NOW_S).generation == 2


def test_an_instance_is_activated_from_when_its_last_stage_was_loaded() -> None:
    stages = instance(state=S.LOADING)
    two = replace(stages, placements=(stages.placements[0], instance(worker_id="w1").placements[0]))
    early, late = Moment(at_s=990.0, wall_offset_s=5.0), Moment(at_s=12.0, wall_offset_s=984.0)

    def loaded(*moments: Moment | None) -> Moment | None:
        views = {
            WorkerId(f"w{index}"): view(index, stages=(replace(held(), loaded=moment),)) for index, moment in enumerate(moments)
        }
        (change,) = reconcile([Tracked(instance=two)], views, NOW_S, RULES)
        assert change.events[-1] is E.ALL_STAGES_READY
        return change.loaded

    assert loaded(early, late) == late
    assert loaded(late, early) == late
    assert loaded(early, None) == early
    assert loaded(None, None) is None


def test_use_is_read_from_reports_and_waiting() -> None:
    book = Book()
    book.add(entry(instance(instance_id="i")))
    book.add(entry(instance(instance_id="s", state=S.FETCHING)))
    book.add(entry(instance(instance_id="old", state=S.GONE, since_s=NOW_S - 61)))
    idle = replace(held(), idle_s=5.0)
    book.refresh([view(stages=(idle,))], [ModelName("m")], NOW_S)
    assert book.entries[InstanceId("i")].instance.last_used_s == NOW_S - 5
    assert book.entries[InstanceId("s")].instance.last_used_s == NOW_S
    assert InstanceId("old") not in book.entries
    book.refresh([view(stages=(replace(held(), in_flight=2),))], [], NOW_S + 9)
    assert book.entries[InstanceId("i")].instance.last_used_s == NOW_S + 9


# Records of cold starts


def phase(name: PhaseName, start_s: float, end_s: float) -> Phase:
    return Phase(name=name, start_s=start_s, end_s=end_s, wall_offset_s=50.0, process="p")


def record() -> ColdStart:
    return ColdStart(
        instance_id=InstanceId("i"),
        model=ModelName("m"),
        decision_id=DecisionId("d"),
        trace_id="t",
        demand_seen_s=100.0,
        wall_offset_s=50.0,
        dispatched_s=100.1,
    )


def test_a_cold_start_ends_with_its_first_token_and_takes_late_phases() -> None:
    one = reported(record(), PhaseReport(instance_id=InstanceId("i"), phases=(phase(PhaseName.FETCH, 100.1, 100.6),)))
    assert not one.closed
    end = FirstToken(request_id=RequestId("r"), at_s=101.1, wall_offset_s=50.0, arrived_s=99.9)
    one = reported(one, PhaseReport(instance_id=InstanceId("i"), phases=(), first_token=end))
    assert (one.status, one.ttft_s, one.queue_s) == ("done", pytest.approx(1.2), pytest.approx(0.1))
    assert one.coverage == pytest.approx(0.5)
    late = (phase(PhaseName.LOAD, 100.6, 101.0), phase(PhaseName.PREFILL, 101.0, 101.1))
    one = merged(one, late)
    assert one.coverage == pytest.approx(1.0)
    assert merged(one, late) == one, "a repeated report changes nothing"
    sample = sample_of(one, model(), DeviceKind.SIM)
    assert sample is not None
    assert sample.fetch_bytes_per_s == pytest.approx(120.0)
    assert sample.prefill_s == pytest.approx(0.1)


def test_a_start_that_nobody_waited_for_ends_when_it_is_ready() -> None:
    one = readied(record(), 100.6)
    assert (one.status, one.ttft_s, one.end_s) == ("done", None, 100.6)
    end = FirstToken(request_id=RequestId("r"), at_s=999.0, wall_offset_s=50.0, arrived_s=998.0)
    assert reported(one, PhaseReport(instance_id=InstanceId("i"), phases=(), first_token=end)) == one
    assert sample_of(one, model(), DeviceKind.SIM) is None
