"""What lists of the dashboard show of the newest rows: cold starts without their phases, requests
by the minute, evictions, and the trace of a request.
"""

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    case,
    desc,
    func,
    literal_column,
    select,
    tuple_,
)

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database

MAX_STARTS = 200


class StartRow(msgspec.Struct, frozen=True, kw_only=True):
    """A cold start in a list."""

    key: str
    """The instance's id."""
    model: str
    status: str
    trace_id: str
    ttft_s: float | None
    coverage: float | None
    created_at: datetime
    finished_at: datetime | None


class MinuteRow(msgspec.Struct, frozen=True, kw_only=True):
    """What ended within one minute."""

    at: datetime
    """When the minute began."""
    requests: int
    failed: int
    """Of them, those that ended with an error; clients that left are not counted."""
    prompt_tokens: int
    output_tokens: int
    first_tokens: int
    """First tokens that were noted within the minute, also of requests that end in another."""
    first_tokens_met: int
    """Of them, those within the model's TTFT."""
    answers: int
    """Likewise, of answers."""
    answers_met: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A traced request in a list."""

    trace_id: str
    request_id: str
    name: str
    status: str
    start_at: datetime
    end_at: datetime


class RecentReader:
    """Reads them."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def cold_starts(self) -> list[StartRow]:
        """The newest ``MAX_STARTS``, the newest first.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        table = tables.cold_starts
        statement = (
            select(
                table.c.instance_id.label("key"),
                table.c.model,
                table.c.status,
                table.c.trace_id,
                table.c.ttft_s,
                table.c.coverage,
                table.c.created_at,
                table.c.finished_at,
            )
            .order_by(desc(table.c.created_at), desc(table.c.instance_id))
            .limit(MAX_STARTS)
        )
        async with self._database.reading() as connection:
            rows = (await connection.execute(statement)).mappings()
            return [StartRow(**row) for row in rows]

    async def minutes(self, model: str | None, minutes: int) -> list[MinuteRow]:
        """Finished requests of the last minutes, by minute, the oldest first; minutes in which
        nothing was noted are left out.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        since = self._clock.wall() - timedelta(minutes=minutes)
        failed = tables.usage.c.status.not_in(("ok", "cancelled"))
        usage = _by_minute(
            tables.usage,
            since,
            model,
            requests=func.count(),
            failed=func.sum(case((failed, 1), else_=0)),
            prompt_tokens=func.sum(tables.usage.c.prompt_tokens),
            output_tokens=func.sum(tables.usage.c.output_tokens),
        )
        counts = {name: func.sum(tables.attainment.c[name]) for name in _ATTAINED}
        attained = _by_minute(tables.attainment, since, model, **counts)
        found = defaultdict[datetime, dict[str, int]](lambda: dict.fromkeys(_COUNTS, 0))
        async with self._database.reading() as connection:
            for statement in (usage, attained):
                for row in (await connection.execute(statement)).mappings():
                    values = {name: int(value) for name, value in row.items() if name != "at"}
                    found[row["at"]].update(values)
        return [MinuteRow(at=at, **found[at]) for at in sorted(found)]

    async def evictions(
        self, limit: int, before_id: int | None, model: str | None = None
    ) -> list[dict[str, Any]]:
        """What the cache evicted and why, the newest first; of one model, or of all.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        table = tables.evictions
        statement = select(table).order_by(desc(table.c.id)).limit(limit)
        if before_id is not None:
            statement = statement.where(table.c.id < before_id)
        if model is not None:
            statement = statement.where(table.c.inputs["model"].astext == model)
        async with self._database.reading() as connection:
            rows = (await connection.execute(statement)).mappings()
            return [{**row, "at": row["at"].isoformat()} for row in rows]

    async def decisions(self, limit: int, before: str | None) -> list[dict[str, Any]]:
        """Decisions without their inputs, the newest first; ``before`` is the last one that was
        seen.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        table = tables.decisions
        statement = (
            select(
                table.c.decision_id,
                table.c.kind,
                table.c.model,
                table.c.instance_id,
                table.c.at,
                table.c.reasons,
            )
            .order_by(desc(table.c.at), desc(table.c.decision_id))
            .limit(limit)
        )
        if before is not None:
            at = select(table.c.at).where(table.c.decision_id == before).scalar_subquery()
            statement = statement.where(
                tuple_(table.c.at, table.c.decision_id) < tuple_(at, before)
            )
        async with self._database.reading() as connection:
            rows = (await connection.execute(statement)).mappings()
            return [{**row, "at": row["at"].isoformat()} for row in rows]

    async def requests(self, limit: int) -> list[RequestRow]:
        """The newest traced requests.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        table = tables.spans
        statement = (
            select(
                table.c.trace_id,
                table.c.attributes["request_id"].astext.label("request_id"),
                table.c.name,
                table.c.status,
                table.c.start_at,
                table.c.end_at,
            )
            .where(
                table.c.service == "gateway",
                table.c.attributes["request_id"].astext.is_not(None),
            )
            .order_by(desc(table.c.start_at))
            .limit(limit)
        )
        async with self._database.reading() as connection:
            rows = (await connection.execute(statement)).mappings()
            return [RequestRow(**row) for row in rows]

    async def trace_of(self, request_id: str) -> str | None:
        """The trace of a request, by its id; None when no span names it.

        Spans are looked through from the newest on, so a request of a moment ago is found at once.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        table = tables.spans
        statement = (
            select(table.c.trace_id)
            .where(table.c.attributes["request_id"].astext == request_id)
            .order_by(desc(table.c.start_at))
            .limit(1)
        )
        async with self._database.reading() as connection:
            return (await connection.execute(statement)).scalar_one_or_none()


def _by_minute(
    table: Table, since: datetime, model: str | None, **sums: ColumnElement[int]
) -> Select[Any]:
    """Sums of a table's rows for each minute."""
    wanted = [table.c.at >= since] + ([table.c.model == model] if model is not None else [])
    named = [value.label(name) for name, value in sums.items()]
    minute = func.date_trunc("minute", table.c.at).label("at")
    return select(minute, *named).where(*wanted).group_by(literal_column("1"))


_ATTAINED = ("first_tokens", "first_tokens_met", "answers", "answers_met")
_COUNTS = ("requests", "failed", "prompt_tokens", "output_tokens", *_ATTAINED)
