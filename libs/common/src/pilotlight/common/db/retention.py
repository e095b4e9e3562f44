"""Old rows go: each owner of a schema prunes its own tables, by age and by number, a bounded batch
at a time.

A row is old when both the database's clock and this process's say so: one clock that was set wrong
deletes nothing. Of several processes of one owner one prunes at a time; the others find its lock
and leave it alone.

What is to go is looked for without any lock, however long that takes, and then deleted by its keys:
the scheduler's deletions hold its lease's row, and a renewal of the lease waits for them.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from prometheus_client import CollectorRegistry, Counter
from pydantic import Field
from sqlalchemy import (
    Column,
    ColumnElement,
    DateTime,
    delete,
    func,
    literal,
    select,
    text,
    true,
    tuple_,
)

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.settings import PilotlightSettings
from pilotlight.common.waiting import cancel_all, pause

log = structlog.get_logger()

BATCH_ROWS = 500
"""Rows of one deletion: its locks must be held for a moment only, however much there is to delete.
"""
LOOK_BATCHES = 20
"""Of which the keys are looked for at a time."""
MAX_LOOKS = 20
"""For one table in one pass; what is left over waits for the next."""
BETWEEN_BATCHES_S = 0.01


class PruneSettings(PilotlightSettings):
    """When old rows are looked for, and how long events wait for a NATS that does not take them."""

    prune_interval_s: float = Field(
        default=60.0,
        gt=0,
        description="About how often each owner looks for rows that are too old, or too many.",
    )
    outbox_keep_days: float = Field(
        default=7.0,
        gt=0,
        description="Days for which an event that NATS does not take is kept: as long as the stream would keep it.",
    )
    outbox_max_rows: int = Field(
        default=100_000, ge=0, description="Events that wait at most, the newest; 0: no limit."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How long the rows of one table are kept."""

    at: Column[object]
    """When a row was made, or last changed; indexed where there may be many rows."""
    days: float
    max_rows: int = 0
    """The newest that are kept; 0: no limit."""
    only: ColumnElement[bool] | None = None
    """Rows that may go at all, and always may unless ``at`` changes; without it every one may."""


def keep_outbox(schema: str, settings: PruneSettings) -> Keep:
    """The rule for a schema's outbox."""
    return Keep(
        at=tables.outboxes[schema].c.at,
        days=settings.outbox_keep_days,
        max_rows=settings.outbox_max_rows,
    )


class PruneMetrics:
    """What pruning counts; one for each process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rows = Counter(
            "pilotlight_pruned_rows",
            "Rows deleted because they were too old, or too many.",
            ["table", "reason"],
            registry=registry,
        )
        self.failures = Counter(
            "pilotlight_prune_failures", "Passes that the database cut short.", registry=registry
        )


UnitsOfWork = Callable[[], AbstractAsyncContextManager[UnitOfWork]]


class Pruner:
    """Prunes some tables of one schema; a component, for owners whose processes are all alike."""

    def __init__(
        self,
        rules: Sequence[Keep],
        database: Database,
        clock: Clock,
        metrics: PruneMetrics,
        *,
        interval_s: float,
        unit_of_work: UnitsOfWork | None = None,
        background: Background | None = None,
    ) -> None:
        """Make it; nothing is deleted yet.

        Args:
            rules: which rows of which tables are kept, and for how long.
            database: of the schema's owner.
            clock: for the age of rows.
            metrics: count what was deleted, and why.
            interval_s: between two passes, in seconds.
            unit_of_work: for owners whose writes are fenced; None: the database's own.
            background: owns the task; needed by ``start`` alone.
        """
        self._rules = tuple(rules)
        self._database = database
        self._unit_of_work = unit_of_work or database.unit_of_work
        self._clock = clock
        self._metrics = metrics
        self._interval_s = interval_s
        self._background = background
        self._rng = random.Random()
        self._task: asyncio.Task[None] | None = None
        for rule in self._rules:
            # Shown from the start: an alert sees the first deletion only when there was a 0 before
            # it.
            for reason in ("age", "count"):
                metrics.rows.labels(table=rule.at.table.fullname, reason=reason)

    async def start(self) -> None:
        """Prune from now on."""
        if self._task is None and self._background is not None:
            self._task = self._background.spawn("prune old rows", self.prune_for_ever())

    async def stop(self) -> None:
        """Prune no more."""
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None

    async def prune_for_ever(self) -> None:
        """One pass after the other, with jitter: processes that started together do not prune
        together.

        Raises:
            PilotlightError: what the unit of work raises beside ``DatabaseUnavailable``.
        """
        while True:
            await pause(self._interval_s * self._rng.uniform(0.5, 1.5))
            try:
                await self.prune()
            except DatabaseUnavailable as error:
                self._metrics.failures.inc()
                log.warning(
                    "old rows are kept a little longer",
                    action="prune_deferred",
                    error=error.message,
                )

    async def prune(self) -> int:
        """One pass; rows deleted.

        Raises:
            DatabaseUnavailable: some of what is too old is still there.
        """
        return sum([await self._prune_table(rule) for rule in self._rules])

    async def _prune_table(self, rule: Keep) -> int:
        by_age = await self._delete(rule, "age", too_old(rule, self._clock.wall()))
        last = await self._last_kept(rule)
        return (
            by_age
            if last is None
            else by_age
            + await self._delete(rule, "count", rule.at <= literal(last, DateTime(timezone=True)))
        )

    async def _delete(self, rule: Keep, reason: str, surplus: ColumnElement[bool]) -> int:
        table = rule.at.table
        gone = await self._delete_batches(rule, reason, surplus)
        if gone:
            tell = log.warning if table is tables.outboxes[str(table.schema)] else log.info
            tell(
                "old rows deleted",
                action="rows_pruned",
                table=table.fullname,
                rows=gone,
                reason=reason,
            )
        return gone

    async def _delete_batches(self, rule: Keep, reason: str, surplus: ColumnElement[bool]) -> int:
        table = rule.at.table
        key = tuple_(*table.primary_key.columns)
        wanted = select(*table.primary_key.columns).where(surplus, _may_go(rule)).order_by(rule.at)
        look_rows = LOOK_BATCHES * BATCH_ROWS
        gone = 0
        for _ in range(MAX_LOOKS):
            async with self._database.reading() as connection:
                keys = [tuple(row) for row in await connection.execute(wanted.limit(look_rows))]
            for first in range(0, len(keys), BATCH_ROWS):
                # A row that was changed since is judged anew by its time.
                some = delete(table).where(key.in_(keys[first : first + BATCH_ROWS]), surplus)
                async with self._unit_of_work() as work:
                    if not await _alone(work, str(table.schema)):
                        return gone
                    deleted = (await work.connection.execute(some)).rowcount
                self._metrics.rows.labels(table=table.fullname, reason=reason).inc(deleted)
                gone += deleted
                await pause(BETWEEN_BATCHES_S)
            if len(keys) < look_rows:
                break
        return gone

    async def _last_kept(self, rule: Keep) -> object | None:
        """The time of the newest row that is one too many; None when there are not too many."""
        if rule.max_rows == 0:
            return None
        table = rule.at.table
        about = text("SELECT reltuples FROM pg_class WHERE oid = to_regclass(:name)")
        newest = (
            select(rule.at)
            .where(_may_go(rule))
            .order_by(rule.at.desc())
            .offset(rule.max_rows)
            .limit(1)
        )
        async with self._database.reading() as connection:
            rows = (await connection.execute(about, {"name": table.fullname})).scalar_one_or_none()
            # Counting reads as many entries of the index as may be kept: not when there are far
            # fewer by the planner's estimate.
            if rows is not None and 0 <= rows < rule.max_rows / 2:
                return None
            return (await connection.execute(newest)).scalar_one_or_none()


def too_old(rule: Keep, wall: datetime) -> ColumnElement[bool]:
    """Whether a row is, by the database's clock and by this process's: rows are told by their
    writers' wall clocks, and one of the two that judge may be wrong.

    The database's is that of the transaction's begin: by one that goes on within a statement
    (``clock_timestamp``), no index is searched, and every row is read for it each minute.

    Args:
        rule: the row's table, and how long its rows are kept.
        wall: this process's clock.
    """
    now = func.least(func.now(), literal(wall, DateTime(timezone=True)))
    return rule.at < now - timedelta(days=rule.days)


def _may_go(rule: Keep) -> ColumnElement[bool]:
    return true() if rule.only is None else rule.only


async def _alone(work: UnitOfWork, schema: str) -> bool:
    """Whether no other process prunes this schema at the moment; none does until this transaction
    has ended.
    """
    lock = select(func.pg_try_advisory_xact_lock(func.hashtext(f"prune {schema}")))
    return bool((await work.connection.execute(lock)).scalar_one())
