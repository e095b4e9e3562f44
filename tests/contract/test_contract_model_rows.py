"""Listing models reads what changed, and nothing is missed whatever clocks say."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import delete, insert, text, update

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.model_rows import ModelRows
from pilotlight.common.db.session import Database
from pilotlight.common.testing import DatabaseSettingsOf

pytestmark = pytest.mark.anyio

THEN = datetime(2026, 1, 1, tzinfo=UTC)
"""All rows are of one time: a list that went by it would miss every change."""


def row(name: str, digest: str = "d") -> dict[str, object]:
    return {
        "name": name,
        "digest": digest,
        "body": {"name": name},
        "created_at": THEN,
        "updated_at": THEN,
    }


@pytest.fixture
async def database(database_settings: DatabaseSettingsOf, anyio_backend: str):
    database = Database(database_settings("gateway"), "gateway", ManualClock())
    await database.start()
    yield database
    await database.stop()


async def test_only_what_changed_is_read(database: Database) -> None:
    made = list[str]()

    def of(found) -> str:
        made.append(found["name"])
        return f"{found['name']}:{found['digest']}"

    rows = ModelRows(of)

    async def listed() -> tuple[str, ...]:
        async with database.reading() as connection:
            return await rows.read(connection)

    async def change(*statements) -> None:
        async with database.unit_of_work() as work:
            for statement in statements:
                await work.connection.execute(statement)

    models = tables.models
    assert await listed() == ()
    await change(insert(models).values([row("b"), row("a"), row("c")]))
    first = await listed()
    assert first == ("a:d", "b:d", "c:d")
    assert await listed() is first
    assert sorted(made) == ["a", "b", "c"]
    await change(update(models).where(models.c.name == "b").values(digest="e"))
    assert await listed() == ("a:d", "b:e", "c:d")
    assert made[3:] == ["b"]
    # As many rows as before, of the same time.
    await change(delete(models).where(models.c.name == "a"), insert(models).values(row("d")))
    assert await listed() == ("b:e", "c:d", "d:d")
    assert made[4:] == ["d"]
    await change(update(models).where(models.c.name == "c").values(digest="d"))
    assert await listed() == ("b:e", "c:d", "d:d")
    assert made[5:] == ["c"], "it was written, though nothing is another"
    await change(text("DELETE FROM gateway.models"))
    assert await listed() == ()
