"""Miss penalties and loads that a build measured, until a start shows them: in predictions of
starts, and in what an eviction costs.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.facts import ClusterFacts, servers_for
from pilotlight.policy.coldstart.profiles import seeded, seeded_estimates
from pilotlight.policy.coldstart.search import choose_start
from pilotlight.policy.coldstart.servers import StartRequest, StartRules
from pilotlight.policy.coldstart.timings import Probe, StageSample, Timings
from pilotlight.policy.cost import estimate_for
from pilotlight.policy.coverage import LoadSeconds, load_seconds, seconds_of
from pilotlight.policy.estimates import (
    ColdStartSample,
    differ_much,
    estimate_among_others,
    learn,
    with_estimates,
)
from pilotlight.policy.eviction.candidates import CandidateFacts, MissFacts, on_device, registered
from pilotlight.policy.ids import Epoch, NodeId
from pilotlight.policy.load import start_s
from pilotlight.policy.materialized import PrefillTime, Profile
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.placement import Candidate
from pilotlight.policy.plan import Estimate, Estimates, Snapshot
from pilotlight.policy.testing import NOW_S, copy, held, model, node, worker

SIM, MODEL = DeviceKind.SIM, model("a")
NODE = node(copies=(replace(copy("a"), parts=tuple(range(6))),))
BYTES = MODEL.device_bytes(MODEL.spec.whole)
MEASURED = Profile(
    load_bytes_per_s=1e9, prefill=(), decode=(), load_s=0.5, init_s=6.0, restore_s=2.0
)
START = StageSample(model=MODEL.name, device_kind=SIM, node_id=NODE.node_id)
SECONDS = st.floats(1e-3, 1e3)


def predicted_ttft_s(timings: Timings, reported: float = 1000.0) -> float:
    """Of a start from the host pool, on a worker that is up."""
    facts = worker(0)
    facts = replace(facts, device=replace(facts.device, load_bytes_per_s=reported))
    candidate = Candidate(worker=facts, node=NODE, free_bytes=900, evictable_bytes=0)
    cluster = ClusterFacts(nodes={NODE.node_id: NODE}, timings=timings)
    request = StartRequest(model=MODEL)
    chosen = choose_start(request, servers_for(MODEL, [candidate], cluster), StartRules())
    assert chosen is not None
    return chosen.ttft_s


def penalty_s(estimates: Estimates) -> float:
    """Of the model on a device whose node has it in its host pool."""
    known = CandidateFacts(
        now_s=NOW_S, models=registered((MODEL,)), misses=MissFacts(estimates=estimates)
    )
    (found,) = on_device(worker(held_stages=(held("a", "i-a"),)), NODE, known)
    return found.penalty_s


def profiled(
    *profiles: tuple[Model, Profile], timings: Timings | None = None, known: Estimates | None = None
) -> tuple[Timings, Estimates]:
    """What the scheduler makes of profiles."""
    listed = [(of, SIM, profile) for of, profile in profiles]
    timings, _ = seeded(timings or Timings(), listed)
    known = known or {}
    return timings, with_estimates(known, seeded_estimates(known, timings, listed))


def test_a_predicted_start_and_an_evictions_penalty_are_those_of_the_profile() -> None:
    bare_s = predicted_ttft_s(Timings())
    assert penalty_s({}) == pytest.approx(BYTES / 1000.0)
    plain, estimates = profiled((MODEL, replace(MEASURED, restore_s=0.0)))
    assert predicted_ttft_s(plain) == pytest.approx(bare_s + 6.0, rel=0.02)
    assert penalty_s(estimates) == pytest.approx(6.0)
    restored, estimates = profiled((MODEL, MEASURED))
    assert predicted_ttft_s(restored) == pytest.approx(bare_s + 2.0, rel=0.05)
    assert penalty_s(estimates) == pytest.approx(2.0), "the restore goes first"
    _, estimates = profiled((MODEL, replace(MEASURED, load_s=9.0)))
    assert penalty_s(estimates) == pytest.approx(9.0), "as long as its own load took"


def test_what_a_start_shows_takes_the_place_of_the_profile() -> None:
    timings, estimates = profiled((MODEL, MEASURED))
    before_s = predicted_ttft_s(timings)
    timings = timings.learned([replace(START, restore_s=0.25)])
    assert timings.init_s(MODEL.name, SIM) == 0.25, "it is no mean of both"
    assert predicted_ttft_s(timings) == pytest.approx(before_s - 1.75)
    sample = ColdStartSample(
        model=MODEL.name, device_kind=SIM, ttft_s=3.0, load_bytes_per_s=BYTES / 0.75
    )
    (known,) = estimates[MODEL.name]
    started = replace(learn(known, sample), init_s=timings.init_s(MODEL.name, SIM))
    assert penalty_s(with_estimates(estimates, (started,))) == pytest.approx(0.75)
    again, after = profiled((MODEL, MEASURED), timings=timings, known={MODEL.name: (started,)})
    assert again == timings
    assert after[MODEL.name] == (started,), "its profile says nothing any more"


def test_a_start_that_was_not_restored_is_believed_until_there_is_another_build() -> None:
    timings, _ = profiled((MODEL, MEASURED))
    timings = timings.learned([replace(START, init_s=5.0)])
    assert (timings.restores(MODEL.name, SIM), timings.init_s(MODEL.name, SIM)) == (False, 5.0)
    same, _ = profiled((MODEL, MEASURED), timings=timings)
    assert same == timings
    anew, estimates = profiled((MODEL, replace(MEASURED, restore_s=1.5)), timings=timings)
    assert (anew.restores(MODEL.name, SIM), anew.init_s(MODEL.name, SIM)) == (True, 1.5)
    assert penalty_s(estimates) == pytest.approx(1.5)


def test_an_artifact_that_is_built_after_a_first_start_counts_at_once() -> None:
    timings = Timings().learned([replace(START, init_s=5.0)])
    sample = ColdStartSample(model=MODEL.name, device_kind=SIM, ttft_s=9.0)
    started = replace(learn(None, sample), init_s=5.0)
    timings, estimates = profiled(
        (MODEL, MEASURED), timings=timings, known={MODEL.name: (started,)}
    )
    assert timings.init_s(MODEL.name, SIM) == 2.0
    assert estimates[MODEL.name] == (replace(started, init_s=2.0),)


def test_an_old_profile_says_nothing_of_penalties() -> None:
    old = Profile(load_bytes_per_s=1e9, prefill=(PrefillTime(tokens=16, seconds=0.1),), decode=())
    timings, estimates = profiled((MODEL, old))
    assert timings.init_s(MODEL.name, SIM) == 0.0
    assert not timings.devices
    assert not estimates.get(MODEL.name)


def test_a_node_without_a_rate_of_its_own_loads_as_profiles_say() -> None:
    timings, _ = profiled((MODEL, replace(MEASURED, load_s=60.0)))
    here, other = NODE.node_id, NodeId("n9")
    assert timings.load_bytes_per_s(here, SIM, 0.0) == pytest.approx(BYTES / 60.0)
    assert timings.load_bytes_per_s(here, SIM, 7.0) == 7.0, "what the device says goes first"
    assert predicted_ttft_s(timings, 0.0) > 60.0
    probe = Probe(node_id=here, device_kind=SIM, load_bytes_per_s=50.0)
    assert timings.learned(probes=[probe]).load_bytes_per_s(here, SIM, 0.0) == 50.0
    shown = timings.learned([replace(START, load_bytes_per_s=30.0)])
    assert shown.load_bytes_per_s(here, SIM, 0.0) == 30.0
    assert shown.load_bytes_per_s(other, SIM, 0.0) == 30.0, "also where no start was"
    assert seeded(shown, [(MODEL, SIM, MEASURED)])[0].devices == shown.devices


def test_a_profile_alone_does_not_say_how_long_a_whole_start_takes() -> None:
    _, estimates = profiled((MODEL, MEASURED))
    snapshot = Snapshot(now_s=NOW_S, epoch=Epoch(1), estimates=estimates)
    assert start_s(MODEL, snapshot) == MODEL.slo.ttft_ms / 1000


def test_what_a_model_is_fetched_at_anywhere_is_told_by_a_kind_on_which_it_was_started() -> None:
    _, estimates = profiled((MODEL, MEASURED))
    sample = ColdStartSample(
        model=MODEL.name, device_kind=DeviceKind.CUDA, ttft_s=3.0, fetch_bytes_per_s=10.0
    )
    found = estimate_for(MODEL.name, None, with_estimates(estimates, (learn(None, sample),)))
    assert found is not None
    assert found.fetch_bytes_per_s == 10.0
    offline = estimate_for(MODEL.name, None, estimates)
    assert offline is not None
    assert offline.samples == 0


def test_what_starts_take_beside_the_bytes_counts_as_far_as_it_was_seen() -> None:
    """As paces of loading do: one start beside others says little of a model."""

    def of(name: str, init_s: float, samples: int = 1) -> Estimate:
        return Estimate(
            model=model(name).name,
            device_kind=SIM,
            fetch_bytes_per_s=0.0,
            load_bytes_per_s=100.0,
            prefill_s=0.1,
            cold_ttft_s=1.0,
            samples=samples,
            init_s=init_s,
        )

    known = with_estimates({}, (*(of(f"m{at}", 1.0) for at in range(6)), of("slow", 10.0)))
    slow = estimate_among_others(model("slow"), SIM, known)
    usual = estimate_among_others(model("new"), SIM, known)
    assert slow is not None
    assert usual is not None
    assert (slow.init_s, usual.init_s) == (pytest.approx(2.0), 1.0)
    alone = estimate_among_others(model("slow"), SIM, with_estimates(known, (of("slow", 0.0),)))
    assert alone is not None
    assert alone.init_s == 1.0, "one that says nothing takes as long as is usual"
    others = with_estimates({}, (of(f"m{at}", 4.0) for at in range(6)))
    assert differ_much(known, others), "copies are told anew what they cost"


@given(profiles=st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6))
def test_profiles_are_taken_over_once_and_no_rate_is_beyond_theirs(
    profiles: Sequence[tuple[float, float, float]],
) -> None:
    listed = [
        (
            model(f"m{at}"),
            SIM,
            replace(MEASURED, load_s=load_s, init_s=init_s, restore_s=restore_s),
        )
        for at, (load_s, init_s, restore_s) in enumerate(profiles)
    ]
    timings, taken = seeded(Timings(), listed)
    assert taken == len(listed)
    assert seeded(timings, listed) == (timings, 0)
    rates = [one.model_bytes_per_s(of.device_bytes(of.spec.whole)) for of, _, one in listed]
    rate = timings.load_bytes_per_s(NODE.node_id, SIM, 0.0)
    assert min(rates) * (1 - 1e-9) <= rate <= max(rates) * (1 + 1e-9)
    for of, _, one in listed:
        assert timings.init_s(of.name, SIM) == one.restore_s
    found = seeded_estimates({}, timings, listed)
    assert len(found) == len(listed)
    assert not seeded_estimates(with_estimates({}, found), timings, listed)


@given(
    first=st.tuples(SECONDS, SECONDS),
    starts=st.lists(st.tuples(st.booleans(), SECONDS), min_size=1, max_size=6),
)
def test_starts_are_learned_as_if_there_had_been_no_profile(
    first: tuple[float, float], starts: Sequence[tuple[bool, float]]
) -> None:
    """Once each of both was seen, whatever the profile said."""
    init_s, restore_s = first
    profile = replace(MEASURED, init_s=init_s, restore_s=restore_s)
    samples = [replace(START, init_s=1.0)] + [
        replace(START, restore_s=took_s) if restored else replace(START, init_s=took_s)
        for restored, took_s in starts
    ]
    plain = Timings().learned(samples).models[MODEL.name, SIM]
    seen, _ = seeded(Timings(), [(MODEL, SIM, profile)])
    after = seen.learned(samples).models[MODEL.name, SIM]
    assert (after.init, after.restore) == (plain.init, plain.restore)


def phase(name: PhaseName, start_s: float, end_s: float) -> Phase:
    return Phase(name=name, start_s=start_s, end_s=end_s, wall_offset_s=0.0, process="worker")


def test_phases_of_a_load_are_told_apart() -> None:
    init, load = phase(PhaseName.INIT, 0.0, 1.0), phase(PhaseName.LOAD, 0.5, 3.0)
    more = phase(PhaseName.LOAD, 4.0, 5.0)
    restore = phase(PhaseName.RESTORE, 0.0, 0.25)

    def told(*phases: Phase) -> LoadSeconds:
        return load_seconds(seconds_of(phases, 0.0))

    assert told(init, load, more) == LoadSeconds(load_s=3.5, init_s=1.0)
    assert told(restore, load) == LoadSeconds(load_s=2.5, restore_s=0.25)
    assert told(restore, init) == LoadSeconds(restore_s=1.25), "all that it took beside the bytes"
    assert told() == LoadSeconds()
