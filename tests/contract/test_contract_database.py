"""Schemas, roles, units of work and outboxes on a real PostgreSQL."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Table, create_engine, func, insert, select
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from pilotlight.common.buckets import jetstream
from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.db.outbox import BATCH, Outbox
from pilotlight.common.db.session import Database
from pilotlight.common.errors import BusUnavailable, DatabaseUnavailable, InternalError
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.events import Event
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.nats_streams import events_stream
from pilotlight.common.settings import BusSettings, DatabaseSettings, ServiceSettings
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.common.waiting import cancel_all, within
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import Mean
from pilotlight.policy.coldstart.timings import OfModel
from pilotlight.policy.ids import ModelName
from pilotlight.policy.materialized import Profile
from pilotlight.policy.plan import Estimate

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MODEL: dict[str, Any] = {
    "name": "m",
    "digest": "d",
    "body": {"a": [1, None]},
    "created_at": NOW,
    "updated_at": NOW,
}
ALL_TABLES = tuple(tables.metadata.sorted_tables)


@pytest.fixture
async def gateway_database(
    database_settings: DatabaseSettingsOf, anyio_backend: str
) -> AsyncGenerator[Database]:
    database = Database(database_settings("gateway"), "gateway", ManualClock())
    await database.start()
    yield database
    async with database.unit_of_work() as work:
        await work.connection.execute(tables.models.delete())
        await work.connection.execute(tables.outboxes["gateway"].delete())
    await database.stop()


# the schema


def test_migrations_make_what_the_tables_say(module_database: URL) -> None:
    engine = create_engine(module_database, poolclass=NullPool)
    with engine.connect() as connection:
        # Without "public": Alembic's own table is there.
        options = {
            "include_schemas": True,
            "include_name": lambda name, kind, _: kind != "schema" or name in tables.OWNERS,
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.metadata) == []
    engine.dispose()


def test_migrating_again_changes_nothing(module_database: URL, postgres_secrets: Path) -> None:
    url = module_database.render_as_string(hide_password=False)
    migrate(MigrateSettings(database_url=url, secrets_dir=postgres_secrets))
    migrate(MigrateSettings(database_url=url, secrets_dir=postgres_secrets))


def test_a_database_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailable):
        migrate(MigrateSettings(database_url=f"postgresql:///x?host={tmp_path}"))


# units of work


@pytest.mark.anyio
async def test_a_unit_of_work_is_all_or_nothing(gateway_database: Database) -> None:
    async def add_and_fail() -> None:
        async with gateway_database.unit_of_work() as work:
            await work.connection.execute(insert(tables.models).values(**MODEL))
            work.emit("model_registered", "m")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await add_and_fail()
    assert await rows(gateway_database, tables.models) == []
    assert await rows(gateway_database, tables.outboxes["gateway"]) == []

    async with gateway_database.unit_of_work() as work:
        await work.connection.execute(insert(tables.models).values(**MODEL))
        work.emit("model_registered", "m", {"digest": "d"})
    (row,) = await rows(gateway_database, tables.models)
    assert row.body == {"a": [1, None]}
    assert row.created_at == NOW
    (event,) = await rows(gateway_database, tables.outboxes["gateway"])
    assert (event.kind, event.entity, event.data) == ("model_registered", "m", {"digest": "d"})


@pytest.mark.anyio
async def test_a_violated_constraint_is_the_repositorys(gateway_database: Database) -> None:
    async with gateway_database.unit_of_work() as work:
        await work.connection.execute(insert(tables.models).values(**MODEL))
    with pytest.raises(IntegrityError):
        await add_model(gateway_database)


@pytest.mark.anyio
async def test_reading_sees_one_moment_and_writes_nothing(gateway_database: Database) -> None:
    async with gateway_database.reading() as connection:
        assert (
            await connection.execute(select(func.count()).select_from(tables.models))
        ).scalar_one() == 0
        async with gateway_database.unit_of_work() as work:
            await work.connection.execute(insert(tables.models).values(**MODEL))
        assert (
            await connection.execute(select(func.count()).select_from(tables.models))
        ).scalar_one() == 0
    with pytest.raises(DBAPIError):
        async with gateway_database.reading() as connection:
            await connection.execute(tables.models.delete())
    assert len(await rows(gateway_database, tables.models)) == 1


@pytest.mark.anyio
async def test_no_connection_left_is_told(
    database_settings: DatabaseSettingsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotlight.common.db.session.CONNECT_TIMEOUT_S", 0.05)
    settings = database_settings("gateway").model_copy(update={"database_pool_size": 1})
    database = Database(settings, "gateway", ManualClock())
    async with database.reading():
        with pytest.raises(DatabaseUnavailable, match="in use"):
            async with database.reading():
                pass
    await database.stop()


@pytest.mark.anyio
async def test_a_broken_connection_is_replaced(
    gateway_database: Database, module_database: URL
) -> None:
    async def cut() -> None:
        url = module_database.set(drivername="postgresql").render_as_string(hide_password=False)
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'pilotlight_gateway'"
            )

    async def add_through_the_break() -> None:
        async with gateway_database.unit_of_work() as work:
            await cut()
            await work.connection.execute(insert(tables.models).values(**MODEL))

    with pytest.raises(DatabaseUnavailable):
        await add_through_the_break()
    assert await rows(gateway_database, tables.models) == []


@pytest.mark.anyio
async def test_a_connection_that_is_given_up_is_hung_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the error is kept, and no collector runs: the server waits for the rest of the
    handshake, and others for it.
    """
    came, left = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        while await reader.read(1024):
            pass
        left.set()
        writer.close()

    async def use() -> None:
        async with database.unit_of_work():
            pass

    settings = DatabaseSettings(
        database_url=f"postgresql://role:secret@/name?port=5432&host={tmp_path}"
    )
    database = Database(settings, "gateway", ManualClock())
    async with await asyncio.start_unix_server(say_nothing, tmp_path / ".s.PGSQL.5432"):
        gc.disable()
        try:
            cancelled = asyncio.create_task(use())
            await within(5, came.wait(), "a connection")
            await cancel_all((cancelled,))
            await within(5, left.wait(), "the end of one that was cancelled")
            left.clear()
            monkeypatch.setattr("pilotlight.common.db.session.UNIT_DEADLINE_S", 0.05)
            with pytest.raises(DatabaseUnavailable, match="did not answer") as late:
                await use()
            await within(5, left.wait(), "the end of one that took too long")
        finally:
            gc.enable()
        assert cancelled.cancelled()
        assert late.value.__cause__ is not None
    await database.stop()


@pytest.mark.anyio
async def test_a_unit_of_work_has_a_deadline(
    gateway_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotlight.common.db.session.UNIT_DEADLINE_S", 0.05)
    with pytest.raises(DatabaseUnavailable, match="did not answer"):
        async with gateway_database.unit_of_work() as work:
            await work.connection.execute(select(func.pg_sleep(10)))
    with pytest.raises(TimeoutError):
        async with gateway_database.unit_of_work():
            raise TimeoutError("of the body, not of the database")


async def add_model(database: Database) -> None:
    async with database.unit_of_work() as work:
        await work.connection.execute(insert(tables.models).values(**MODEL))


async def rows(database: Database, table: Table) -> list[Any]:
    async with database.reading() as connection:
        return list((await connection.execute(select(table))).all())


# the outbox


async def stored(bus: NatsBus, settings: BusSettings) -> list[Event]:
    stream = jetstream(bus.client)
    name = events_stream(settings.prefix)
    info = await stream.stream_info(name)
    found = [await stream.get_msg(name, seq=number + 1) for number in range(info.state.messages)]
    return [decode_json(msg.data, Event) for msg in found]


async def emit(database: Database, *entities: str) -> None:
    for entity in entities:
        async with database.unit_of_work() as work:
            work.emit("model_changed", entity, {"entity": entity})


async def until_empty(database: Database) -> None:
    async def empty() -> bool:
        return not await rows(database, tables.outboxes["gateway"])

    await until(empty)


@pytest.mark.anyio
async def test_events_leave_in_order_and_once(
    gateway_database: Database, make_context: MakeContext, bus: NatsBus, bus_settings: BusSettings
) -> None:
    context = make_context("gateway", ServiceSettings())
    # Two processes of one service: each has its own outbox over the same rows.
    outboxes = [Outbox(gateway_database, context), Outbox(gateway_database, context)]
    for outbox in outboxes:
        await outbox.start()
    entities = [f"m{number}" for number in range(BATCH + 20)]
    await emit(gateway_database, *entities)
    await until_empty(gateway_database)
    events = await stored(bus, bus_settings)
    assert [event.entity for event in events] == entities
    assert events[0].data == {"entity": "m0"}
    assert events[0].at == "2026-01-01T00:00:00+00:00"
    for outbox in outboxes:
        await outbox.stop()


@pytest.mark.anyio
async def test_events_survive_a_crash_before_they_are_published(
    gateway_database: Database, make_context: MakeContext, bus: NatsBus, bus_settings: BusSettings
) -> None:
    await emit(gateway_database, "a", "b")
    assert await stored(bus, bus_settings) == []
    outbox = Outbox(gateway_database, make_context("gateway", ServiceSettings()))
    await outbox.start()
    await until_empty(gateway_database)
    assert [event.entity for event in await stored(bus, bus_settings)] == ["a", "b"]
    await outbox.stop()


@pytest.mark.anyio
async def test_a_crash_after_publishing_stores_nothing_twice(
    gateway_database: Database, make_context: MakeContext, bus: NatsBus, bus_settings: BusSettings
) -> None:
    class Dying:
        """Confirms what it publishes, then dies before the row is gone."""

        def __getattr__(self, name: str) -> Any:
            return getattr(bus, name)

        async def publish_event(self, subject: str, event_id: str, message: object) -> None:
            await bus.publish_event(subject, event_id, message)
            raise RuntimeError("killed")

    await emit(gateway_database, "a")
    dying: Any = Dying()
    outbox = Outbox(gateway_database, make_context("gateway", ServiceSettings(), bus=dying))
    with pytest.raises(RuntimeError, match="killed"):
        await outbox.publish_all()
    assert len(await rows(gateway_database, tables.outboxes["gateway"])) == 1
    outbox = Outbox(gateway_database, make_context("gateway", ServiceSettings()))
    await outbox.publish_all()
    assert [event.entity for event in await stored(bus, bus_settings)] == ["a"]
    assert await rows(gateway_database, tables.outboxes["gateway"]) == []


@pytest.mark.anyio
async def test_events_wait_for_the_stream(
    gateway_database: Database, make_context: MakeContext, bus: NatsBus, bus_settings: BusSettings
) -> None:
    failures = 3

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(bus, name)

        async def publish_event(self, subject: str, event_id: str, message: Event) -> None:
            nonlocal failures
            if message.entity == "b" and failures:
                failures -= 1
                raise BusUnavailable
            await bus.publish_event(subject, event_id, message)

    failing: Any = Failing()
    outbox = Outbox(gateway_database, make_context("gateway", ServiceSettings(), bus=failing))
    await outbox.start()
    await emit(gateway_database, "a", "b", "c")
    await until_empty(gateway_database)
    assert failures == 0
    assert [event.entity for event in await stored(bus, bus_settings)] == ["a", "b", "c"]
    await outbox.stop()


# rows


def test_facts_survive_their_row() -> None:
    fact = Estimate(
        model=ModelName("m"),
        device_kind=DeviceKind.SIM,
        fetch_bytes_per_s=1.5,
        load_bytes_per_s=2.5,
        prefill_s=0.1,
        cold_ttft_s=1.0,
        samples=3,
    )
    row = to_row_json(fact)
    assert row["device_kind"] == "sim"
    assert from_row_json(row, Estimate) == fact
    with pytest.raises(InternalError, match="Estimate"):
        from_row_json({"model": "m"}, Estimate)


def test_rows_of_a_release_without_miss_penalties_are_read() -> None:
    """Of profiles, of estimates, and of what was learned of a model."""
    profile = from_row_json({"load_bytes_per_s": 1.0, "prefill": [], "decode": []}, Profile)
    assert (profile.load_s, profile.init_s, profile.restore_s) == (0.0, 0.0, 0.0)
    estimate = {
        "model": "m",
        "device_kind": "sim",
        "fetch_bytes_per_s": 1.5,
        "load_bytes_per_s": 2.5,
        "prefill_s": 0.1,
        "cold_ttft_s": 1.0,
        "samples": 3,
    }
    assert from_row_json(estimate, Estimate).init_s == 0.0
    learned = from_row_json({"init": {"value": 1.0, "spread": 0.5, "samples": 2}}, OfModel)
    assert learned == OfModel(init=Mean(1.0, 0.5, 2))
    assert from_row_json(to_row_json(learned), OfModel) == learned
