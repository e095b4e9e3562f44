"""Old rows go, on a real PostgreSQL: by age, by number, a batch at a time, by one process at a
time, and never by one wrong clock.
"""

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Column, Table, delete, func, insert, select, text
from sqlalchemy.dialects import postgresql

from pilotlight.cache.repository import retention as cache_retention
from pilotlight.cache.settings import CacheSettings
from pilotlight.common.clock import ManualClock, SystemClock
from pilotlight.common.db import retention as retention_module
from pilotlight.common.db import tables
from pilotlight.common.db.retention import (
    Keep,
    PruneMetrics,
    Pruner,
    PruneSettings,
    keep_outbox,
    too_old,
)
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.testing import DatabaseSettingsOf, until
from pilotlight.gateway.records.retention import retention as gateway_retention
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.scheduler.repository import retention as scheduler_retention
from pilotlight.scheduler.settings import SchedulerSettings

pytestmark = pytest.mark.anyio

NOW = datetime.now(UTC)
FOR_EVER = {
    "gateway.models",
    "gateway.organizations",
    "gateway.projects",
    "gateway.api_keys",
    "gateway.drains",
    "gateway.files",
    "scheduler.estimates",
    "scheduler.lease",
    "cache.grants",
    "materializer.artifacts",
    "materializer.builds",
    "materializer.profiles",
    "materializer.wants",
}
"""Tables whose rows are deleted by name, or of which there is one for each thing that there is."""


@pytest.fixture
async def database(database_settings: DatabaseSettingsOf) -> AsyncGenerator[Database]:
    database = Database(database_settings("gateway"), "gateway", SystemClock())
    yield database
    async with database.unit_of_work() as work:
        for table in (tables.usage, tables.audit, tables.spans, tables.outboxes["gateway"]):
            await work.connection.execute(delete(table))
    await database.stop()


def pruner(
    database: Database, *rules: Keep, clock: Any = None, registry: CollectorRegistry | None = None
) -> Pruner:
    metrics = PruneMetrics(registry or CollectorRegistry())
    return Pruner(rules, database, clock or SystemClock(), metrics, interval_s=0.01)


async def add_usage(database: Database, *ages_days: float) -> None:
    row = {"model": "m", "key_id": "k", "prompt_tokens": 1, "output_tokens": 1, "status": "ok"}
    async with database.unit_of_work() as work:
        for age in ages_days:
            await work.connection.execute(
                insert(tables.usage).values(
                    at=NOW - timedelta(days=age), request_id=f"{age:g}", **row
                )
            )


async def kept(database: Database, column: Column[Any] = tables.usage.c.request_id) -> list[Any]:
    async with database.reading() as connection:
        return sorted((await connection.execute(select(column))).scalars())


def test_every_table_has_a_rule() -> None:
    """For every table it is said how long its rows are kept."""
    rules = (
        *gateway_retention(GatewaySettings()),
        *scheduler_retention(SchedulerSettings()),
        *cache_retention(CacheSettings()),
        keep_outbox("materializer", PruneSettings()),
    )
    ruled = {rule.at.table.fullname for rule in rules}
    assert ruled | FOR_EVER == {table.fullname for table in tables.metadata.sorted_tables}
    assert not ruled & FOR_EVER


def test_a_rule_finds_its_rows_by_an_index() -> None:
    rules = (
        *gateway_retention(GatewaySettings()),
        *scheduler_retention(SchedulerSettings()),
        *cache_retention(CacheSettings()),
    )
    for rule in rules:
        indexed = {index.columns[0].name for index in rule.at.table.indexes}
        assert rule.at.name in indexed or rule.at.table.name == "outbox", rule.at.table.fullname


async def test_rows_go_when_the_clock_has_moved_on(database: Database) -> None:
    await add_usage(database, 0, 9.9, 10.1, 30)
    rule = Keep(at=tables.usage.c.at, days=10)
    clock = ManualClock(wall=NOW - timedelta(days=25))
    ours = pruner(database, rule, clock=clock)
    assert await ours.prune() == 0
    clock.advance(20 * 24 * 3600)
    assert await ours.prune() == 1
    assert await kept(database) == ["0", "10.1", "9.9"]
    clock.advance(5 * 24 * 3600)
    assert await ours.prune() == 1
    assert await kept(database) == ["0", "9.9"]


async def test_a_clock_that_is_ahead_deletes_nothing_that_is_young(database: Database) -> None:
    await add_usage(database, 0, 5)
    ahead = ManualClock(wall=NOW + timedelta(days=10_000))
    assert await pruner(database, Keep(at=tables.usage.c.at, days=10), clock=ahead).prune() == 0
    assert await kept(database) == ["0", "5"]


@pytest.mark.parametrize("table", [tables.usage, tables.spans], ids=lambda table: table.name)
async def test_what_is_too_old_is_found_by_an_index(database: Database, table: Table) -> None:
    """Not by reading all rows, once a minute, to find none."""
    at = table.c.at if "at" in table.c else table.c.start_at
    old = select(at).where(too_old(Keep(at=at, days=10), NOW)).order_by(at).limit(5)
    told = old.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True})
    async with database.reading() as connection:
        await connection.execute(text("SET LOCAL enable_seqscan = off"))
        plan = "\n".join((await connection.execute(text(f"EXPLAIN {told}"))).scalars())
    assert "Index Cond" in plan


async def test_surplus_rows_go_the_oldest_first_in_batches(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "BATCH_ROWS", 3)
    monkeypatch.setattr(retention_module, "LOOK_BATCHES", 2)
    await add_usage(database, *(float(age) for age in range(20)))
    registry = CollectorRegistry()
    ours = pruner(database, Keep(at=tables.usage.c.at, days=365, max_rows=6), registry=registry)
    assert await ours.prune() == 14
    assert sorted(map(int, await kept(database))) == list(range(6))
    assert (
        registry.get_sample_value(
            "pilotlight_pruned_rows_total", {"table": "gateway.usage", "reason": "count"}
        )
        == 14
    )
    assert await ours.prune() == 0


async def test_a_pass_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "BATCH_ROWS", 2)
    monkeypatch.setattr(retention_module, "LOOK_BATCHES", 3)
    monkeypatch.setattr(retention_module, "MAX_LOOKS", 1)
    await add_usage(database, *(float(100 + age) for age in range(10)))
    ours = pruner(database, Keep(at=tables.usage.c.at, days=10))
    assert [await ours.prune(), await ours.prune(), await ours.prune()] == [6, 4, 0]


async def test_only_rows_that_may_go_go(database: Database) -> None:
    await add_usage(database, 100, 200)
    rule = Keep(at=tables.usage.c.at, days=10, only=tables.usage.c.request_id != "200")
    assert await pruner(database, rule).prune() == 1
    assert await kept(database) == ["200"]


async def test_locks_are_held_for_deletions_alone(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fenced owner's deletions hold others wait for: looking for rows may take long, and
    must hold nothing.
    """
    monkeypatch.setattr(retention_module, "BATCH_ROWS", 2)
    await add_usage(database, 0, 5, 100, 200, 300)
    begun = 0

    def unit_of_work() -> Any:
        nonlocal begun
        begun += 1
        return database.unit_of_work()

    rules = (Keep(at=tables.usage.c.at, days=10, max_rows=2),)
    metrics = PruneMetrics(CollectorRegistry())
    ours = Pruner(
        rules, database, SystemClock(), metrics, interval_s=0.01, unit_of_work=unit_of_work
    )
    assert (await ours.prune(), begun) == (3, 2)
    assert (await ours.prune(), begun) == (0, 2)


async def test_spans_have_a_key_of_two(database: Database) -> None:
    row = {
        "parent_id": "",
        "name": "n",
        "service": "s",
        "end_at": NOW,
        "status": "ok",
        "attributes": {},
    }
    async with database.unit_of_work() as work:
        for number, age in enumerate((0, 0, 2, 3)):
            at = NOW - timedelta(days=age)
            await work.connection.execute(
                insert(tables.spans).values(trace_id="t", span_id=str(number), start_at=at, **row)
            )
    ours = pruner(database, *gateway_retention(GatewaySettings(spans_keep_days=1.0)))
    assert await ours.prune() == 2
    assert await kept(database, tables.spans.c.span_id) == ["0", "1"]


async def test_events_that_nobody_takes_go_at_last(database: Database) -> None:
    async with database.unit_of_work() as work:
        for number, age in enumerate((0, 8)):
            values = {
                "event_id": str(number),
                "kind": "k",
                "entity": "e",
                "data": {},
                "trace_parent": "",
            }
            await work.connection.execute(
                insert(tables.outboxes["gateway"]).values(at=NOW - timedelta(days=age), **values)
            )
    assert await pruner(database, keep_outbox("gateway", PruneSettings())).prune() == 1
    assert await kept(database, tables.outboxes["gateway"].c.event_id) == ["0"]


async def test_one_process_prunes_at_a_time(database: Database) -> None:
    await add_usage(database, 100)
    ours = pruner(database, Keep(at=tables.usage.c.at, days=10))
    async with database.unit_of_work() as work:
        await work.connection.execute(
            select(func.pg_advisory_xact_lock(func.hashtext("prune gateway")))
        )
        assert await ours.prune() == 0
    assert await ours.prune() == 1


async def test_an_owner_prunes_its_own_schema_alone(database_settings: DatabaseSettingsOf) -> None:
    cache = Database(database_settings("cache"), "cache", SystemClock())
    row = {"kind": "copy", "node_id": "n", "reason": "lru", "inputs": {}}
    async with cache.unit_of_work() as work:
        for subject, age in (("long ago", 8), ("just now", 0)):
            await work.connection.execute(
                insert(tables.evictions).values(
                    subject=subject, at=NOW - timedelta(days=age), **row
                )
            )
    assert await pruner(cache, *cache_retention(CacheSettings())).prune() == 1
    assert await kept(cache, tables.evictions.c.subject) == ["just now"]
    await cache.stop()


async def test_pruning_goes_on_after_an_outage(database: Database) -> None:
    """A pass that fails is counted, and the next one comes."""
    await add_usage(database, 100)
    failures = 2

    def unit_of_work() -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise DatabaseUnavailable
        return database.unit_of_work()

    registry = CollectorRegistry()
    rules = (Keep(at=tables.usage.c.at, days=10),)
    ours = Pruner(
        rules,
        database,
        SystemClock(),
        PruneMetrics(registry),
        interval_s=0.01,
        unit_of_work=unit_of_work,
    )
    pruning = asyncio.create_task(ours.prune_for_ever())

    async def empty() -> bool:
        return await kept(database) == []

    try:
        await until(empty)
    finally:
        pruning.cancel()
    assert registry.get_sample_value("pilotlight_prune_failures_total") == 2


@pytest.mark.parametrize(
    "table", [tables.usage, tables.audit, tables.spans], ids=lambda table: table.name
)
def test_defaults_are_long_where_it_is_billed_or_proved(table: Table) -> None:
    days = {rule.at.table.name: rule.days for rule in gateway_retention(GatewaySettings())}
    assert days[table.name] == (1.0 if table is tables.spans else 400.0)
