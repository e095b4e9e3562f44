"""Usage added up: by day, key and model."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta

from sqlalchemy import BigInteger, Date, Integer, cast, func, select

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import UnprocessableInput

DAYS = 30
MAX_ROWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DayUsage:
    """What one key asked of one model on one day."""

    day: date
    """In UTC."""
    project: str
    """Empty where the key is not known, as of clients that need none."""
    key_id: str
    label: str
    model: str
    requests: int
    failed: int
    """Of those: neither answered nor cancelled by the client."""
    prompt_tokens: int
    output_tokens: int


class UsageReader:
    """Reads rows of usage."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def by_day(
        self,
        since: datetime | None,
        until: datetime | None,
        *,
        project: str | None = None,
        key_id: str | None = None,
        model: str | None = None,
    ) -> list[DayUsage]:
        """Usage by day, key and model, the oldest first.

        Args:
            since: first moment; None: 30 days ago.
            until: end; None: now.
            project: only of its keys.
            key_id: only of this key.
            model: only of this model.

        Raises:
            UnprocessableInput: there are more rows than one answer may have.
            DatabaseUnavailable: it cannot be read.
        """
        usage, keys = tables.usage, tables.api_keys
        day = cast(func.timezone("UTC", usage.c.at), Date)
        now = self._clock.wall()
        wanted = (
            select(
                day.label("day"),
                func.coalesce(keys.c.project, "").label("project"),
                usage.c.key_id,
                func.coalesce(keys.c.label, "").label("label"),
                usage.c.model,
                func.count().label("requests"),
                func.coalesce(
                    func.sum(cast(usage.c.status.not_in(("ok", "cancelled")), Integer)), 0
                ).label("failed"),
                cast(func.sum(usage.c.prompt_tokens), BigInteger).label("prompt_tokens"),
                cast(func.sum(usage.c.output_tokens), BigInteger).label("output_tokens"),
            )
            .join_from(usage, keys, keys.c.key_id == usage.c.key_id, isouter=True)
            .where(usage.c.at >= (since or now - timedelta(days=DAYS)))
            .group_by(day, keys.c.project, usage.c.key_id, keys.c.label, usage.c.model)
            .order_by(day, usage.c.key_id, usage.c.model)
            .limit(MAX_ROWS + 1)
        )
        if until is not None:
            wanted = wanted.where(usage.c.at < until)
        for column, value in (
            (keys.c.project, project),
            (usage.c.key_id, key_id),
            (usage.c.model, model),
        ):
            if value is not None:
                wanted = wanted.where(column == value)
        async with self._database.reading() as connection:
            rows = (await connection.execute(wanted)).mappings().all()
        if len(rows) > MAX_ROWS:
            raise UnprocessableInput(
                f"this is more than {MAX_ROWS} rows: ask for fewer days, one project or one key"
            )
        return [DayUsage(**row) for row in rows]


def as_csv(rows: Sequence[DayUsage]) -> str:
    """Rows with a line of names before them, as RFC 4180 says."""
    text = io.StringIO()
    writer = csv.writer(text)
    names = [each.name for each in fields(DayUsage)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return text.getvalue()
