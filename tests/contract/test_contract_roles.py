"""Each service's role in the database: it writes its own tables, and reads of others what is
listed.
"""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql
from sqlalchemy import Table
from sqlalchemy.engine import make_url

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.roles import READS, role_of
from pilotlight.common.db.session import Database, service_url
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.testing import DatabaseSettingsOf

ALL_TABLES = tuple(tables.metadata.sorted_tables)


@pytest.fixture(scope="module", params=tables.OWNERS)
def as_owner(
    request: pytest.FixtureRequest, database_settings: DatabaseSettingsOf
) -> Iterator[tuple[str, psycopg.Connection]]:
    url = make_url(database_settings(request.param).database_url).set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False)) as connection:
        yield request.param, connection


def refused(connection: psycopg.Connection, statement: sql.Composable) -> bool:
    """Whether a role may not even try; a violated constraint says that it may."""
    try:
        connection.execute(statement)
    except pg.InsufficientPrivilege:
        return True
    except pg.IntegrityError:
        return False
    finally:
        connection.rollback()
    return False


def name_of(table: Table) -> sql.Identifier:
    return sql.Identifier(str(table.schema), table.name)


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.fullname)
def test_only_the_owner_writes(as_owner: tuple[str, psycopg.Connection], table: Table) -> None:
    owner, connection = as_owner
    column = sql.Identifier(next(column.name for column in table.columns if not column.identity))
    writes = {
        "insert": sql.SQL("INSERT INTO {} DEFAULT VALUES").format(name_of(table)),
        "update": sql.SQL("UPDATE {} SET {} = {}").format(name_of(table), column, column),
        "delete": sql.SQL("DELETE FROM {}").format(name_of(table)),
        "lock": sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(name_of(table)),
    }
    for what, statement in writes.items():
        assert refused(connection, statement) == (owner != table.schema), what
    assert refused(connection, sql.SQL("TRUNCATE {}").format(name_of(table)))
    assert refused(connection, sql.SQL("DROP TABLE {}").format(name_of(table)))


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.fullname)
def test_others_read_only_what_is_listed(
    as_owner: tuple[str, psycopg.Connection], table: Table
) -> None:
    owner, connection = as_owner
    may_read = table.schema == owner or table in READS[owner]
    assert refused(connection, sql.SQL("SELECT * FROM {}").format(name_of(table))) == (not may_read)


def test_what_is_listed_is_what_was_agreed() -> None:
    assert {table.fullname for table in READS["scheduler"]} == {
        "gateway.models",
        "gateway.drains",
        "materializer.profiles",
        "cache.grants",
    }
    assert {table.fullname for table in READS["cache"]} == {
        "gateway.models",
        "gateway.drains",
        "scheduler.instances",
        "scheduler.lease",
        "scheduler.estimates",
    }
    assert {table.fullname for table in READS["materializer"]} == {"gateway.models"}
    assert {table.schema for table in READS["gateway"]} == {"scheduler", "cache", "materializer"}


@pytest.mark.parametrize("schema", [*tables.OWNERS, "public"])
def test_nobody_makes_tables(as_owner: tuple[str, psycopg.Connection], schema: str) -> None:
    _, connection = as_owner
    assert refused(
        connection, sql.SQL("CREATE TABLE {} (x int)").format(sql.Identifier(schema, "mine"))
    )


def test_nobody_becomes_another(as_owner: tuple[str, psycopg.Connection]) -> None:
    owner, connection = as_owner
    for other in {*(role_of(name) for name in tables.OWNERS), "pilotlight"} - {role_of(owner)}:
        assert refused(connection, sql.SQL("SET ROLE {}").format(sql.Identifier(other)))
    assert refused(connection, sql.SQL("CREATE ROLE another"))
    assert refused(connection, sql.SQL("CREATE SCHEMA another"))


@pytest.mark.anyio
async def test_a_role_needs_its_password(
    database_settings: DatabaseSettingsOf, tmp_path: Path
) -> None:
    url = make_url(database_settings("gateway").database_url)
    for wrong in (url.set(password="wrong"), url.set(username=role_of("cache"))):
        settings = DatabaseSettings(
            database_url=wrong.render_as_string(hide_password=False), secrets_dir=tmp_path
        )
        database = Database(settings, "gateway", ManualClock())
        with pytest.raises(DatabaseUnavailable, match="password"):
            await database.start()
        await database.stop()


def test_the_role_and_its_secret_are_filled_in(tmp_path: Path) -> None:
    (tmp_path / "postgres-cache").write_text("of the cache\n")
    url = service_url(
        DatabaseSettings(database_url="postgresql://host/db", secrets_dir=tmp_path), "cache"
    )
    assert (url.username, url.password) == ("pilotlight_cache", "of the cache")
    url = service_url(
        DatabaseSettings(database_url="postgresql://me:mine@host/db", secrets_dir=tmp_path), "cache"
    )
    assert (url.username, url.password) == ("me", "mine")
