"""What a leader makes of demand, reports and deleted models: instances, commands, records."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, update

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.service import Application
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import RequestId
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import model as a_model
from pilotlight.scheduler.repository import SchedulerRepository
from pilotlight.scheduler.testing import DEADLINE_S, TRACE, TURN_S, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState
H = HeldState


async def test_demand_becomes_an_instance_a_command_readiness_and_a_record(rig: Rig) -> None:
    ready = await rig.ready()
    instance_id = ready.instance_id

    assert [one.model for one in rig.reserved] == ["m"]
    assert sum(rig.reserved[0].host_part_bytes) == 60
    assert ready.placements[0].grant_id == "grant-1"
    assert rig.worker_hold is not None
    (hold,) = rig.worker_hold.holds
    assert hold.device_bytes == ready.placements[0].device_bytes == rig.reserved[0].device_bytes
    assert hold.trace_parent.split("-")[1] == TRACE.split("-")[1]
    assert rig.worker_hold.epoch == ready.epoch >= 1
    await rig.until(lambda: rig.node_hold is not None and not rig.node_hold.fetches)

    (row,) = await rig.rows(select(tables.instances))
    assert (row.instance_id, row.state, row.epoch) == (instance_id, "ready", ready.epoch)
    (decision,) = await rig.rows(select(tables.decisions))
    assert decision.instance_id == instance_id
    assert decision.inputs["models"][0]["name"] == "m"
    assert decision.outcome["scheme"]["placements"][0]["worker_id"] == "w0"
    assert [one["worker_ids"] for one in decision.outcome["considered"]] == [["w0"]]
    assert decision.outcome["evicted_instances"] == ["evicted"]
    assert decision.reasons

    now_s, offset_s = (
        rig.clock.monotonic_s(),
        rig.clock.wall().timestamp() - rig.clock.monotonic_s(),
    )
    phase = Phase(
        name=PhaseName.PREFILL,
        start_s=now_s,
        end_s=now_s + 1,
        wall_offset_s=offset_s,
        process="worker",
    )
    first = FirstToken(
        request_id=RequestId("r"), at_s=now_s + 1, wall_offset_s=offset_s, arrived_s=now_s - 0.25
    )
    report = PhaseReport(instance_id=instance_id, phases=(phase,), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=DEADLINE_S)
    (cold,) = await rig.rows(select(tables.cold_starts))
    assert (cold.status, cold.trace_id, cold.ttft_s) == (
        "done",
        TRACE.split("-")[1],
        pytest.approx(1.25),
    )
    assert cold.coverage > 0.95
    assert {one["name"] for one in cold.phases} == {"schedule", "dispatch", "activate", "prefill"}

    def told() -> bool:
        return {one.kind for one in rig.events} >= {
            "instance_planned",
            "instance_ready",
            "cold_start_finished",
        }

    await rig.until(told)
    seen = [state for key, state in rig.states if key == instance_id]
    assert seen == [S.FETCHING, S.LOADING, S.READY]


async def test_a_restarted_worker_fails_its_instance_and_demand_starts_another(rig: Rig) -> None:
    ready = await rig.ready()
    rig.held.clear()
    rig.incarnation = "b"
    await rig.demand()
    await rig.report()
    failed = await rig.shown_as(S.FAILED)
    assert failed.instance_id == ready.instance_id
    assert failed.reason.startswith("worker_lost")
    another = await rig.shown_as(S.FETCHING)
    assert another.instance_id != ready.instance_id
    await rig.until(lambda: rig.released == ["grant-1"])
    await rig.ordered(another.instance_id)
    assert rig.worker_hold is not None
    assert [one.instance_id for one in rig.worker_hold.holds] == [another.instance_id]
    await rig.later(2.5)
    await rig.until(lambda: rig.shown[ready.instance_id] is None)


async def test_a_start_that_may_be_written_keeps_its_grants(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next term commands what it reads, and asks for no room again."""
    start = SchedulerRepository.start

    async def lost(*given: Any) -> None:
        await start(*given)
        monkeypatch.setattr(SchedulerRepository, "start", start)
        raise DatabaseUnavailable("its answer was lost")

    monkeypatch.setattr(SchedulerRepository, "start", lost)
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.ordered(instance.instance_id)
    assert [one.grant_id for one in instance.placements] == ["grant-1"]
    assert rig.released == []


async def test_a_dead_worker_is_noticed_by_its_silence(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.READY, in_flight=1)

    async def silence() -> None:
        # A leap of more than half a second is a process that stood still.
        rig.clock.advance(0.4)

    await rig.passing(silence, lambda: rig.instances(S.FAILED))
    failed = await rig.shown_as(S.FAILED)
    assert "is gone" in failed.reason


async def test_a_stage_that_failed_fails_its_instance_with_the_workers_reason(rig: Rig) -> None:
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.ordered(instance.instance_id)
    await rig.hold(instance.instance_id, H.FAILED, reason="source_changed: the file is another one")
    failed = await rig.shown_as(S.FAILED)
    assert failed.reason == "source_changed: the file is another one"
    await rig.until(lambda: "instance_failed" in {one.kind for one in rig.events})


async def test_an_evicted_instance_is_gone_and_forgotten_by_its_worker(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.EVICTED, reason="the cache needs its room")
    gone = await rig.shown_as(S.GONE)
    assert gone.reason == "the cache needs its room"
    await rig.until(lambda: rig.worker_hold is not None and not rig.worker_hold.holds)
    await rig.until(lambda: rig.released == ["grant-1"])


async def test_an_idle_instance_drains_to_zero_after_its_keep_alive(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.READY, in_flight=1)
    await rig.later(0.6)
    await rig.hold(ready.instance_id, H.READY, idle_s=0.0)
    assert not rig.instances(S.DRAINING), "it was in use"
    rig.held[ready.instance_id] = replace(rig.held[ready.instance_id], idle_s=0.6)
    await rig.later(0.6)
    draining = await rig.shown_as(S.DRAINING)
    assert "idle" in draining.reason
    await rig.until(
        lambda: rig.worker_hold is not None and any(one.draining for one in rig.worker_hold.holds)
    )
    rig.held.clear()
    await rig.later(0.1)
    await rig.shown_as(S.GONE)
    assert [
        row.kind for row in await rig.rows(select(tables.decisions).order_by(tables.decisions.c.at))
    ] == [
        "cold_start",
        "drain",
    ]


async def test_a_pin_that_was_answered_just_now_keeps_an_instance(rig: Rig) -> None:
    """Its event is still on its way: the plan does not know of it."""

    async def pin(pinned: bool) -> None:
        body = to_row_json(a_model(keep_alive_s=0.5, pinned=pinned))
        async with rig.owner.unit_of_work() as work:
            await work.connection.execute(update(tables.models).values(body=body))

    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.READY, idle_s=0.0)
    await pin(True)
    rig.held[ready.instance_id] = replace(rig.held[ready.instance_id], idle_s=0.6)
    with pytest.raises(TimeoutError):
        await rig.passing(
            lambda: rig.later(0.6), lambda: rig.instances(S.DRAINING), at_most_s=4 * TURN_S
        )
    await pin(False)
    await rig.passing(lambda: rig.later(0.6), lambda: rig.instances(S.DRAINING))


async def test_a_cold_start_that_nobody_waits_for_any_more_is_cancelled(rig: Rig) -> None:
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.demand(waiting=0)
    await rig.later(0.9)
    await rig.later(0.9)
    await rig.shown_as(S.DRAINING)
    await rig.later(0.1)
    await rig.until(lambda: (instance.instance_id, S.GONE) in rig.states)
    (cold,) = await rig.rows(select(tables.cold_starts.c.status))
    assert cold.status in ("open", "abandoned")


async def test_a_busy_instance_makes_room_for_who_has_waited_for_too_long(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    await rig.register(a_model("m"), a_model("x", part_bytes=40))
    busy = await rig.ready()
    await rig.later(5.0)
    await rig.hold(busy.instance_id, H.READY, in_flight=2)
    await rig.demands(x=100.0)
    draining = await rig.shown_as(S.DRAINING)
    assert draining.instance_id == busy.instance_id
    assert "x has waited for 100" in draining.reason
    (decision,) = await rig.rows(select(tables.decisions).where(tables.decisions.c.kind == "drain"))
    assert decision.outcome["makes_way_for"] == "x"
    assert decision.reasons == [draining.reason]

    def told() -> Any:
        return rig.worker_hold and [
            one.drain_within_s for one in rig.worker_hold.holds if one.draining
        ]

    (within_s,) = await rig.until(told)
    assert within_s > 0

    # Another leads now: it knows the limit, and for which model the room is, though others ask for
    # it first.
    for component in reversed(rig.application.components):
        await component.stop()
    await new_scheduler(rig.clock)
    rig.worker_hold = None
    await rig.later(1.1)
    await rig.demands(x=101.1, m=0.1)
    assert await rig.until(told) == [within_s]
    rig.held.clear()
    await rig.later(0.1)
    await rig.demands(m=0.2, x=101.2)
    await rig.shown_as(S.GONE)
    assert (await rig.shown_as(S.FETCHING)).model == "x"


async def test_a_deleted_model_is_drained_and_its_stage_still_described(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.register()
    draining = await rig.shown_as(S.DRAINING)
    assert draining.reason == "its model was deleted"
    await rig.until(
        lambda: rig.worker_hold is not None and any(one.draining for one in rig.worker_hold.holds)
    )
    assert rig.worker_hold is not None
    assert rig.worker_hold.holds[0].instance_id == ready.instance_id
