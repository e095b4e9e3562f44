"""What the services decided, for the admin API and for a request that got no instance.

Pages of rows are bounded in bytes, and their JSON is passed on as the database has it. A decision
holds its inputs, and a thousand of them are tens of megabytes. Decoding and encoding those would
stop the event loop for seconds, with every stream that runs on it. So JSON columns stay text, rows
come a few at a time, and an answer ends at its bound.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Column, ColumnElement, Select, Text, cast, desc, select, tuple_
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import NotFound

MAX_BYTES = 8 * 1024 * 1024
"""Of an answer's rows, about; the last one may go beyond."""
FIRST_ROWS = 20
"""Read at a time; more where they are small."""
SMALL_BYTES = 64 * 1024
MAX_AT_A_TIME = 500
MAX_ROWS_OF_TRACE = 10_000


@dataclass(frozen=True, slots=True)
class Listing:
    """A table that is listed, the newest first."""

    name: str
    at: Column[Any]
    key: Column[Any]
    model: Column[Any]


INSTANCES = Listing(
    "instances",
    tables.instances.c.created_at,
    tables.instances.c.instance_id,
    tables.instances.c.model,
)
COLD_STARTS = Listing(
    "cold_starts",
    tables.cold_starts.c.created_at,
    tables.cold_starts.c.instance_id,
    tables.cold_starts.c.model,
)
DECISIONS = Listing(
    "decisions", tables.decisions.c.at, tables.decisions.c.decision_id, tables.decisions.c.model
)


class Display:
    """Reads rows of other services, and spans, as JSON documents."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, listing: Listing, *, limit: int, model: str | None = None, before: str | None = None
    ) -> bytes:
        """``{"<name>": [...], "next_before": id}``: the newest rows first; the id is null at the
        end.

        Args:
            listing: which rows.
            limit: how many at most.
            model: only those of the model of this name; None: all.
            before: the id of the last row of the page before this one; None: from the newest on.

        Raises:
            NotFound: there is no row ``before``.
            DatabaseUnavailable: the database cannot be read.
        """
        wanted: list[ColumnElement[bool]] = [] if model is None else [listing.model == model]
        async with self._database.reading() as connection:
            if before is not None:
                place = select(listing.at, listing.key).where(listing.key == before)
                row = (await connection.execute(place)).one_or_none()
                if row is None:
                    raise NotFound(
                        f"there is no row {before!r} to go on from; it may have been too old to keep",
                        param="before",
                    )
                wanted.append(tuple_(listing.at, listing.key) < tuple_(row[0], row[1]))
            statement = (
                _columns(listing.at).where(*wanted).order_by(desc(listing.at), desc(listing.key))
            )
            rows, more = await _read(connection, listing.at, statement, limit)
        return await _encoded(
            {listing.name: rows, "next_before": rows[-1][listing.key.name] if more else None}
        )

    async def one(self, listing: Listing, key: str) -> bytes | None:
        """One row, whole; None when it is not there.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        async with self._database.reading() as connection:
            statement = _columns(listing.at).where(listing.key == key)
            rows, _ = await _read(connection, listing.at, statement, 1)
        return await _encoded(rows[0]) if rows else None

    async def trace(self, trace_id: str) -> bytes | None:
        """Spans by start and cold starts of one trace, and whether there are more than are shown;
        None when nothing is kept.

        Raises:
            DatabaseUnavailable: the database cannot be read.
        """
        spans, starts = tables.spans, tables.cold_starts
        async with self._database.reading() as connection:
            of_trace = (
                _columns(spans.c.start_at)
                .where(spans.c.trace_id == trace_id)
                .order_by(spans.c.start_at, spans.c.span_id)
            )
            shown, more_spans = await _read(
                connection, spans.c.start_at, of_trace, MAX_ROWS_OF_TRACE
            )
            cold = _columns(starts.c.created_at).where(starts.c.trace_id == trace_id)
            cold = cold.order_by(starts.c.created_at, starts.c.instance_id)
            cold_starts, more_starts = await _read(
                connection, starts.c.created_at, cold, MAX_ROWS_OF_TRACE
            )
        if not shown and not cold_starts:
            return None
        return await _encoded(
            {
                "trace_id": trace_id,
                "spans": shown,
                "cold_starts": cold_starts,
                "truncated": more_spans or more_starts,
            }
        )


class DecisionReader:
    """The scheduler's last decisions, for a request that asks why nothing was done."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def decisions(self, model: str | None, limit: int) -> list[dict[str, Any]]:
        """When, why and with which outcome, the newest first."""
        table = tables.decisions
        columns = select(table.c.at, table.c.reasons, table.c.outcome)
        rows = columns.order_by(desc(table.c.at)).limit(limit)
        async with self._database.reading() as connection:
            found = await connection.execute(
                rows if model is None else rows.where(table.c.model == model)
            )
            return [dict(row) for row in found.mappings()]


def _columns(at: Column[Any]) -> Select[Any]:
    return select(
        *(
            cast(one, Text).label(one.name) if one.name in _json_columns(at) else one
            for one in at.table.columns
        )
    )


def _json_columns(at: Column[Any]) -> frozenset[str]:
    return frozenset(one.name for one in at.table.columns if isinstance(one.type, JSONB))


async def _read(
    connection: AsyncConnection, at: Column[Any], statement: Select[Any], limit: int
) -> tuple[list[dict[str, Any]], bool]:
    """Rows up to the limit and the bound of bytes, and whether there are more.

    Few at a time, the more the smaller they are.
    """
    json_columns = _json_columns(at)
    found: list[dict[str, Any]] = []
    size_bytes, at_a_time = 0, FIRST_ROWS
    while True:
        wanted = min(at_a_time, limit + 1 - len(found))
        rows = (
            (await connection.execute(statement.offset(len(found)).limit(wanted))).mappings().all()
        )
        before_bytes = size_bytes
        for row in rows:
            if len(found) == limit or size_bytes >= MAX_BYTES:
                return found, True
            found.append(
                {name: _shown(value, is_json=name in json_columns) for name, value in row.items()}
            )
            size_bytes += sum(len(row[name]) for name in json_columns)
        if len(rows) < wanted:
            return found, False
        if size_bytes - before_bytes < SMALL_BYTES:
            at_a_time = min(2 * at_a_time, MAX_AT_A_TIME)


def _shown(value: Any, *, is_json: bool) -> Any:
    if is_json:
        return msgspec.Raw(value)
    return value.isoformat() if isinstance(value, datetime) else value


async def _encoded(answer: Mapping[str, Any]) -> bytes:
    return await asyncio.to_thread(msgspec.json.encode, answer)
