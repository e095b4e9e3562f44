from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import (
    Copy,
    DeviceHealth,
    HealthState,
    HeldState,
    Liveness,
    Tier,
    WorkerFacts,
)
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Epoch, WorkerId
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.placement import (
    PlacementRules,
    ServiceRules,
    candidates,
    committed_bytes,
    owed_service,
)
from pilotlight.policy.plan import InstanceState, Snapshot
from pilotlight.policy.testing import NOW_S, held, instance, model, node, worker

RULES = SchemeRules()


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    models = [
        model("m", part_bytes=draw(st.integers(1, 60))),
        model("other", pinned=draw(st.booleans())),
        model("third"),
    ]
    workers: list[WorkerFacts] = []
    instances = []
    for index in range(draw(st.integers(0, 4))):
        stages = []
        for number in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(["m", "other", "third"]))
            state = draw(st.sampled_from(list(HeldState)))
            stage = held(
                name,
                f"h{index}-{number}",
                device_bytes=draw(st.integers(1, 300)),
                state=state,
                in_flight=draw(st.sampled_from([0, 0, 1])),
            )
            stages.append(stage)
            if draw(st.booleans()):
                row = draw(
                    st.sampled_from(
                        [InstanceState.LOADING, InstanceState.READY, InstanceState.DRAINING]
                    )
                )
                instances.append(
                    instance(
                        name,
                        stage.instance_id,
                        worker_id=f"w{index}",
                        state=row,
                        device_bytes=stage.device_bytes,
                    )
                )
        if draw(st.booleans()):
            instances.append(
                instance(
                    "third",
                    f"p{index}",
                    worker_id=f"w{index}",
                    state=InstanceState.FETCHING,
                    device_bytes=draw(st.integers(1, 300)),
                )
            )
        liveness = draw(
            st.sampled_from([Liveness.ALIVE, Liveness.ALIVE, Liveness.SUSPECT, Liveness.DEAD])
        )
        workers.append(
            worker(
                index,
                memory_bytes=draw(st.integers(10, 900)),
                held_stages=tuple(stages),
                liveness=liveness,
                engine_up=draw(st.sampled_from([True, True, False])),
            )
        )
    nodes = (
        (node(draining=draw(st.sampled_from([False, False, False, True]))),)
        if draw(st.sampled_from([True, True, True, False]))
        else ()
    )
    return Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=tuple(models),
        nodes=nodes,
        workers=tuple(workers),
        instances=tuple(instances),
    )


@given(snapshots())
def test_a_scheme_never_overcommits_a_worker(snapshot: Snapshot) -> None:
    wanted = snapshot.models[0]
    choice = choose_scheme(wanted, snapshot, RULES)
    assert choice.reason
    assert (choice.scheme is None) == (not choice.considered)
    if choice.scheme is None:
        return
    (placement,) = choice.scheme.placements
    chosen = next(one for one in snapshot.workers if one.worker_id == placement.worker_id)
    free = chosen.device.memory_bytes - committed_bytes(chosen, snapshot)
    assert chosen.liveness is Liveness.ALIVE
    assert chosen.engine_up
    assert snapshot.nodes
    assert not snapshot.nodes[0].draining
    assert placement.stage == wanted.spec.whole
    assert placement.device_bytes >= stage_room(wanted, placement.stage).least_bytes
    if choice.needs_eviction:
        stay = sum(
            one.device_bytes
            for one in chosen.held
            if one.in_flight and one.state is not HeldState.EVICTED
        )
        assert placement.device_bytes + stay <= chosen.device.memory_bytes
    else:
        assert placement.device_bytes <= free


@given(snapshots())
def test_every_worker_is_in_exactly_one_bucket(snapshot: Snapshot) -> None:
    wanted = snapshot.models[0]
    found = candidates(wanted, wanted.spec.whole, snapshot, PlacementRules())
    names = [one.worker.worker_id for one in (*found.fitting, *found.makeable)] + [
        one.worker_id for one in found.rejected
    ]
    assert sorted(names) == sorted(one.worker_id for one in snapshot.workers)
    assert all(one.reason for one in found.rejected)


def test_a_node_that_has_the_bytes_is_preferred() -> None:
    wanted = model(part_bytes=100)
    near = replace(
        node(),
        node_id="n1",
        copies=(
            Copy(
                digest=wanted.digest,
                node_id="n1",
                tier=Tier.HOST,
                parts=tuple(range(6)),
                size_bytes=600,
            ),
        ),
    )
    workers = (
        worker(0, memory_bytes=10_000),
        replace(worker(1, memory_bytes=10_000), node_id="n1"),
    )
    snapshot = Snapshot(
        now_s=NOW_S, epoch=Epoch(1), models=(wanted,), nodes=(node(), near), workers=workers
    )
    choice = choose_scheme(wanted, snapshot, RULES)
    assert choice.scheme is not None
    assert choice.scheme.placements[0].worker_id == "w1"


def test_a_worker_that_refused_or_failed_is_avoided() -> None:
    wanted = model()
    workers = (worker(0), worker(1))
    snapshot = Snapshot(
        now_s=NOW_S, epoch=Epoch(1), models=(wanted,), nodes=(node(),), workers=workers
    )
    other = choose_scheme(wanted, snapshot, RULES, frozenset({WorkerId("w0")}))
    assert other.scheme is not None
    assert other.scheme.placements[0].worker_id == "w1"
    failed = instance(state=InstanceState.FAILED, since_s=NOW_S - 1)
    choice = choose_scheme(wanted, replace(snapshot, instances=(failed,)), RULES)
    assert choice.scheme is not None
    assert choice.scheme.placements[0].worker_id == "w1"
    alone = choose_scheme(
        wanted, replace(snapshot, instances=(failed,), workers=workers[:1]), RULES
    )
    assert alone.scheme is not None, "better there than nowhere"


def test_kv_takes_what_is_free_and_evicts_nobody_for_more_than_the_least() -> None:
    wanted = model()
    room = stage_room(wanted, wanted.spec.whole)
    assert room.granted_bytes(10**9) == room.usual_bytes
    assert room.granted_bytes(0) == room.least_bytes
    assert room.granted_bytes(room.least_bytes + 10) == room.least_bytes + 5


def test_a_model_larger_than_every_device_is_said_to_be_so() -> None:
    snapshot = Snapshot(
        now_s=NOW_S, epoch=Epoch(1), nodes=(node(),), workers=(worker(memory_bytes=10),)
    )
    choice = choose_scheme(model(), snapshot, RULES)
    assert choice.scheme is None
    assert choice.no_worker_ever
    assert choice.never_fits
    assert "more than any worker has" in choice.reason


def test_a_worker_that_does_not_serve_says_nothing_of_what_fits() -> None:
    """A device that has failed since its worker's start has reported no memory."""
    failed = worker(
        memory_bytes=0,
        engine_up=False,
        health=DeviceHealth(state=HealthState.FAILED, reason="lost: gone"),
    )
    starting, down = (
        worker(1, memory_bytes=0, engine_up=False),
        worker(2, memory_bytes=10_000, engine_up=False),
    )
    small = worker(3, memory_bytes=10)

    def reason(*workers: WorkerFacts) -> tuple[bool, str]:
        snapshot = Snapshot(now_s=NOW_S, epoch=Epoch(1), nodes=(node(),), workers=workers)
        choice = choose_scheme(model(), snapshot, RULES)
        assert choice.scheme is None
        return choice.no_worker_ever, choice.reason

    none_serves = "none of {} workers serves: their devices have failed, or their engines are down"
    assert reason(failed) == (True, none_serves.format(1))
    assert reason(failed, starting) == (True, none_serves.format(2))
    assert reason(failed, down) == (False, "none of 2 workers has room or can make it"), (
        "its engine comes back"
    )
    assert reason(failed, small)[1].endswith("more than any worker has that serves")
    # What it had is of no use now.
    lost = replace(failed, device=down.device)
    assert reason(lost) == (True, none_serves.format(1))


def test_only_what_all_workers_are_too_small_for_never_fits() -> None:
    """One that has said nothing yet, has failed or is full may hold it later."""
    small, silent = worker(memory_bytes=10), worker(1, memory_bytes=0, engine_up=False)
    failed = worker(1, memory_bytes=10, health=DeviceHealth(state=HealthState.FAILED))
    full = worker(
        1, memory_bytes=10_000, held_stages=(held("b", device_bytes=10_000, in_flight=1),)
    )

    def never(*workers: WorkerFacts) -> bool:
        snapshot = Snapshot(now_s=NOW_S, epoch=Epoch(1), nodes=(node(),), workers=workers)
        return choose_scheme(model(), snapshot, RULES).never_fits

    assert never(small)
    assert never(small, worker(1, memory_bytes=10))
    assert not never()
    assert not never(small, silent)
    assert not never(small, failed)
    assert not never(small, full)


def test_a_stage_that_waits_for_the_others_of_its_group_is_not_evicted() -> None:
    """It is ready, and has no requests; what its group fetched would be lost."""
    other = held("other", "g", device_bytes=900)
    there = worker(memory_bytes=1000, held_stages=(other,))
    for state in (InstanceState.LOADING, InstanceState.READY):
        snapshot = Snapshot(
            now_s=NOW_S,
            epoch=Epoch(1),
            models=(model(), model("other")),
            nodes=(node(),),
            workers=(there,),
            instances=(instance("other", "g", state=state, device_bytes=900),),
        )
        wanted = model(part_bytes=100)
        found = candidates(wanted, wanted.spec.whole, snapshot, PlacementRules())
        assert bool(found.makeable) == (state is InstanceState.READY)


def test_what_is_owed_service_is_named_to_the_cache() -> None:
    """In use, younger than twice what its load took; or still on its way."""
    young = replace(instance("young", "young", since_s=NOW_S - 5, used_s=NOW_S - 0.1), load_s=10.0)
    served = replace(young, instance_id=young.instance_id + "-served", load_s=1.0)
    idle = replace(young, instance_id=young.instance_id + "-idle", last_used_s=NOW_S - 1)
    starts = instance("starts", "starts", state=InstanceState.LOADING)
    owed = owed_service((young, served, idle, starts), ServiceRules(), NOW_S)
    assert owed == ("young", "starts")


@pytest.mark.parametrize("passing", ["nothing", "requests", "loading", "owed"])
def test_a_worker_that_pins_fill_is_rejected_with_what_to_unpin(passing: str) -> None:
    """Requests and loads end by themselves, and service is owed for a while; pins stay."""
    stages = (
        held(
            "a",
            "i-a",
            device_bytes=600,
            in_flight=int(passing == "requests"),
            state=HeldState.LOADING if passing == "loading" else HeldState.READY,
        ),
        held("b", "i-b", device_bytes=400),
    )
    young = instance("a", "i-a", since_s=NOW_S - 5, used_s=NOW_S - 0.1)
    owed = (replace(young, load_s=10.0),) if passing == "owed" else ()
    models = (model("a", pinned=True), model("b", pinned=True), model("m"))
    snapshot = Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=models,
        nodes=(node(),),
        workers=(worker(held_stages=stages),),
        instances=owed,
    )
    found = candidates(models[-1], models[-1].spec.whole, snapshot, PlacementRules())
    (rejected,) = found.rejected
    assert "could be freed; unpin a to make room" in rejected.reason
