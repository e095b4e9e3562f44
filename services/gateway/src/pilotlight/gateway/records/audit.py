"""The audit log: what administrators did, and what they tried in vain.

What succeeds is recorded within its own transaction: there is no action without its record, and no
record of what was rolled back. What another service does is recorded before it is asked for, and
again when its answer is there. What was refused is recorded a moment later, and only a limited
number in a minute: a client without a key must not fill the log.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy import desc, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause

log = structlog.get_logger()

OK = "ok"
ASKED = "asked"
"""Outcome of what was asked for and has not been answered, as far as this gateway came to know."""
FLUSH_INTERVAL_S = 0.5
RECORDED_PER_MINUTE = 60
"""Refused attempts that one gateway records; the rest is counted, in one row a minute."""
MAX_WAITING = 2 * RECORDED_PER_MINUTE
"""Records that wait for a database that is away."""
MAX_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who does something, and from where."""

    principal: str
    """The key's label."""
    key_id: str = ""
    request_id: str = ""
    trace_id: str = ""
    remote: str = ""


SYSTEM = Actor(principal="system")
"""The gateway itself, as when it puts the keys of its settings in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which records to show."""

    action: str | None = None
    entity: str | None = None
    outcome: str | None = None
    key_id: str | None = None
    before_id: int | None = None
    since: datetime | None = None
    until: datetime | None = None


async def record(
    work: UnitOfWork,
    clock: Clock,
    actor: Actor,
    action: str,
    entity: str,
    changes: Mapping[str, Any],
) -> None:
    """Record what is done in the same transaction.

    Args:
        work: the transaction.
        clock: tells when.
        actor: the key, and the address that it came from.
        action: what is done, such as ``model_register``.
        entity: what it is done to.
        changes: JSON, without secrets.
    """
    await _insert(work.connection, _row(clock.wall(), actor, action, entity, OK, 200, changes))


class AuditLog:
    """Writes what is not part of a transaction, and reads; a component."""

    def __init__(
        self, database: Database, clock: Clock, background: Background, registry: CollectorRegistry
    ) -> None:
        self._database = database
        self._clock = clock
        self._background = background
        self._waiting: deque[dict[str, Any]] = deque()
        self._minute_began_s = clock.monotonic_s()
        self._in_minute = 0
        self._unrecorded = 0
        self._task: asyncio.Task[None] | None = None
        self._refused = Counter(
            "pilotlight_admin_refusals",
            "Refused attempts to change something.",
            ["code"],
            registry=registry,
        )

    async def start(self) -> None:
        """Write from now on."""
        if self._task is None:
            self._task = self._background.spawn("audit log", self._write_for_ever())

    async def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None
        self._sum_up()
        await self._flush()

    def refused(self, actor: Actor, action: str, entity: str, code: str, status: int) -> None:
        """Note an attempt that changed nothing.

        Args:
            actor: the key, and the address that it came from.
            action: what was asked for.
            entity: what it would have been done to.
            code: of the error that refused it.
            status: of HTTP.
        """
        self._refused.labels(code=code).inc()
        if self._clock.monotonic_s() - self._minute_began_s >= 60.0:
            self._sum_up()
        if self._in_minute >= RECORDED_PER_MINUTE:
            self._unrecorded += 1
            return
        self._in_minute += 1
        self._make_room()
        self._waiting.append(_row(self._clock.wall(), actor, action, entity, code, status, {}))

    @asynccontextmanager
    async def asked(self, actor: Actor, action: str, entity: str) -> AsyncGenerator[dict[str, Any]]:
        """Around what another service is asked to do; what the body puts into the mapping is what
        changed.

        When the body raises, the record stays as ``asked``, and the refusal gets one of its own.

        Raises:
            DatabaseUnavailable: nothing was asked for; or it was done, and its record says
                ``asked``.
        """
        async with self._database.unit_of_work() as work:
            record_id = await _insert(
                work.connection, _row(self._clock.wall(), actor, action, entity, ASKED, 202, {})
            )
        changes: dict[str, Any] = {}
        yield changes
        done = (
            update(tables.audit)
            .where(tables.audit.c.id == record_id)
            .values(outcome=OK, changes=changes)
        )
        async with self._database.unit_of_work() as work:
            await work.connection.execute(done)

    async def page(self, wanted: AuditFilter, limit: int) -> list[dict[str, Any]]:
        """Records, the newest first.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        table = tables.audit
        conditions = [
            table.c[name] == value
            for name, value in (
                ("action", wanted.action),
                ("entity", wanted.entity),
                ("outcome", wanted.outcome),
                ("key_id", wanted.key_id),
            )
            if value is not None
        ]
        conditions += [table.c.id < wanted.before_id] if wanted.before_id is not None else []
        conditions += [table.c.at >= wanted.since] if wanted.since is not None else []
        conditions += [table.c.at < wanted.until] if wanted.until is not None else []
        async with self._database.reading() as connection:
            rows = await connection.execute(
                select(table).where(*conditions).order_by(desc(table.c.id)).limit(limit)
            )
            return [{**row, "at": row["at"].isoformat()} for row in rows.mappings()]

    async def _write_for_ever(self) -> None:
        while True:
            await pause(FLUSH_INTERVAL_S)
            if self._clock.monotonic_s() - self._minute_began_s >= 60.0:
                self._sum_up()
            await self._flush()

    def _sum_up(self) -> None:
        """A minute is over: say how many were not recorded one by one."""
        self._in_minute, self._minute_began_s = 0, self._clock.monotonic_s()
        if self._unrecorded:
            self._make_room()
            unrecorded, self._unrecorded = self._unrecorded, 0
            log.warning(
                "refused attempts are not recorded one by one",
                action="audit_flooded",
                attempts=unrecorded,
            )
            self._waiting.append(
                _row(
                    self._clock.wall(),
                    SYSTEM,
                    "refusals_not_recorded",
                    "",
                    "flooded",
                    429,
                    {"attempts": unrecorded},
                )
            )

    def _make_room(self) -> None:
        """The database may be away for long: the oldest attempts then go, and are counted with
        those that are not recorded.
        """
        if len(self._waiting) == MAX_WAITING:
            self._unrecorded += self._waiting.popleft()["changes"].get("attempts", 1)

    async def _flush(self) -> None:
        rows = list(self._waiting)
        if not rows:
            return
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(insert(tables.audit), rows)
        except DatabaseUnavailable as error:
            log.warning(
                "refused attempts are recorded later",
                action="audit_deferred",
                rows=len(rows),
                error=error.message,
            )
            return
        for row in rows:
            if self._waiting and self._waiting[0] is row:
                self._waiting.popleft()


async def _insert(connection: AsyncConnection, row: Mapping[str, Any]) -> int:
    return int(
        (
            await connection.execute(
                insert(tables.audit).values(**row).returning(tables.audit.c.id)
            )
        ).scalar_one()
    )


def _row(
    at: datetime,
    actor: Actor,
    action: str,
    entity: str,
    outcome: str,
    status: int,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    texts = {
        "key_id": actor.key_id,
        "principal": actor.principal,
        "action": action,
        "entity": entity,
        "outcome": outcome,
        "request_id": actor.request_id,
        "trace_id": actor.trace_id,
        "remote": actor.remote,
    }
    # PostgreSQL takes no NUL in a text, and what was refused may hold anything.
    stored = {name: text.replace("\0", "")[:MAX_TEXT_CHARS] for name, text in texts.items()}
    return {**stored, "at": at, "status": status, "changes": dict(changes)}
