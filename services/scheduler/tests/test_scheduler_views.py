"""World, reconciliation, commands and records: pure functions of what was heard."""

import pytest

from pilotlight.common.messages.demand import DemandVector
from pilotlight.common.messages.phases import FirstToken, PhaseReport
from pilotlight.common.messages.reports import LoaderReport, WorkerReport
from pilotlight.common.pulse import ASK_S, SILENT_S
from pilotlight.common.roster_feed import CHECK_INTERVAL_S
from pilotlight.policy.cluster import DeviceKind, HeldStage, HeldState
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.ids import (
    DecisionId,
    Epoch,
    GatewayId,
    InstanceId,
    ModelName,
    NodeId,
    RequestId,
    WorkerId,
)
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.plan import InstanceState, NodeDrain
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import demand, held, model, node, worker
from pilotlight.scheduler.records import (
    ColdStart,
    merged,
    readied,
    reported,
    sample_of,
)
from pilotlight.scheduler.world import World

NOW_S = 1000.0
TOLD_S = 0.25
"""Between a gateway's demand vectors."""
S = InstanceState
H = HeldState
E = InstanceEvent


def report(
    index: int = 0,
    *,
    stages: tuple[HeldStage, ...] = (),
    incarnation: str = "a",
    epoch_seen: int = 0,
) -> WorkerReport:
    return WorkerReport(
        facts=worker(index, held_stages=stages),
        incarnation=incarnation,
        epoch_seen=Epoch(epoch_seen),
    )


def loader(*dead: str) -> LoaderReport:
    return LoaderReport(
        facts=node(),
        incarnation="l",
        epoch_seen=Epoch(0),
        dead_workers=tuple(WorkerId(worker_id) for worker_id in dead),
    )


def waiting(world: World, now_s: float) -> tuple[Demand, ...]:
    """As of now."""
    demands, aged_s = world.demand(now_s)
    return tuple(one.aged(aged_s) for one in demands)


def vector(gateway: str, *demands: tuple[str, int]) -> DemandVector:
    return DemandVector(
        gateway_id=GatewayId(gateway),
        demands=tuple(demand(name, waiting) for name, waiting in demands),
    )


# World


def told(world: World, report: WorkerReport | LoaderReport, now_s: float) -> bool:
    """Whether what the roster takes from a report may change a decision."""
    roster = world.roster
    return world.follow(
        roster.hear_worker(report, now_s)
        if isinstance(report, WorkerReport)
        else roster.hear_loader(report, now_s)
    )


def test_only_what_may_change_a_decision_wakes_and_counts() -> None:
    world = World(listening_since_s=0.0)
    assert told(world, report(), NOW_S)
    assert not told(world, report(), NOW_S)
    assert world.version == 1
    assert told(world, report(stages=(held(),)), NOW_S)
    assert told(world, report(stages=(held(),), incarnation="b"), NOW_S)
    assert world.follow(world.roster.check(NOW_S + 3.5)), "its death"
    assert told(world, report(stages=(held(),), incarnation="b"), NOW_S + 4)
    assert told(world, loader("w0"), NOW_S + 4.1)
    assert not told(world, report(incarnation="b"), NOW_S + 4.2), "its last words"
    assert world.version == 6


def test_demand_is_summed_over_gateways_and_dropped_with_a_silent_one() -> None:
    world = World(listening_since_s=0.0)
    assert world.hear_demand(vector("g1", ("m", 2)), NOW_S)
    assert world.hear_demand(vector("g2", ("m", 3), ("n", 1)), NOW_S + 0.5)
    assert {one.model: one.waiting for one in waiting(world, NOW_S + 0.6)} == {"m": 5, "n": 1}
    assert waiting(world, NOW_S + 0.6)[0].oldest_age_s == pytest.approx(0.7)
    assert world.waiting_since_s()[ModelName("m")] == NOW_S
    assert {one.model: one.waiting for one in waiting(world, NOW_S + 2.2)} == {"m": 3, "n": 1}
    assert world.hear_demand(vector("g2"), NOW_S + 2.3)
    assert waiting(world, NOW_S + 2.3) == ()
    assert ModelName("m") not in world.waiting_since_s()


def test_demand_is_kept_while_nothing_can_be_heard() -> None:
    world = World(listening_since_s=0.0)
    world.hear_demand(vector("g", ("m", 1)), NOW_S)
    world.roster.hear_connection(False, NOW_S + 0.2)
    assert waiting(world, NOW_S + 30)
    world.roster.hear_connection(True, NOW_S + 30)
    assert waiting(world, NOW_S + 30.5)
    assert waiting(world, NOW_S + 33) == ()


def test_demand_is_kept_until_a_silent_bus_is_noticed_and_until_it_is_told_anew() -> None:
    """A server that stands still is noticed late, and what was heard last may be older still."""
    notices_s = SILENT_S + ASK_S + CHECK_INTERVAL_S
    world = World(listening_since_s=0.0)
    world.hear_demand(vector("g", ("m", 1)), NOW_S - TOLD_S)
    assert waiting(world, NOW_S + notices_s)
    world.roster.hear_connection(False, NOW_S + notices_s)
    assert waiting(world, NOW_S + 5)
    world.roster.hear_connection(True, NOW_S + 5)
    assert waiting(world, NOW_S + 5 + TOLD_S)


def test_demand_that_was_heard_just_after_a_standstill_is_dropped_with_its_gateway_all_the_same() -> (
    None
):
    world = World(listening_since_s=0.0)
    world.hear_demand(vector("a", ("llama", 2)), NOW_S)
    world.roster.was_away(60.0, NOW_S)
    assert [one.waiting for one in waiting(world, NOW_S + 0.9)] == [2]
    assert waiting(world, NOW_S + 3) == ()


def test_a_drain_is_as_old_as_the_database_says_when_it_was_first_heard_of() -> None:
    world = World(listening_since_s=NOW_S)
    told(world, loader(), NOW_S)
    version = world.version
    assert world.hear_drains({NodeId("n0"): 5.0}, NOW_S)
    assert world.version > version
    assert not world.hear_drains({NodeId("n0"): 5.9}, NOW_S + 1.0)
    assert world.drains(NOW_S + 1.0) == (NodeDrain(node_id=NodeId("n0"), age_s=6.0),)
    assert world.nodes()[NodeId("n0")].draining
    assert world.hear_drains({NodeId("n0"): 0.5}, NOW_S + 2.0), (
        "taken back and asked for again between two lists"
    )
    assert world.drains(NOW_S + 3.0) == (NodeDrain(node_id=NodeId("n0"), age_s=1.5),)
    assert world.hear_drains({}, NOW_S + 3.0)
    assert not world.nodes()[NodeId("n0")].draining


def test_what_was_heard_of_is_passed_on_once_by_name() -> None:
    world = World(listening_since_s=0.0)
    told(world, report(), NOW_S)
    told(world, loader(), NOW_S)
    world.hear_models([model("m"), model("n")])
    assert world.take_changed() == Focus(
        models=frozenset({ModelName("m"), ModelName("n")}),
        workers=frozenset({WorkerId("w0")}),
        nodes=frozenset({NodeId("n0")}),
    )
    assert world.take_changed() == Focus()
    assert world.hear_models([model("m", pinned=True), model("n")])
    assert world.hear_drains({NodeId("n0"): 5.0}, NOW_S)
    assert world.take_changed() == Focus(
        models=frozenset({ModelName("m")}), nodes=frozenset({NodeId("n0")})
    )
    assert not world.hear_models([model("m", pinned=True), model("n")])
    assert not world.hear_drains({NodeId("n0"): 5.0}, NOW_S)
    assert world.take_changed() == Focus()
    assert world.hear_models([model("n")])
    assert world.hear_drains({}, NOW_S)
    assert world.follow(world.roster.check(NOW_S + 3.5))
    assert world.take_changed() == Focus(
        models=frozenset({ModelName("m")}),
        workers=frozenset({WorkerId("w0")}),
        nodes=frozenset({NodeId("n0")}),
    )


def test_the_highest_epoch_that_anybody_obeyed_is_known() -> None:
    world = World(listening_since_s=0.0)
    told(world, report(epoch_seen=7), NOW_S)
    told(world, loader(), NOW_S)
    assert world.epoch_seen() == 7


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
    one = reported(
        record(),
        PhaseReport(instance_id=InstanceId("i"), phases=(phase(PhaseName.FETCH, 100.1, 100.6),)),
    )
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
    assert (
        reported(one, PhaseReport(instance_id=InstanceId("i"), phases=(), first_token=end)) == one
    )
    assert sample_of(one, model(), DeviceKind.SIM) is None


def test_a_request_handed_over_while_it_loaded_ends_a_start_that_is_ready() -> None:
    one = readied(record(), 100.6)
    end = FirstToken(request_id=RequestId("r"), at_s=101.1, wall_offset_s=50.0, arrived_s=99.9)
    one = reported(one, PhaseReport(instance_id=InstanceId("i"), phases=(), first_token=end))
    assert (one.status, one.ttft_s, one.end_s) == ("done", pytest.approx(1.2), 101.1)
    other = FirstToken(request_id=RequestId("s"), at_s=102.0, wall_offset_s=50.0, arrived_s=100.0)
    assert (
        reported(one, PhaseReport(instance_id=InstanceId("i"), phases=(), first_token=other)) == one
    ), "the earliest ends it"
