"""The registered models, for services that list them every few seconds: only rows that changed
since the last look are read.

A row's version is PostgreSQL's own (``xmin``, the transaction that wrote it): it is another one
after every change, whatever clocks say. Whether anything changed at all is one row: the number of
rows and the sum of a hash of name and version. With 10,000 models that is some milliseconds of the
database's time, where reading all of them is most of a second of ours.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from sqlalchemy import (
    Numeric,
    RowMapping,
    String,
    cast,
    func,
    literal_column,
    select,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from pilotlight.common.db import tables

T = TypeVar("T")

MAX_NAMED = 10_000
"""Rows that are asked for by name; where more have changed, all are read."""
_VERSION = literal_column("xmin::text", String)
_NAME = tables.models.c.name
_MARK = select(
    func.count(),
    func.coalesce(
        func.sum(cast(func.hashtextextended(_NAME.concat(" ").concat(_VERSION), 0), Numeric)), 0
    ),
).select_from(tables.models)


class ModelRows(Generic[T]):
    """What was read of them."""

    def __init__(self, of: Callable[[RowMapping], T]) -> None:
        """``of`` makes what is wanted of a row of ``gateway.models``."""
        self._of = of
        self._mark: tuple[Any, ...] | None = None
        self._rows: dict[str, tuple[str, T]] = {}
        self._listed: tuple[T, ...] = ()

    async def read(self, connection: AsyncConnection) -> tuple[T, ...]:
        """Every model, by name; the same tuple as before when nothing has changed."""
        # The mark is of a moment before the rows: what changes in between shows the next time.
        mark = tuple((await connection.execute(_MARK)).one())
        if mark == self._mark:
            return self._listed
        found = (await connection.execute(select(_NAME, _VERSION))).all()
        versions: dict[str, str] = {row[0]: row[1] for row in found}
        rows = {name: row for name, row in self._rows.items() if versions.get(name) == row[0]}
        changed = [name for name in versions if name not in rows]
        wanted = select(tables.models, _VERSION.label("version"))
        if self._rows and len(changed) <= MAX_NAMED:
            wanted = wanted.where(_NAME.in_(changed))
        for row in (await connection.execute(wanted)).mappings():
            rows[row["name"]] = (row["version"], self._of(row))
        self._rows, self._mark = rows, mark
        self._listed = tuple(rows[name][1] for name in sorted(rows))
        return self._listed
