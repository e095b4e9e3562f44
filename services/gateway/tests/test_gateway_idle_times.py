"""Idle time of loaded models: heard of by every gateway, written once, told by day and model."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import URL

from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.reports import WorkerReport
from pilotlight.gateway.admin.testing import AdminWorld, database_away
from pilotlight.gateway.records import idle_times
from pilotlight.gateway.records.idle_times import IdleTimes
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.policy.ids import Epoch, WorkerId
from pilotlight.policy.testing import held, worker

pytestmark = pytest.mark.anyio
MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)


class Wall(ManualClock):
    """A clock whose day is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.at = MIDNIGHT - timedelta(hours=1)

    def wall(self) -> datetime:
        return self.at


class Gateway:
    """What a gateway hears, and writes to the database."""

    def __init__(self, world: AdminWorld, wall: Wall) -> None:
        bus: Any = SimpleNamespace(connected=True)
        background: Any = SimpleNamespace()
        self._fleet = Fleet(bus, ManualClock(), background)
        context = world.context
        self.times = IdleTimes(world.database, wall, context.background, self._fleet)
        self._fleet.reports.on_news(self.times.hear)

    def hears(self, **idle_s: float) -> None:
        stages = tuple(
            replace(held(name, f"i-{name}"), idle_device_s=had_s) for name, had_s in idle_s.items()
        )
        facts = replace(worker(0), worker_id=WorkerId("w"), held=stages)
        report = WorkerReport(facts=facts, incarnation="1", epoch_seen=Epoch(1))
        with suppress(StopIteration):
            self._fleet.reports.hear_worker(report).send(None)
            raise AssertionError("it waits for something")

    async def writes(self) -> None:
        await self.times.start()
        await self.times.stop()


@pytest.fixture
def world(fresh_admin: AdminWorld) -> AdminWorld:
    return fresh_admin


@pytest.fixture
def wall() -> Iterator[Wall]:
    return Wall()


async def told(world: AdminWorld, **asked: str) -> list[tuple[str, str, str, int, float]]:
    since = {"since": "2026-03-01T00:00:00Z", **asked}
    rows = (await world.http.get("/usage", params=since)).json()["usage"]
    names = ("day", "key_id", "model", "requests", "idle_device_s")
    return [tuple(row[name] for name in names) for row in rows]


async def test_what_a_worker_says_is_told_once_whoever_hears_it(
    world: AdminWorld, wall: Wall
) -> None:
    first, second = Gateway(world, wall), Gateway(world, wall)
    for gateway in (first, second):
        gateway.hears(fox=5.0, owl=0.0)
    await first.writes()
    first.hears(fox=8.0, owl=1.5)
    await first.writes()
    # Late, and less than what is there.
    await second.writes()
    assert await told(world) == [
        ("2026-03-01", "", "fox", 0, 8.0),
        ("2026-03-01", "", "owl", 0, 1.5),
    ]
    assert await told(world, model="owl") == [("2026-03-01", "", "owl", 0, 1.5)]
    assert await told(world, key_id="key-1") == []
    since = {"since": "2026-03-01T00:00:00Z"}
    models = (await world.http.get("/usage/models", params=since)).json()["models"]
    assert [(one["model"], one["idle_device_s"]) for one in models] == [("fox", 8.0), ("owl", 1.5)]


async def test_each_day_has_what_it_has_more_than_the_one_before(
    world: AdminWorld, wall: Wall
) -> None:
    gateway = Gateway(world, wall)
    gateway.hears(fox=100.0)
    wall.at = MIDNIGHT + timedelta(minutes=1)
    gateway.hears(fox=160.0)
    await gateway.writes()
    # Killed, and back two hours later: the report has what it has missed.
    wall.at += timedelta(hours=2)
    back = Gateway(world, wall)
    back.hears(fox=460.0)
    await back.writes()
    assert await told(world) == [
        ("2026-03-01", "", "fox", 0, 100.0),
        ("2026-03-02", "", "fox", 0, 360.0),
    ]
    assert await told(world, since="2026-03-02T00:00:00Z") == [("2026-03-02", "", "fox", 0, 360.0)]
    assert await told(world, until="2026-03-02T01:00:00Z") == [
        ("2026-03-01", "", "fox", 0, 100.0),
        ("2026-03-02", "", "fox", 0, 60.0),
    ]


async def test_what_waits_for_the_database_is_bounded_and_comes_with_a_later_report(
    world: AdminWorld, wall: Wall, module_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_times, "MAX_WAITING", 1)
    gateway = Gateway(world, wall)
    with database_away(module_database):
        gateway.hears(fox=5.0, owl=2.0)
        await gateway.writes()
    await gateway.writes()
    assert [row[2] for row in await told(world)] == ["fox"]
    gateway.hears(fox=5.0, owl=2.0)
    await gateway.writes()
    assert [row[2:] for row in await told(world)] == [("fox", 0, 5.0), ("owl", 0, 2.0)]
