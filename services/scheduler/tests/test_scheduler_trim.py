"""Records of what has ended are kept for a week, those of what lives for ever."""

from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Table, delete, insert, select, update

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.retention import PruneMetrics, Pruner
from pilotlight.common.db.session import Database
from pilotlight.common.errors import NotLeader
from pilotlight.common.settings import DatabaseSettings
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler.lease import Fence, Lease
from pilotlight.scheduler.repository import retention
from pilotlight.scheduler.settings import SchedulerSettings

pytestmark = pytest.mark.anyio

NOW = datetime.now(UTC)
OLD = NOW - timedelta(days=SchedulerSettings().instances_keep_days, minutes=1)


@pytest.fixture
async def database(
    database_settings: Callable[[str], DatabaseSettings],
) -> AsyncGenerator[Database]:
    database = Database(database_settings("scheduler"), "scheduler", SystemClock())
    await database.start()
    yield database
    async with database.unit_of_work() as work:
        for table in (tables.instances, tables.decisions, tables.cold_starts):
            await work.connection.execute(delete(table))
    await database.stop()


async def add(database: Database, name: str, at: datetime, *, state: str, status: str) -> None:
    rows: dict[Table, dict[str, Any]] = {
        tables.instances: {
            "instance_id": name,
            "model": "m",
            "digest": "d",
            "state": state,
            "generation": 1,
            "epoch": 1,
            "body": {"decision_id": f"dec-{name}"},
            "created_at": at,
            "updated_at": at,
        },
        tables.decisions: {
            "decision_id": f"dec-{name}",
            "kind": "cold_start",
            "model": "m",
            "epoch": 1,
            "at": at,
            "inputs": {},
            "outcome": {},
            "reasons": [],
        },
        tables.cold_starts: {
            "instance_id": name,
            "model": "m",
            "decision_id": f"dec-{name}",
            "trace_id": "",
            "status": status,
            "demand_seen_at": at,
            "phases": [],
            "created_at": at,
        },
    }
    async with database.unit_of_work() as work:
        for table, row in rows.items():
            await work.connection.execute(insert(table).values(**row))


def pruner_of(database: Database, fence: Fence) -> Pruner:
    metrics = PruneMetrics(CollectorRegistry())
    rules = retention(SchedulerSettings())
    return Pruner(
        rules, database, SystemClock(), metrics, interval_s=60.0, unit_of_work=fence.unit_of_work
    )


async def test_what_ended_long_ago_goes(database: Database) -> None:
    await add(database, "serving", OLD, state="ready", status="done")
    await add(database, "starting", OLD, state="loading", status="open")
    await add(database, "gone-long-ago", OLD, state="gone", status="done")
    await add(database, "failed-long-ago", OLD, state="failed", status="abandoned")
    await add(database, "gone-just-now", NOW, state="gone", status="done")
    lease = Lease(database, "leader")
    epoch = await lease.take(Epoch(1))
    assert epoch is not None
    fence = Fence(database, "leader", epoch)
    pruner = pruner_of(database, fence)
    await pruner.prune()

    async def kept(column: Any) -> set[str]:
        async with database.reading() as connection:
            return set((await connection.execute(select(column))).scalars())

    living = {"serving", "starting", "gone-just-now"}
    assert await kept(tables.instances.c.instance_id) == living
    assert await kept(tables.decisions.c.decision_id) == {f"dec-{name}" for name in living}
    assert await kept(tables.cold_starts.c.instance_id) == {"starting", "gone-just-now"}


async def test_an_instance_that_names_no_decision_keeps_none(database: Database) -> None:
    await add(database, "serving", OLD, state="ready", status="done")
    async with database.unit_of_work() as work:
        await work.connection.execute(update(tables.instances).values(body={}))
    epoch = await Lease(database, "leader").take(Epoch(1))
    assert epoch is not None
    await pruner_of(database, Fence(database, "leader", epoch)).prune()
    async with database.reading() as connection:
        assert (await connection.execute(select(tables.decisions.c.decision_id))).all() == []


async def test_a_term_that_is_over_deletes_nothing(database: Database) -> None:
    await add(database, "gone-long-ago", OLD, state="gone", status="done")
    lease = Lease(database, "leader")
    epoch = await lease.take(Epoch(1))
    assert epoch is not None
    fence = Fence(database, "leader", Epoch(epoch - 1))
    pruner = pruner_of(database, fence)
    with pytest.raises(NotLeader):
        await pruner.prune()
