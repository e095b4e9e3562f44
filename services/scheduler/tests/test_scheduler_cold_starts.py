"""What is written down of a cold start, and what later estimates make of it."""

from typing import Any

import pytest
from sqlalchemy import select

from pilotlight.common.clock import moment_of
from pilotlight.common.db import tables
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.testing import until
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import NodeId, RequestId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.plan import InstanceState, Placement
from pilotlight.scheduler.records import lanes_of
from pilotlight.scheduler.testing import DEADLINE_S, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState
H = HeldState


async def test_what_is_sent_says_when_and_activation_begins_with_the_last_load(rig: Rig) -> None:
    begun_s = rig.clock.monotonic_s()
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.ordered(instance.instance_id)
    await rig.until(lambda: rig.node_hold is not None)
    assert rig.sent.keys() == {"worker", "node", "instance"}
    for sent in rig.sent.values():
        assert sent is not None
        assert begun_s <= sent.at_s <= rig.clock.monotonic_s()
    loaded = moment_of(rig.clock)
    rig.clock.advance(0.2)
    await rig.hold(instance.instance_id, H.READY, loaded=loaded)
    ready = await rig.shown_as(S.READY)
    assert rig.sent["instance"] == moment_of(rig.clock)
    offset_s = loaded.wall_offset_s
    first = FirstToken(
        request_id=RequestId("r"), at_s=loaded.at_s + 0.5, wall_offset_s=offset_s, arrived_s=begun_s
    )
    report = PhaseReport(instance_id=ready.instance_id, phases=(), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=DEADLINE_S)
    (cold,) = await rig.rows(select(tables.cold_starts))
    (activate,) = [one for one in cold.phases if one["name"] == "activate"]
    assert (activate["start_s"], activate["end_s"]) == (
        loaded.at_s,
        pytest.approx(loaded.at_s + 0.21),
    )


def at(worker: str, node: str, start: int, stop: int) -> Placement:
    return Placement(
        worker_id=WorkerId(worker),
        node_id=NodeId(node),
        stage=Stage(start, stop),
        device_bytes=1,
    )


async def test_the_phases_of_a_group_say_of_which_stage_they_are() -> None:
    group = (at("w0", "n0", 0, 4), at("w1", "n1", 4, 6), at("w2", "n1", 6, 8))
    assert lanes_of(group) == {"w0": "0-4", "n0": "0-4", "w1": "4-6", "w2": "6-8"}, (
        "a loader works for all stages of its node"
    )
    assert lanes_of(group[:1]) == {}


async def test_a_finished_cold_start_teaches_the_estimate(rig: Rig) -> None:
    ready = await rig.ready()
    now_s, offset_s = (
        rig.clock.monotonic_s(),
        rig.clock.wall().timestamp() - rig.clock.monotonic_s(),
    )
    first = FirstToken(
        request_id=RequestId("r"), at_s=now_s + 2, wall_offset_s=offset_s, arrived_s=now_s
    )
    fetch = Phase(
        name=PhaseName.FETCH,
        start_s=now_s,
        end_s=now_s + 0.5,
        wall_offset_s=offset_s,
        process="loader",
    )
    report = PhaseReport(instance_id=ready.instance_id, phases=(fetch,), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=DEADLINE_S)
    await rig.later(10.5)

    async def learned() -> list[Any]:
        return await rig.rows(select(tables.estimates))

    await until(learned)
    rows = await learned()
    assert rows[0].body["cold_ttft_s"] == pytest.approx(2.0)
    assert rows[0].body["fetch_bytes_per_s"] == pytest.approx(120.0)
