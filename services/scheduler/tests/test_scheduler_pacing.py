"""When the next tick of a leader may begin."""

import asyncio
from dataclasses import replace

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.policy.control.pace import LEAST
from pilotlight.policy.control.testing import LargeCluster, Size
from pilotlight.scheduler.pacing import Pacing, Pressing

pytestmark = pytest.mark.anyio


async def test_a_tick_waits_for_commands_that_are_due() -> None:
    pressing = Pressing()
    assert await pressing.none(0.0)
    with pressing.one():
        with pressing.one():
            assert not await pressing.none(0.0), "for so long, and no longer"
            waiting = asyncio.create_task(pressing.none(60.0))
            await asyncio.wait({waiting}, timeout=0.01)
        await asyncio.wait({waiting}, timeout=0.01)
        assert not waiting.done(), "another one is left"
    assert await waiting


async def test_a_start_that_fails_presses_no_longer() -> None:
    pressing = Pressing()
    with pytest.raises(RuntimeError), pressing.one():
        raise RuntimeError
    assert await pressing.none(0.0)


async def test_ticks_that_take_little_of_the_processor_begin_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = LargeCluster(Size(nodes=4, workers_per_node=2, models=40, instances=1))
    cluster.ask(0, count=30)
    pacing, spent_s = Pacing(ManualClock(), cluster.rules), 0.0
    monkeypatch.setattr("pilotlight.scheduler.pacing.busy_s", lambda: next(readings))
    most: list[int] = []
    for took_s in (1e-4, 1e-4, *(12 * [1.0])):
        readings = iter((spent_s, spent_s := spent_s + took_s))
        facts = replace(cluster.facts(None), starts_at_once=pacing.starts_at_once)
        pacing.tick(facts, cluster.memory)
        most.append(pacing.starts_at_once)
    assert most[1] > most[0] > cluster.rules.starts_at_once
    assert most[-1] == LEAST
