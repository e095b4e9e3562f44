"""What every service with a database tells Prometheus of it: failures by their kind, and for how
long events have been waiting.
"""

import importlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select

from pilotlight.cache.settings import CacheSettings
from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.measures import measure
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.session import Database, Failure
from pilotlight.common.errors import BusUnavailable, DatabaseUnavailable
from pilotlight.common.messages.events import Event
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.materializer.settings import MaterializerSettings
from pilotlight.scheduler.settings import SchedulerSettings

pytestmark = pytest.mark.anyio

SETTINGS: dict[str, Any] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "cache": CacheSettings,
    "materializer": MaterializerSettings,
}


@pytest.fixture
async def database(database_settings: DatabaseSettingsOf) -> AsyncGenerator[Database]:
    database = Database(database_settings("gateway"), "gateway", ManualClock())
    yield database
    await database.stop()


def failures(registry: CollectorRegistry) -> dict[str, float | None]:
    return {
        kind.value: registry.get_sample_value(
            "pilotlight_database_errors_total", {"kind": kind.value}
        )
        for kind in Failure
    }


async def test_each_failure_is_counted_by_its_kind(
    database_settings: DatabaseSettingsOf,
    make_context: MakeContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pilotlight.common.db.session.CONNECT_TIMEOUT_S", 0.5)
    database = Database(
        database_settings("gateway").model_copy(update={"database_pool_size": 1}),
        "gateway",
        ManualClock(),
    )
    context = make_context("gateway", ServiceSettings())
    measure(database, Outbox(database, context), context.metrics)
    assert failures(context.metrics) == {"deadline": 0, "pool": 0, "connection": 0}

    async with database.reading():
        with pytest.raises(DatabaseUnavailable):
            async with database.reading():
                pass
    assert failures(context.metrics) == {"deadline": 0, "pool": 1, "connection": 0}

    with pytest.raises(DatabaseUnavailable):
        async with database.unit_of_work() as work:
            await work.connection.execute(select(func.pg_terminate_backend(func.pg_backend_pid())))
    assert failures(context.metrics) == {"deadline": 0, "pool": 1, "connection": 1}

    monkeypatch.setattr("pilotlight.common.db.session.UNIT_DEADLINE_S", 0.05)
    with pytest.raises(DatabaseUnavailable):
        async with database.unit_of_work() as work:
            await work.connection.execute(select(func.pg_sleep(10)))
    assert failures(context.metrics) == {"deadline": 1, "pool": 1, "connection": 1}
    await database.stop()


async def test_what_the_body_does_wrong_is_no_failure_of_the_database(
    database: Database, make_context: MakeContext
) -> None:
    context = make_context("gateway", ServiceSettings())
    measure(database, Outbox(database, context), context.metrics)
    with pytest.raises(BusUnavailable):
        async with database.unit_of_work():
            raise BusUnavailable
    assert set(failures(context.metrics).values()) == {0}


async def test_the_lag_grows_while_events_wait_and_is_gone_with_them(
    database: Database, make_context: MakeContext, bus: NatsBus
) -> None:
    class Refusing:
        refuses = True
        asked = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(bus, name)

        async def publish_event(self, subject: str, event_id: str, message: Event) -> None:
            self.asked += 1
            if self.refuses:
                raise BusUnavailable
            await bus.publish_event(subject, event_id, message)

    refusing: Any = Refusing()
    clock = ManualClock()
    context = make_context("gateway", ServiceSettings(), bus=refusing, clock=clock)
    outbox = Outbox(database, context)
    measure(database, outbox, context.metrics)

    def lag_s() -> float | None:
        return context.metrics.get_sample_value("pilotlight_outbox_lag_seconds")

    await outbox.start()
    assert lag_s() == 0
    async with database.unit_of_work() as work:
        work.emit("model_changed", "m")
    await until(lambda: refusing.asked >= 2)
    clock.advance(90)
    assert lag_s() == 90
    await until(lambda: refusing.asked >= 4)
    assert lag_s() == 90
    refusing.refuses = False
    await until(lambda: lag_s() == 0)
    await outbox.stop()


@pytest.mark.parametrize("service", tables.OWNERS)
async def test_every_service_with_a_database_shows_both(
    service: str, make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cluster-key", "key-pepper", f"postgres-{service}"):
        (tmp_path / name).write_text("secret")
    monkeypatch.setenv("PILOTLIGHT_SECRETS_DIR", str(tmp_path))
    context = make_context(service, SETTINGS[service]())
    await importlib.import_module(f"pilotlight.{service}.app").build(context)
    assert failures(context.metrics) == {"deadline": 0, "pool": 0, "connection": 0}
    assert context.metrics.get_sample_value("pilotlight_outbox_lag_seconds") == 0
