"""A scheduler on a real NATS server and a real PostgreSQL, with the world around it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.events import EVENT_SUBJECTS, Event
from pilotlight.common.messages.hold import NodeHold, WorkerHold
from pilotlight.common.messages.room import RELEASE_SUBJECT, RESERVE_SUBJECT, Release, Reserve
from pilotlight.common.service import Application
from pilotlight.common.settings import BusSettings, DatabaseSettings
from pilotlight.common.testing import MakeContext, ReconnectingBus
from pilotlight.policy.plan import Instance
from pilotlight.policy.testing import model as a_model
from pilotlight.scheduler import election
from pilotlight.scheduler.app import build
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.testing import LINK, Fleet, Rig


@pytest.fixture
def reconnecting(bus: Bus) -> ReconnectingBus:
    return ReconnectingBus(bus)


@pytest.fixture
async def owner(
    postgres_url: str, database_settings: Callable[[str], DatabaseSettings], module_database: Any
) -> AsyncGenerator[Database]:
    url = module_database.set(drivername="postgresql").render_as_string(hide_password=False)
    owner = Database(DatabaseSettings(database_url=url), "scheduler", ManualClock())
    await owner.start()
    async with owner.unit_of_work() as work:
        for table in (
            tables.lease,
            tables.instances,
            tables.decisions,
            tables.cold_starts,
            tables.estimates,
            tables.timings,
            tables.models,
            tables.drains,
            tables.profiles,
        ):
            await work.connection.execute(delete(table))
    yield owner
    await owner.stop()


@pytest.fixture
def own_settings() -> dict[str, Any]:
    """What a test sets of the scheduler, by ``parametrize``."""
    return {}


@pytest.fixture
async def new_scheduler(
    own_settings: dict[str, Any],
    reconnecting: Any,
    bus_settings: BusSettings,
    make_context: MakeContext,
    database_settings: Callable[[str], DatabaseSettings],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> AsyncGenerator[Callable[[ManualClock], Awaitable[Application]]]:
    started: list[Application] = []
    # A clock that is set forward is no lease that has run out.
    monkeypatch.setattr(election, "LEASE_S", 1e6)

    async def start(clock: ManualClock) -> Application:
        settings = SchedulerSettings(
            nats_url=bus_settings.nats_url,
            prefix=bus_settings.prefix,
            database_url=database_settings("scheduler").database_url,
            decision_log_dir=tmp_path / "decisions",
            **own_settings,
        )
        application = await build(
            make_context("scheduler", settings, clock=clock, bus=reconnecting)
        )
        for component in application.components:
            await component.start()
        started.append(application)
        return application

    yield start
    for application in started:
        for component in reversed(application.components):
            await component.stop()


@pytest.fixture
async def rig(
    bus: Bus, owner: Database, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> AsyncGenerator[Rig]:
    clock = ManualClock()
    rig = Rig(bus=bus, clock=clock, owner=owner, application=Application())
    await rig.register(a_model(keep_alive_s=0.5))
    subscriptions = [
        await bus.subscribe("v1.worker.w0.hold", Timed[WorkerHold], rig.on_worker_hold),
        await bus.subscribe("v1.loader.n0.hold", Timed[NodeHold], rig.on_node_hold),
        await bus.subscribe(EVENT_SUBJECTS, Event, rig.on_event),
        await bus.serve(RESERVE_SUBJECT, Reserve, rig.on_reserve),
        await bus.serve(RELEASE_SUBJECT, Release, rig.on_release),
    ]
    bucket = await bus.bucket(INSTANCES)
    watching = asyncio.create_task(bucket.watch(Timed[Instance], rig.on_shown))
    rig.application = await new_scheduler(clock)
    clock.advance(1.1)
    await rig.report()
    await rig.until(lambda: rig.worker_hold is not None)
    yield rig
    watching.cancel()
    await asyncio.wait({watching})
    for subscription in subscriptions:
        await subscription.end()


@pytest.fixture
async def fleet(rig: Rig) -> AsyncGenerator[Fleet]:
    fleet = Fleet(rig, {"n0": LINK, "n1": LINK, "n2": LINK, "n3": LINK})
    subscription = await rig.bus.subscribe("v1.worker.*.hold", WorkerHold, fleet.on_hold)
    yield fleet
    await subscription.end()
