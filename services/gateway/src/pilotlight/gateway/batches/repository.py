"""Batches in PostgreSQL: rows of ``gateway.batches`` and ``gateway.batch_lines``.

One gateway works on a batch at a time: it holds a lease, by the database's clock, and every write
of its work says so in its condition. A line's result is a row of its own, whose key is the line: it
is there once, whoever worked on it, and a batch that goes on elsewhere goes on behind it.

::

    validating ──> in_progress ──> completed
        │              │  └──────> expired
        │              v
        └─> failed  cancelling ──> cancelled
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import Conflict, NotFound, QueueFull
from pilotlight.common.ids import new_batch_id
from pilotlight.gateway.batches.files import page, row_of
from pilotlight.gateway.schema.batches import (
    ENDED,
    OPEN,
    Batch,
    BatchRequest,
    BatchStatus,
    File,
    FileErrors,
    RequestCounts,
)

WINDOW = timedelta(hours=24)
LEASE = timedelta(seconds=30)
RETRY_AFTER_S = 60.0


class LeaseLost(Exception):
    """Another gateway works on the batch now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A batch that this gateway holds the lease of."""

    batch_id: str
    key_id: str
    status: BatchStatus
    request: BatchRequest
    expired: bool
    """Its time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What became of one line."""

    number: int
    """In the file, from 0."""
    succeeded: bool
    body: bytes
    """A ``LineResult``."""


@dataclass(frozen=True, slots=True)
class BatchRepository:
    """Batches by the key that owns them, and for the gateway that works on them."""

    database: Database
    clock: Clock
    owner: str
    """This gateway."""
    max_open_per_key: int

    # For clients.

    async def create(self, key_id: str, request: BatchRequest) -> Batch:
        """Accept a batch.

        Raises:
            QueueFull: the key has as many that have not ended as it may.
            DatabaseUnavailable: not now.
        """
        rows = tables.batches
        now = self.clock.wall()
        open_rows = (
            select(func.count())
            .select_from(rows)
            .where(rows.c.key_id == key_id, rows.c.status.in_(OPEN))
        )
        batch_id = new_batch_id()
        async with self.database.unit_of_work() as work:
            held = (await work.connection.execute(open_rows)).scalar_one()
            if held >= self.max_open_per_key:
                raise QueueFull(
                    f"this key has {held} batches that have not ended, of {self.max_open_per_key} at most",
                    retry_after_s=RETRY_AFTER_S,
                )
            made = insert(rows).values(
                batch_id=batch_id,
                key_id=key_id,
                status="validating",
                created_at=now,
                expires_at=now + WINDOW,
                total=0,
                completed=0,
                failed=0,
                owner="",
                leased_until=func.now(),
                body=msgspec.json.encode(request),
            )
            row = (await work.connection.execute(made.returning(rows))).one()
        return batch_of(row)

    async def get(self, key_id: str, batch_id: str) -> Batch:
        """One of a key's.

        Raises:
            NotFound: it has none of this id.
            DatabaseUnavailable: it cannot be said.
        """
        rows = tables.batches
        wanted = select(rows).where(rows.c.batch_id == batch_id, rows.c.key_id == key_id)
        async with self.database.reading() as connection:
            row = (await connection.execute(wanted)).one_or_none()
        if row is None:
            raise _no_batch(batch_id)
        return batch_of(row)

    async def listed(self, key_id: str, limit: int, after: str | None) -> tuple[list[Batch], bool]:
        """A key's batches, the newest first, and whether there are more.

        Raises:
            BadRequest: ``after`` names none of them.
            DatabaseUnavailable: it cannot be said.
        """
        rows = tables.batches
        wanted = select(rows).where(rows.c.key_id == key_id)
        found, more = await page(
            self.database, wanted, rows.c.created_at, rows.c.batch_id, limit, after
        )
        return [batch_of(row) for row in found], more

    async def cancel(self, key_id: str, batch_id: str) -> Batch:
        """Begin to cancel one of a key's; one that is being cancelled stays so.

        Raises:
            NotFound, DatabaseUnavailable: as ``get``.
            Conflict: it has ended.
        """
        rows = tables.batches
        asked = (
            update(rows)
            .where(
                rows.c.batch_id == batch_id,
                rows.c.key_id == key_id,
                rows.c.status.in_(("validating", "in_progress")),
            )
            .values(status="cancelling", cancelling_at=self.clock.wall())
        )
        async with self.database.unit_of_work() as work:
            await work.connection.execute(asked)
        batch = await self.get(key_id, batch_id)
        if batch.status in ENDED:
            raise Conflict(f"batch {batch_id} is {batch.status}: there is nothing to cancel")
        return batch

    # For the gateway that works on one.

    async def claim(self) -> Work | None:
        """Lease the oldest batch that nobody works on; None if there is none."""
        rows = tables.batches
        free = (
            select(rows.c.batch_id)
            .where(rows.c.status.in_(OPEN), rows.c.leased_until <= func.now())
            .order_by(rows.c.created_at)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        leased = (
            update(rows)
            .where(rows.c.batch_id == free.scalar_subquery())
            .values(owner=self.owner, leased_until=func.now() + LEASE)
        )
        async with self.database.unit_of_work() as work:
            row = (await work.connection.execute(leased.returning(rows))).one_or_none()
        return None if row is None else self._work(row)

    async def renew(self, batch_id: str) -> Work:
        """Keep the lease, and look at how the batch stands.

        Raises:
            LeaseLost: it is another gateway's.
            DatabaseUnavailable: it cannot be said.
        """
        async with self.database.unit_of_work() as work:
            return self._work(await self._own(work, batch_id, leased_until=func.now() + LEASE))

    async def release(self, batch_id: str) -> None:
        """Let others go on with it at once."""
        rows = tables.batches
        ours = update(rows).where(rows.c.batch_id == batch_id, rows.c.owner == self.owner)
        async with self.database.unit_of_work() as work:
            await work.connection.execute(ours.values(leased_until=func.now()))

    async def begin(self, batch_id: str, total: int) -> Work:
        """Its file is valid: lines may run, unless it is being cancelled.

        Raises:
            LeaseLost, DatabaseUnavailable: as ``renew``.
        """
        rows = tables.batches
        started = (
            update(rows)
            .where(rows.c.batch_id == batch_id, rows.c.status == "validating")
            .values(status="in_progress", begun_at=self.clock.wall())
        )
        async with self.database.unit_of_work() as work:
            await work.connection.execute(started)
            return self._work(await self._own(work, batch_id, total=total))

    async def fail(self, batch_id: str, errors: FileErrors) -> None:
        """Its file is not valid: it has ended.

        Raises:
            LeaseLost, DatabaseUnavailable: as ``renew``.
        """
        async with self.database.unit_of_work() as work:
            await self._own(
                work,
                batch_id,
                status="failed",
                errors=msgspec.json.encode(errors),
                ended_at=self.clock.wall(),
            )

    async def keep(self, batch_id: str, line: Line) -> None:
        """What became of a line; nothing, if that is known already.

        Raises:
            LeaseLost, DatabaseUnavailable: as ``renew``.
        """
        rows, batches = tables.batch_lines, tables.batches
        made = upsert(rows).values(
            batch_id=batch_id,
            number=line.number,
            succeeded=line.succeeded,
            at=self.clock.wall(),
            body=line.body,
        )
        counted = batches.c.completed if line.succeeded else batches.c.failed
        async with self.database.unit_of_work() as work:
            kept = made.on_conflict_do_nothing().returning(rows.c.number)
            new = (await work.connection.execute(kept)).one_or_none() is not None
            await self._own(work, batch_id, **{counted.name: counted + int(new)})

    async def known(self, batch_id: str) -> set[int]:
        """Numbers of the lines of which it is known what became of them."""
        rows = tables.batch_lines
        async with self.database.reading() as connection:
            found = await connection.execute(
                select(rows.c.number).where(rows.c.batch_id == batch_id)
            )
            return set(found.scalars())

    async def results(self, batch_id: str) -> list[Line]:
        """What became of its lines, in order."""
        rows = tables.batch_lines
        wanted = select(rows).where(rows.c.batch_id == batch_id).order_by(rows.c.number)
        async with self.database.reading() as connection:
            found = (await connection.execute(wanted)).all()
        return [Line(number=row.number, succeeded=row.succeeded, body=row.body) for row in found]

    async def end(
        self, work: Work, status: BatchStatus, output: File | None, failures: File | None
    ) -> None:
        """It has ended: its lines are in files from now on.

        Args:
            work: the batch.
            status: how it ended.
            output: the file of what succeeded, if anything did.
            failures: the file of the rest.

        Raises:
            LeaseLost, DatabaseUnavailable: as ``renew``.
        """
        files = [row_of(file, work.key_id, self.clock) for file in (output, failures) if file]
        rows = tables.batch_lines
        async with self.database.unit_of_work() as unit:
            await self._own(
                unit,
                work.batch_id,
                status=status,
                ended_at=self.clock.wall(),
                output_file_id=output.id if output else None,
                error_file_id=failures.id if failures else None,
            )
            if files:
                await unit.connection.execute(insert(tables.files), files)
            await unit.connection.execute(delete(rows).where(rows.c.batch_id == work.batch_id))

    async def _own(self, work: UnitOfWork, batch_id: str, **values: Any) -> Row[Any]:
        """Write to a batch whose lease is ours.

        Raises:
            LeaseLost: it is not; nothing of the unit of work stays.
        """
        rows = tables.batches
        ours = update(rows).where(
            rows.c.batch_id == batch_id, rows.c.owner == self.owner, rows.c.status.in_(OPEN)
        )
        done = await work.connection.execute(ours.values(**values).returning(rows))
        row = done.one_or_none()
        if row is None:
            raise LeaseLost(batch_id)
        return row

    def _work(self, row: Row[Any]) -> Work:
        return Work(
            batch_id=row.batch_id,
            key_id=row.key_id,
            status=row.status,
            request=msgspec.json.decode(row.body, type=BatchRequest),
            expired=row.expires_at <= self.clock.wall(),
        )


def page_ids(found: Sequence[Batch | File]) -> tuple[str | None, str | None]:
    """First and last id of a list."""
    return (found[0].id, found[-1].id) if found else (None, None)


def batch_of(row: Row[Any]) -> Batch:
    """A batch as clients see it."""
    request = msgspec.json.decode(row.body, type=BatchRequest)

    def ended(status: BatchStatus) -> int | None:
        return _unix_s(row.ended_at) if row.status == status else None

    return Batch(
        id=row.batch_id,
        endpoint=request.endpoint,
        errors=msgspec.json.decode(row.errors, type=FileErrors) if row.errors else None,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        status=row.status,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        created_at=int(row.created_at.timestamp()),
        in_progress_at=_unix_s(row.begun_at),
        expires_at=int(row.expires_at.timestamp()),
        completed_at=ended("completed"),
        failed_at=ended("failed"),
        expired_at=ended("expired"),
        cancelling_at=_unix_s(row.cancelling_at),
        cancelled_at=ended("cancelled"),
        request_counts=RequestCounts(total=row.total, completed=row.completed, failed=row.failed),
        metadata=request.metadata,
    )


def _unix_s(at: Any) -> int | None:
    return None if at is None else int(at.timestamp())


def _no_batch(batch_id: str) -> NotFound:
    return NotFound(f"there is no batch {batch_id[:128]!r}", param="batch_id")
