"""What makes an eviction candidate, and what it costs to be without it."""

from dataclasses import replace

import pytest

from pilotlight.policy.arrivals import (
    NO_ARRIVALS,
    SLOT_S,
    ArrivalCount,
    ArrivalWindows,
    CounterLife,
    RecentArrivals,
)
from pilotlight.policy.cluster import Copy, DeviceKind, HeldState, NodeFacts, Tier, WorkerFacts
from pilotlight.policy.control.choosing import slice_for
from pilotlight.policy.estimates import (
    FEW_MODELS,
    differ_much,
    estimate_among_others,
    with_estimates,
)
from pilotlight.policy.eviction.base import EvictionRules, RoomRequest, plan_eviction
from pilotlight.policy.eviction.candidates import (
    MAX_PENALTY_S,
    CandidateFacts,
    MissFacts,
    in_pool,
    on_device,
    registered,
)
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.ids import Epoch, GatewayId, ModelName
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.plan import ANY_MODEL, Estimate, Snapshot
from pilotlight.policy.testing import NOW_S, copy, held, model, node, worker


def asked(**times: int) -> RecentArrivals:
    """Models that were asked for so often, listened to for a slot."""
    windows = ArrivalWindows(NOW_S - SLOT_S)
    counts = tuple(
        ArrivalCount(model=ModelName(name), total=total, idle_s=1.0)
        for name, total in times.items()
    )
    windows.hear(
        CounterLife(gateway_id=GatewayId("g"), number="1", age_s=2.0), counts, NOW_S, NOW_S
    )
    return windows.recent()


def estimate(
    name: str, kind: DeviceKind = DeviceKind.SIM, *, fetch: float = 0.0, load: float = 0.0
) -> Estimate:
    return Estimate(
        model=ModelName(name),
        device_kind=kind,
        fetch_bytes_per_s=fetch,
        load_bytes_per_s=load,
        prefill_s=0.1,
        cold_ttft_s=1.0,
        samples=1,
    )


def facts(
    *models: Model, arrivals: RecentArrivals = NO_ARRIVALS, estimates: tuple[Estimate, ...] = ()
) -> CandidateFacts:
    misses = MissFacts(estimates=with_estimates({}, estimates), arrivals=arrivals)
    return CandidateFacts(now_s=NOW_S, models=registered(models), misses=misses)


def on(*names: str) -> WorkerFacts:
    return worker(held_stages=tuple(replace(held(name, f"i-{name}"), idle_s=7.0) for name in names))


def whole_copy(name: str) -> Copy:
    return replace(copy(name), parts=tuple(range(6)))


def with_rate(where: NodeFacts, bytes_per_s: float) -> NodeFacts:
    return replace(where, nic_bytes_per_s=bytes_per_s)


def test_only_stages_that_take_room_are_candidates() -> None:
    states = {state.value: held("m", state.value, state=state) for state in HeldState}
    found = {
        one.subject: one
        for one in on_device(worker(held_stages=tuple(states.values())), node(), facts(model()))
    }
    assert found.keys() == {"loading", "ready", "draining"}
    assert {subject: one.busy for subject, one in found.items()} == {
        "loading": True,
        "ready": False,
        "draining": True,
    }


def test_a_candidate_has_what_its_holder_and_its_registration_say() -> None:
    known = replace(
        facts(model("a", pinned=True), model("b")),
        since_s={"i-a": 950.0, "d-b": 940.0},
        given_up=("i-c",),
    )
    first, second = on_device(on("a", "b", "c"), node(), known)
    assert (first.pinned, first.resident_since_s, first.last_used_s) == (True, 950.0, NOW_S - 7.0)
    assert (second.pinned, second.resident_since_s) == (False, NOW_S), (
        "no report has shown it ready"
    )
    leased = replace(copy("b"), leases=2, idle_s=3.0)
    elsewhere = replace(copy("a"), tier=Tier.DISK)
    (pooled,) = in_pool(node(copies=(leased, elsewhere)), known)
    assert (pooled.subject, pooled.model, pooled.leases, pooled.resident_since_s) == (
        "d-b",
        "b",
        2,
        940.0,
    )
    assert (pooled.tier, pooled.last_used_s, pooled.size_bytes) == (Tier.HOST, NOW_S - 3.0, 60)


def test_one_checkpoint_under_two_names_is_pinned_by_either_and_asked_for_by_both() -> None:
    twins = (model("a", digest="d-a", pinned=True), model("b", digest="d-a"))
    (pooled,) = in_pool(node(copies=(copy("a"),)), facts(*twins, arrivals=asked(a=20, b=10)))
    assert pooled.pinned
    assert pooled.arrivals_per_s == 30 / SLOT_S


def test_what_a_miss_costs_on_a_device_depends_on_where_it_would_come_from() -> None:
    # 60 bytes; the link gives 100 a second, the device takes 1,000.
    known = facts(model("a"), arrivals=asked(a=20))
    (far,) = on_device(on("a"), node(), known)
    (near,) = on_device(on("a"), node(copies=(whole_copy("a"),)), known)
    assert (far.penalty_s, near.penalty_s) == (pytest.approx(0.6), pytest.approx(0.06))
    assert far.arrivals_per_s == 20 / SLOT_S
    assert far.loss == pytest.approx(0.6 * 20 / SLOT_S)
    learned = (
        estimate("a", fetch=10.0, load=500.0),
        estimate("a", DeviceKind.CUDA, fetch=1.0),
        estimate("b", fetch=1.0),
    )
    known = facts(model("a"), estimates=learned)
    (far,) = on_device(on("a"), node(), known)
    (near,) = on_device(on("a"), node(copies=(whole_copy("a"),)), known)
    assert (far.penalty_s, near.penalty_s) == (pytest.approx(6.0), pytest.approx(0.12))
    assert far.loss == 0.0, "no request asks for it"


def test_what_a_miss_costs_in_a_host_pool_is_the_fetch() -> None:
    pooled = node(copies=(copy("a"),))
    (by_link,) = in_pool(pooled, facts(model("a")))
    (by_estimate,) = in_pool(pooled, facts(model("a"), estimates=(estimate("a", fetch=10.0),)))
    assert (by_link.penalty_s, by_estimate.penalty_s) == (pytest.approx(0.6), pytest.approx(6.0))
    (never,) = in_pool(with_rate(pooled, 0.0), facts(model("a"), arrivals=asked(a=1)))
    assert never.penalty_s == MAX_PENALTY_S


def test_nothing_is_missed_of_what_is_not_registered_any_more() -> None:
    other = facts(model("a", digest="newer"), arrivals=asked(a=20))
    (stale,) = on_device(on("a"), node(), other)
    (unknown,) = in_pool(node(copies=(copy("a"),)), other)
    assert (stale.penalty_s, stale.arrivals_per_s) == (0.0, 0.0)
    assert (unknown.model, unknown.penalty_s, unknown.arrivals_per_s) == ("", 0.0, 0.0)


def test_costs_are_made_only_where_they_are_asked_for() -> None:
    (candidate,) = on_device(
        on("a"), node(), replace(facts(model("a"), arrivals=asked(a=20)), misses=None)
    )
    assert (candidate.penalty_s, candidate.arrivals_per_s, candidate.loss) == (0.0, 0.0, 0.0)


def test_a_plan_says_what_its_victims_cost() -> None:
    known = facts(model("a"), model("b"), arrivals=asked(a=20, b=10))
    known = replace(known, since_s={"i-a": 0.0, "i-b": 0.0})
    found = on_device(on("a", "b"), node(), known)
    plan = plan_eviction(
        Lru(), RoomRequest(need_bytes=150, free_bytes=0, now_s=NOW_S), found, EvictionRules()
    )
    assert [victim.model for victim in plan.victims] == ["a", "b"]
    assert [victim.loss for victim in plan.victims] == [pytest.approx(1.2), pytest.approx(0.6)]
    assert plan.loss == pytest.approx(1.8)
    assert (plan.victims[0].penalty_s, plan.victims[0].arrivals_per_s) == (pytest.approx(0.6), 2.0)
    assert plan.victims[0].idle_s == pytest.approx(7.0)
    assert (
        plan.victims[0].reason
        == "lru: unused for 7.0 s, asked for 2 times a second, 0.6 s to bring back"
    )


def test_a_start_that_needs_an_eviction_says_what_would_go_and_at_what_loss() -> None:
    wanted, loaded = model("m"), model("a")
    least = worker(memory_bytes=350, held_stages=on("a").held)
    snapshot = Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=(wanted, loaded),
        nodes=(node(copies=(whole_copy("a"),)),),
        workers=(least,),
        estimates=with_estimates({}, (estimate("a", load=100.0),)),
        arrivals=asked(a=20),
    )
    choice = choose_scheme(wanted, snapshot, SchemeRules())
    assert choice.needs_eviction
    assert choice.eviction is not None
    assert [victim.subject for victim in choice.eviction.victims] == ["i-a"]
    assert choice.eviction.loss == pytest.approx(60 / 100 * 2.0)
    assert "at a loss of 1.2" in choice.reason
    in_free_room = SchemeRules(evicts=False)
    assert choose_scheme(wanted, snapshot, in_free_room).scheme is None, "nothing may go for it"
    roomy = replace(snapshot, workers=(worker(memory_bytes=900, held_stages=on("a").held),))
    assert choose_scheme(wanted, roomy, SchemeRules()).eviction is None
    assert choose_scheme(wanted, roomy, in_free_room) == choose_scheme(wanted, roomy, SchemeRules())


def test_a_decision_is_recorded_with_everything_that_its_loss_was_made_from() -> None:
    snapshot = Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=(model("m"), model("a"), model("elsewhere")),
        nodes=(node(copies=(whole_copy("a"), whole_copy("elsewhere"))),),
        workers=(worker(memory_bytes=350, held_stages=on("a").held),),
        estimates=with_estimates({}, (estimate("a", load=100.0), estimate("elsewhere"))),
        arrivals=asked(a=20, elsewhere=10),
    )
    seen = slice_for(snapshot.models[0], snapshot)
    assert choose_scheme(snapshot.models[0], seen, SchemeRules()) == choose_scheme(
        snapshot.models[0], snapshot, SchemeRules()
    )
    assert {one.name for one in seen.models} == {"m", "a"}
    assert [one.digest for one in seen.nodes[0].copies] == ["d-a"]
    assert seen.estimates.keys() == {"a", ANY_MODEL}
    assert seen.arrivals.models.keys() == {"a"}


def test_estimates_are_by_name_and_one_for_each_kind_of_device() -> None:
    known = with_estimates({}, (estimate("a"), estimate("a", DeviceKind.CUDA), estimate("b")))
    newer = with_estimates(known, (estimate("a", load=5.0),))
    assert {name: len(each) for name, each in newer.items()} == {"a": 2, "b": 1, ANY_MODEL: 2}
    assert sorted(one.load_bytes_per_s for one in newer[ModelName("a")]) == [0.0, 5.0]
    assert sorted(one.load_bytes_per_s for one in known[ModelName("a")]) == [0.0, 0.0], (
        "what was known is not written to"
    )


def test_a_model_that_was_never_loaded_costs_what_is_usual() -> None:
    """Not the device's promise: its copies would go before all others."""
    known = with_estimates({}, (estimate("a", load=10.0), estimate("b", load=40.0)))
    usual = estimate_among_others(model("new"), DeviceKind.SIM, known)
    assert usual is not None
    assert usual.load_bytes_per_s == 25.0
    assert estimate_among_others(model("new"), DeviceKind.CUDA, known) is None
    on_any = estimate_among_others(model("new"), None, known)
    assert on_any == usual


def test_one_slow_load_among_equal_models_counts_little() -> None:
    alike = [estimate(f"m{number}", load=100.0) for number in range(6)]
    known = with_estimates({}, (*alike, estimate("slow", load=10.0)))
    costs = {
        name: 1.0 / found.load_bytes_per_s
        for name in ("m0", "slow")
        if (found := estimate_among_others(model(name), DeviceKind.SIM, known)) is not None
    }
    assert costs["m0"] == pytest.approx(1 / 100)
    assert 1.5 < costs["slow"] / costs["m0"] < 2.5, "one load, beside nine that it seems to be"
    often = with_estimates(known, (replace(estimate("slow", load=10.0), samples=40),))
    proved = estimate_among_others(model("slow"), DeviceKind.SIM, often)
    assert proved is not None
    assert 4.0 < 100.0 / proved.load_bytes_per_s < 10.0


def test_the_usual_model_is_found_anew_seldom_where_there_are_many() -> None:
    known = with_estimates({}, (estimate(f"m{at}", load=10.0) for at in range(FEW_MODELS + 8)))
    assert not differ_much(known, with_estimates(known, (estimate("m0", load=99.0),)))
    assert differ_much({}, known)
    more = with_estimates(known, (estimate(f"n{at}", load=90.0) for at in range(FEW_MODELS * 2)))
    assert more[ANY_MODEL][0].load_bytes_per_s == 90.0
    assert differ_much(known, more)
    same = with_estimates(known, (estimate("another", load=90.0),))
    assert same[ANY_MODEL] == known[ANY_MODEL]
