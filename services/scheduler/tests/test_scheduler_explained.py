"""What is written down of decisions: rows that explain, outcomes, a log that replays."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.decision_replay import replay
from pilotlight.common.errors import HostPoolFull
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.policy_version import policy_version
from pilotlight.common.service import Application
from pilotlight.common.testing import until
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import RequestId
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.scheduler.testing import DEADLINE_S, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def _first_token(rig: Rig, instance: Instance, fetch_s: float = 1.0) -> None:
    """Its fetch and its first token are reported; 10 s later that is learned from."""
    now_s = rig.clock.monotonic_s()
    offset_s = rig.clock.wall().timestamp() - now_s
    fetch = Phase(
        name=PhaseName.FETCH,
        start_s=now_s,
        end_s=now_s + fetch_s,
        wall_offset_s=offset_s,
        process="loader",
    )
    first = FirstToken(
        request_id=RequestId("r"), at_s=now_s + 2, wall_offset_s=offset_s, arrived_s=now_s
    )
    report = PhaseReport(instance_id=instance.instance_id, phases=(fetch,), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=DEADLINE_S)
    await rig.later(10.5)


async def _stop(application: Application) -> None:
    for component in reversed(application.components):
        await component.stop()


async def test_a_row_has_prediction_and_outcome_side_by_side(rig: Rig) -> None:
    ready = await rig.ready()
    await _first_token(rig, ready)
    (row,) = await rig.rows(select(tables.decisions))
    assert row.policy_version == policy_version()
    scheme = row.outcome["scheme"]
    assert scheme["predicted_phase_s"].keys() >= {"fetch", "load"}
    assert row.actual["ttft_s"] == pytest.approx(2.0)
    assert row.actual["phase_s"]["fetch"] == pytest.approx(1.0)
    assert row.inputs["demand"]["waiting"] == 1
    assert row.inputs["log"].endswith(tuple("0123456789"))
    assert len(msgspec.json.encode([row.inputs, row.outcome, row.reasons])) < 4000


async def test_what_starts_take_is_kept_over_a_change_of_leader(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    """The next leader predicts from it."""
    ready = await rig.ready()
    await _first_token(rig, ready)

    async def learned() -> list[Any]:
        return await rig.rows(select(tables.timings.c.key))

    await until(learned)
    rates = [row.key for row in await learned() if row.key.startswith('["rate"')]
    assert '["rate","n0","file://"]' in rates
    await new_scheduler(rig.clock)
    epoch = rig.epoch
    await _stop(rig.application)
    for _ in range(4):
        await rig.later(0.5)
    await rig.until(lambda: rig.epoch > epoch)
    rig.held.clear()
    await rig.report()
    await rig.passing(rig.waited, lambda: rig.instances(InstanceState.FETCHING))
    rows = await rig.rows(select(tables.decisions).order_by(tables.decisions.c.at.desc()))
    scheme = rows[0].outcome["scheme"]
    assert scheme["predicted_phase_s"]["fetch"] == pytest.approx(1.0)


async def test_the_log_of_a_term_replays(rig: Rig, tmp_path: Path) -> None:
    """A refusal, a start, its end: decided again, everything is the same."""
    rig.refusal = HostPoolFull("the pool is full")
    await rig.demand()
    await rig.tried(3)
    rig.refusal = None
    await rig.tried(len(rig.reserved) + 1)
    starting = await rig.shown_as(InstanceState.FETCHING)
    await rig.ordered(starting.instance_id)
    await rig.hold(starting.instance_id, HeldState.READY)
    ready = await rig.shown_as(InstanceState.READY)
    await rig.demand(waiting=0)
    await _first_token(rig, ready)
    await rig.register()
    await rig.shown_as(InstanceState.DRAINING)
    await _stop(rig.application)
    (path,) = (tmp_path / "decisions").iterdir()
    found = replay(path)
    assert found.identical, found.difference
    assert found.ticks > 10
    assert found.decisions >= 4
    assert found.logged_version == policy_version()
