"""Usage: one row a finished request, written in batches off the request's path."""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime

import structlog
from sqlalchemy import JSON, bindparam, column, func, insert, select
from sqlalchemy.sql import Insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause

log = structlog.get_logger()

FLUSH_INTERVAL_S = 1.0
MAX_BATCH_ROWS = 1000
"""Rows of one transaction: what an outage leaves behind must not be too much for one."""
MAX_BUFFERED_ROWS = 50_000
"""About ten minutes of a busy gateway without a database; beyond it the oldest rows are dropped,
and that is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One finished request."""

    at: datetime
    model: str
    key_id: str
    request_id: str
    prompt_tokens: int
    output_tokens: int
    status: str


class UsageRepository:
    """Finished requests."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, rows: Sequence[UsageRow], *, writer: int, in_doubt: bool = False) -> None:
        """Insert a batch.

        ``writer`` is the recorder's own number: its transactions come one after the other, so that
        an ``in_doubt`` batch, which an earlier try may have committed before its answer was lost,
        waits for the end of that try and then adds only what is missing.
        """
        async with self._database.unit_of_work() as work:
            await work.connection.execute(select(func.pg_advisory_xact_lock(writer)))
            if in_doubt:
                rows = await _missing(work, rows)
            if not rows:
                return
            await work.connection.execute(_INSERT, {"rows": rows})


def _insert() -> Insert:
    """One statement for all rows, which go there as one document: a statement for each, or arrays
    of each column, cost more than everything else that is done for a request's record.
    """
    columns = [tables.usage.c[each.name] for each in fields(UsageRow)]
    given = func.json_to_recordset(bindparam("rows", type_=JSON))
    rows = given.table_valued(*(column(each.name, each.type) for each in columns))
    return insert(tables.usage).from_select(columns, select(rows.render_derived(with_types=True)))


_INSERT = _insert()


async def _missing(work: UnitOfWork, rows: Sequence[UsageRow]) -> list[UsageRow]:
    table = tables.usage
    known = select(table.c.request_id).where(
        table.c.at >= min(row.at for row in rows),
        table.c.request_id.in_([row.request_id for row in rows]),
    )
    written = set((await work.connection.execute(known)).scalars())
    return [row for row in rows if row.request_id not in written]


class UsageRecorder:
    """Collects rows and writes them, each once; rows outlive an outage of the database up to the
    buffer's bound.
    """

    def __init__(self, database: Database, clock: Clock, background: Background) -> None:
        self._repository = UsageRepository(database)
        self._clock = clock
        self._background = background
        self._rows: deque[UsageRow] = deque()
        self._dropped = 0
        self._writer = random.SystemRandom().getrandbits(62)
        self._in_doubt = False
        """The first batch was tried before, and may have been written."""
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to write."""
        if self._task is None:
            self._task = self._background.spawn("usage", self._run())

    async def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            # A batch that is being written is not cut off: its rows would be nowhere.
            async with self._writing:
                self._task.cancel()
            await cancel_all((self._task,))
            self._task = None
        await self._flush()

    def record(
        self,
        *,
        model: str,
        key_id: str,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        status: str,
    ) -> None:
        """As ``UsageSink.record``."""
        self._rows.append(
            UsageRow(
                at=self._clock.wall(),
                model=model,
                key_id=key_id,
                request_id=request_id,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                status=status,
            )
        )
        self._keep_within_bound()

    async def _run(self) -> None:
        while True:
            await pause(FLUSH_INTERVAL_S)
            await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            while self._rows:
                batch = [self._rows.popleft() for _ in range(min(len(self._rows), MAX_BATCH_ROWS))]
                try:
                    await self._repository.add(batch, writer=self._writer, in_doubt=self._in_doubt)
                    self._in_doubt = False
                except DatabaseUnavailable as error:
                    self._in_doubt = True
                    self._rows.extendleft(reversed(batch))
                    self._keep_within_bound()
                    log.warning(
                        "usage is kept until the database is back",
                        action="usage_deferred",
                        rows=len(self._rows),
                        error=error.message,
                    )
                    return
            if self._dropped:
                log.error("usage rows were lost", action="usage_dropped", rows=self._dropped)
                self._dropped = 0

    def _keep_within_bound(self) -> None:
        while len(self._rows) > MAX_BUFFERED_ROWS:
            self._rows.popleft()
            self._dropped += 1
