"""Usage: one row a finished request, written in batches off the request's path.

What is not written yet stands in a journal, by which another gateway writes it when this one is
killed (``usage_journal``).
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from sqlalchemy import JSON, bindparam, column, func, insert, select
from sqlalchemy.sql import Insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause
from pilotlight.gateway.records.usage_journal import Meter, UsageJournal, UsageRow, left_behind

log = structlog.get_logger()

FLUSH_INTERVAL_S = 1.0
TAKE_OVER_INTERVAL_S = 30.0
"""Between looks for what killed gateways left behind."""
IDLE_S = 5.0
"""Of a transaction, until the database ends it: part of the time after which ``limits.budgets``
takes its rows for settled."""
MAX_BATCH_ROWS = 1000
"""Rows of one transaction: what an outage leaves behind must not be too much for one."""
MAX_BUFFERED_ROWS = 50_000
"""About ten minutes of a busy gateway without a database; beyond it the oldest rows are dropped,
and that is logged."""


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
        # As ``idle_s``, in the statement that locks: each one is a round trip.
        idle = func.set_config(
            "idle_in_transaction_session_timeout", str(round(IDLE_S * 1000)), True
        )
        async with self._database.unit_of_work() as work:
            await work.connection.execute(select(func.pg_advisory_xact_lock(writer), idle))
            if in_doubt:
                rows = await _missing(work, rows)
            if not rows:
                return
            await work.connection.execute(_INSERT, {"rows": rows})


def _insert() -> Insert:
    """One statement for all rows, which go there as one document: a statement for each, or arrays
    of each column, cost more than everything else that is done for a request's record.
    """
    columns = [tables.usage.c[name] for name in UsageRow.__struct_fields__]
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


class _Noted(NamedTuple):
    """A row, and where it stands until it is written."""

    row: UsageRow
    meter: Meter | None


class UsageRecorder:
    """Collects rows and writes them, each once; rows outlive an outage of the database up to the
    buffer's bound, and this process, where there is a folder for them.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        background: Background,
        *,
        folder: Path | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
            database: takes the rows.
            clock: gives their times.
            background: owns the task that writes.
            folder: for the journal, shared with other gateways of this machine; None: there is
                none.
        """
        self._repository = UsageRepository(database)
        self._clock = clock
        self._background = background
        self._rows: deque[_Noted] = deque()
        self._dropped = 0
        self._writer = random.SystemRandom().getrandbits(62)
        self._in_doubt = False
        """The first batch was tried before, and may have been written."""
        self._writing = asyncio.Lock()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._folder = folder
        self._journal: UsageJournal | None = None

    async def start(self) -> None:
        """Begin to write."""
        if self._tasks:
            return
        self._tasks = (self._background.spawn("usage", self._run()),)
        if self._folder is None:
            return
        try:
            self._journal = UsageJournal(self._folder, self._writer)
        except OSError as error:
            log.error(
                "usage has no journal: what is not written is lost when this process is killed",
                action="usage_journal_failed",
                error=str(error),
            )
            return
        taking_over = self._background.spawn("usage left behind", self._take_over_for_ever())
        self._tasks = (*self._tasks, taking_over)

    async def stop(self) -> None:
        """Write what is left."""
        if self._tasks:
            # A batch that is being written is not cut off: its rows would be nowhere.
            async with self._writing:
                for task in self._tasks:
                    task.cancel()
            await cancel_all(self._tasks)
            self._tasks = ()
        while await self._flush() and self._rows:
            pass
        journal, self._journal = self._journal, None
        if journal is not None:
            # What could not be written is the next gateway's.
            self._rows = deque(_Noted(noted.row, None) for noted in self._rows)
            journal.close()

    def meter(
        self, *, model: str, key_id: str, request_id: str, prompt_tokens: int
    ) -> Meter | None:
        """As ``UsageSink.meter``."""
        if self._journal is None:
            return None
        return self._journal.begin(
            self._clock.wall(),
            model=model,
            key_id=key_id,
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            streamed=True,
        )

    def record(
        self,
        *,
        model: str,
        key_id: str,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        status: str,
        device_s: float = 0.0,
        meter: Meter | None = None,
    ) -> None:
        """As ``UsageSink.record``."""
        row = UsageRow(
            at=self._clock.wall(),
            model=model,
            key_id=key_id,
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            status=status,
            device_s=device_s,
        )
        if meter is not None:
            meter.ended(row)
        elif self._journal is not None:
            meter = self._journal.note(row)
        self._rows.append(_Noted(row, meter))
        self._keep_within_bound()

    async def _run(self) -> None:
        while True:
            await pause(FLUSH_INTERVAL_S)
            await self._flush()

    async def _flush(self) -> bool:
        """Write what is there now; False: the database does not take it.

        What comes meanwhile waits for the next time: a busy gateway would otherwise write all the
        time, a few rows with each transaction.
        """
        async with self._writing:
            left = len(self._rows)
            while left and self._rows:
                size = min(left, len(self._rows), MAX_BATCH_ROWS)
                left -= size
                batch = [self._rows.popleft() for _ in range(size)]
                rows = [noted.row for noted in batch]
                try:
                    await self._repository.add(rows, writer=self._writer, in_doubt=self._in_doubt)
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
                    return False
                for noted in batch:
                    _written(noted)
            if self._dropped:
                log.error("usage rows were lost", action="usage_dropped", rows=self._dropped)
                self._dropped = 0
        return True

    def _keep_within_bound(self) -> None:
        while len(self._rows) > MAX_BUFFERED_ROWS:
            _written(self._rows.popleft())
            self._dropped += 1

    async def _take_over_for_ever(self) -> None:
        while True:
            await self._take_over()
            await pause(TAKE_OVER_INTERVAL_S)

    async def _take_over(self) -> None:
        """Write what killed gateways have not written."""
        assert self._folder is not None
        for left in left_behind(self._folder):
            try:
                for start in range(0, len(left.rows), MAX_BATCH_ROWS):
                    # Of each row it may be that the other had written it.
                    rows = left.rows[start : start + MAX_BATCH_ROWS]
                    await self._repository.add(rows, writer=left.writer, in_doubt=True)
            except DatabaseUnavailable:
                left.leave()
                return
            except asyncio.CancelledError:
                left.leave()
                raise
            left.done()
            log.warning(
                "usage of a gateway that was killed is written",
                action="usage_taken_over",
                rows=len(left.rows),
            )


def _written(noted: _Noted) -> None:
    if noted.meter is not None:
        noted.meter.written()
