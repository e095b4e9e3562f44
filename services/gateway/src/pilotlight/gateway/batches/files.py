"""Files of clients: rows of ``gateway.files``, and their content in the object store.

An object is written before its row and removed before it: no row is ever without its content, but
for a moment while it is deleted.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, desc, func, insert, select, tuple_
from sqlalchemy.sql import Select

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import BadRequest, NotFound, QueueFull
from pilotlight.common.ids import new_file_id
from pilotlight.common.store import ObjectStore
from pilotlight.gateway.schema.batches import File

RETRY_AFTER_S = 60.0
SWEPT_AT_ONCE = 100
MAX_LISTED = 100


def file_key(file_id: str) -> str:
    """Where a file's content lies."""
    return f"files/{file_id}"


@dataclass(frozen=True, slots=True)
class FileStore:
    """Files by the key that owns them."""

    database: Database
    store: ObjectStore
    clock: Clock
    max_per_key: int

    async def add(self, key_id: str, filename: str, content: bytes) -> File:
        """Keep a file of a client.

        Raises:
            QueueFull: the key has as many as it may.
            DatabaseUnavailable, SourceUnavailable: not now.
        """
        rows = tables.files
        async with self.database.reading() as connection:
            count = select(func.count()).select_from(rows).where(rows.c.key_id == key_id)
            held = (await connection.execute(count)).scalar_one()
        if held >= self.max_per_key:
            raise QueueFull(
                f"this key has {held} files, of {self.max_per_key} at most: delete some",
                retry_after_s=RETRY_AFTER_S,
            )
        file = File(
            id=new_file_id(),
            bytes=len(content),
            created_at=int(self.clock.wall().timestamp()),
            filename=filename,
            purpose="batch",
        )
        await self.store.put_if_absent(file_key(file.id), content)
        async with self.database.unit_of_work() as work:
            await work.connection.execute(insert(rows).values(row_of(file, key_id, self.clock)))
        return file

    async def get(self, key_id: str, file_id: str) -> File:
        """One of a key's.

        Raises:
            NotFound: it has none of this id.
            DatabaseUnavailable: it cannot be said.
        """
        rows = tables.files
        wanted = select(rows).where(rows.c.file_id == file_id, rows.c.key_id == key_id)
        async with self.database.reading() as connection:
            row = (await connection.execute(wanted)).one_or_none()
        if row is None:
            raise NotFound(f"there is no file {file_id[:128]!r}", param="file_id")
        return _file_of(row)

    async def content(self, key_id: str, file_id: str) -> bytes:
        """What is in one of a key's.

        Raises:
            NotFound, DatabaseUnavailable: as ``get``.
            SourceUnavailable: the store cannot be read.
        """
        await self.get(key_id, file_id)
        return await self.store.get(file_key(file_id))

    async def listed(self, key_id: str, limit: int, after: str | None) -> tuple[list[File], bool]:
        """A key's files, the newest first, and whether there are more.

        Raises:
            BadRequest: ``after`` names none of them.
            DatabaseUnavailable: it cannot be said.
        """
        rows = tables.files
        wanted = select(rows).where(rows.c.key_id == key_id)
        found, more = await page(
            self.database, wanted, rows.c.created_at, rows.c.file_id, limit, after
        )
        return [_file_of(row) for row in found], more

    async def remove(self, key_id: str, file_id: str) -> None:
        """Delete one of a key's.

        Raises:
            NotFound, DatabaseUnavailable, SourceUnavailable: as ``content``.
        """
        await self.get(key_id, file_id)
        await self._remove(file_id)

    async def sweep(self, before: datetime) -> int:
        """Delete files that were made before a time; how many went, some at a time."""
        rows = tables.files
        old = select(rows.c.file_id).where(rows.c.created_at < before).limit(SWEPT_AT_ONCE)
        async with self.database.reading() as connection:
            file_ids = (await connection.execute(old)).scalars().all()
        for file_id in file_ids:
            await self._remove(file_id)
        return len(file_ids)

    async def _remove(self, file_id: str) -> None:
        await self.store.delete(file_key(file_id))
        rows = tables.files
        async with self.database.unit_of_work() as work:
            await work.connection.execute(delete(rows).where(rows.c.file_id == file_id))


async def page(
    database: Database,
    wanted: Select[Any],
    created: Any,
    name: Any,
    limit: int,
    after: str | None,
) -> tuple[list[Row[Any]], bool]:
    """Rows of a list, the newest first, and whether there are more.

    Args:
        database: has them.
        wanted: all of the list.
        created: the column with the rows' time.
        name: the column with their ids.
        limit: how many at most.
        after: the last one that was seen; None: none was.

    Raises:
        BadRequest: ``after`` is not in the list.
        DatabaseUnavailable: it cannot be said.
    """
    async with database.reading() as connection:
        if after is not None:
            last = (
                await connection.execute(wanted.with_only_columns(created).where(name == after))
            ).scalar_one_or_none()
            if last is None:
                raise BadRequest(f"there is no {after[:128]!r} in this list", param="after")
            wanted = wanted.where(tuple_(created, name) < tuple_(last, after))
        ordered = wanted.order_by(desc(created), desc(name)).limit(limit + 1)
        found = list((await connection.execute(ordered)).all())
    return found[:limit], len(found) > limit


def row_of(file: File, key_id: str, clock: Clock) -> dict[str, Any]:
    """A file's row."""
    return {
        "file_id": file.id,
        "key_id": key_id,
        "filename": file.filename,
        "purpose": file.purpose,
        "bytes": file.bytes,
        "created_at": clock.wall(),
    }


def _file_of(row: Row[Any]) -> File:
    return File(
        id=row.file_id,
        bytes=row.bytes,
        created_at=int(row.created_at.timestamp()),
        filename=row.filename,
        purpose=row.purpose,
    )
