"""Statements that are transactions of their own, on a real PostgreSQL."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Select, bindparam, cast, func, insert, literal, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import make_url
from sqlalchemy.types import Text

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.events import Event, events_inserted
from pilotlight.common.db.session import Database, Failure
from pilotlight.common.errors import BadRequest, DatabaseUnavailable
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.testing import DatabaseSettingsOf, until
from pilotlight.common.waiting import cancel_all

pytestmark = pytest.mark.anyio

MODELS = tables.models
ADDED = (
    insert(MODELS)
    .from_select(
        ["name", "digest", "body", "created_at", "updated_at"],
        select(
            cast(bindparam("name"), Text),
            literal("d"),
            cast(literal("{}"), JSONB),
            func.now(),
            func.now(),
        ),
    )
    .returning(MODELS.c.name)
)
_new_event = events_inserted("gateway").cte("new_events")
TOLD: Select[int] = select(literal(1)).add_cte(ADDED.cte("added"), _new_event)
SLEEP = select(func.pg_sleep(10))
ONE = select(literal(1))


@pytest.fixture
async def database(
    database_settings: DatabaseSettingsOf, anyio_backend: str
) -> AsyncGenerator[Database]:
    database = Database(database_settings("gateway"), "gateway", ManualClock())
    yield database
    async with database.unit_of_work() as work:
        await work.connection.execute(MODELS.delete())
        await work.connection.execute(tables.outboxes["gateway"].delete())
    await database.stop()


async def names(database: Database) -> list[str]:
    async with database.reading() as connection:
        found = await connection.execute(select(MODELS.c.name).order_by(MODELS.c.name))
        return list(found.scalars())


async def end_all(module_database: Any) -> None:
    """The server ends every connection of the role."""
    url = module_database.set(drivername="postgresql").render_as_string(hide_password=False)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'pilotlight_gateway'"
        )


async def test_what_it_wrote_is_committed_when_it_returns(database: Database) -> None:
    assert await database.write_at_once(ADDED, {"name": "a"}) == [("a",)]
    assert await names(database) == ["a"]


async def test_events_come_with_what_they_tell_of(database: Database) -> None:
    kicks: list[int] = []
    database.on_events(lambda: kicks.append(1))
    await database.write_at_once(TOLD, {"name": "a"}, [Event("made", "a", {"n": 1}, "")])
    assert kicks == [1]
    async with database.reading() as connection:
        (row,) = (await connection.execute(select(tables.outboxes["gateway"]))).all()
    assert (row.kind, row.entity, row.data) == ("made", "a", {"n": 1})
    with pytest.raises(psycopg.IntegrityError):
        await database.write_at_once(TOLD, {"name": "a"}, [Event("made", "a", {}, "")])
    assert kicks == [1]
    async with database.reading() as connection:
        assert len((await connection.execute(select(tables.outboxes["gateway"]))).all()) == 1


async def test_a_connection_that_the_server_ended_is_made_anew(
    database: Database, module_database: Any
) -> None:
    """A pool's, too: neither is asked first whether it lives."""
    await database.write_at_once(ADDED, {"name": "a"})
    assert await names(database) == ["a"]
    await end_all(module_database)
    await database.write_at_once(ADDED, {"name": "b"})
    assert await names(database) == ["a", "b"]


async def test_one_that_is_ended_in_the_middle_says_so(
    database: Database, module_database: Any
) -> None:
    asleep = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
    failures: list[Failure] = []
    database.on_failure(failures.append)
    sleeping = asyncio.create_task(database.write_at_once(SLEEP, {}))

    async def sleeps() -> bool:
        async with database.asking() as connection:
            return (await connection.execute(asleep)).scalar_one() == 1

    await until(sleeps)
    await end_all(module_database)
    with pytest.raises(DatabaseUnavailable):
        await sleeping
    assert failures == [Failure.CONNECTION]
    await database.write_at_once(ADDED, {"name": "a"})


async def test_what_is_given_up_keeps_nobody_waiting(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pilotlight.common.db.session.UNIT_DEADLINE_S", 0.05)
        with pytest.raises(DatabaseUnavailable, match="did not answer"):
            await database.write_at_once(SLEEP, {})
    sleeping = asyncio.create_task(database.write_at_once(SLEEP, {}))
    await asyncio.sleep(0)
    await cancel_all((sleeping,))
    await database.write_at_once(ADDED, {"name": "a"})
    assert await names(database) == ["a"]


async def test_a_text_that_postgresql_cannot_hold_is_a_bad_request(database: Database) -> None:
    with pytest.raises(BadRequest, match=r"U\+0000"):
        await database.write_at_once(ADDED, {"name": "a\0b"})
    await database.write_at_once(ADDED, {"name": "a"})


async def test_a_parameter_that_is_missing_is_no_null(database: Database) -> None:
    with pytest.raises(psycopg.ProgrammingError, match="name"):
        await database.write_at_once(ADDED, {})


async def test_what_an_address_says_beside_the_place_is_no_error(
    database_settings: DatabaseSettingsOf,
) -> None:
    """For pools it never was."""
    url = make_url(database_settings("gateway").database_url)
    told = url.update_query_dict({"application_name": "ours", "connect_timeout": "3"})
    settings = DatabaseSettings(database_url=told.render_as_string(hide_password=False))
    database = Database(settings, "gateway", ManualClock())
    assert await database.write_at_once(ONE, {}) == [(1,)]
    await database.stop()


async def test_a_connection_is_made_ahead_once_and_again_when_it_has_ended(
    database: Database, module_database: Any
) -> None:
    ours = text(
        "SELECT pid, query FROM pg_stat_activity WHERE usename = 'pilotlight_gateway' "
        "AND datname = current_database() AND application_name = 'pilotlight-gateway' "
        "AND pid <> pg_backend_pid() ORDER BY pid"
    )

    async def seen() -> list[int]:
        async with database.asking() as observer:
            return [row.pid for row in await observer.execute(ours)]

    assert await seen() == []
    await database.connect_ahead()
    (ahead,) = await seen()
    await database.connect_ahead()
    assert await database.write_at_once(ONE, {}) == [(1,)]
    assert await seen() == [ahead]
    async with database.asking() as observer:
        await observer.execute(select(func.pg_terminate_backend(ahead, 5000)))
    await database.connect_ahead()
    assert await seen() != [ahead]


async def test_what_cannot_connect_ahead_says_so_later(
    database_settings: DatabaseSettingsOf,
) -> None:
    url = make_url(database_settings("gateway").database_url).set(database="none")
    settings = DatabaseSettings(database_url=url.render_as_string(hide_password=False))
    away = Database(settings, "gateway", ManualClock())
    await away.connect_ahead()
    with pytest.raises(DatabaseUnavailable):
        await away.write_at_once(ONE, {})
    await away.stop()
