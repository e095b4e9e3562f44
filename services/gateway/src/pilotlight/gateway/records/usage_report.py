"""Usage added up: by day, key and model, or by model alone.

What a cold start had of devices is divided among the requests that were held for its model when it
began, on all gateways, evenly. One for which none was, as of a start that an operator asked for, is
nobody's: it stands in a row without a key. So does the time in which a model was loaded and nobody
used the device: it is its model's, by the beginning of the hour.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Date,
    Double,
    Integer,
    Numeric,
    Subquery,
    cast,
    func,
    literal,
    select,
    union_all,
)

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import UnprocessableInput

DAYS = 30
MAX_ROWS = 20_000
COUNTS = ("requests", "failed", "prompt_tokens", "output_tokens")
SECONDS = ("device_s", "start_device_s", "idle_device_s")


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
    device_s: float
    """Device-seconds of its requests."""
    start_device_s: float
    """Of the cold starts that were for them."""
    idle_device_s: float
    """In which the model was loaded and nobody used the device; of no key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """What was asked of one model, and what it took."""

    model: str
    requests: int
    failed: int
    """Of those: neither answered nor cancelled by the client."""
    prompt_tokens: int
    output_tokens: int
    device_s: float
    """Device-seconds of its requests."""
    start_device_s: float
    """Of its cold starts."""
    idle_device_s: float
    """In which it was loaded and nobody used the device."""


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
        keys = tables.api_keys
        used = _used(since or self._days_ago(), until)
        day = cast(func.timezone("UTC", used.c.at), Date)
        wanted = (
            select(
                day.label("day"),
                func.coalesce(keys.c.project, "").label("project"),
                used.c.key_id,
                func.coalesce(keys.c.label, "").label("label"),
                used.c.model,
                *_summed(used),
            )
            .join_from(used, keys, keys.c.key_id == used.c.key_id, isouter=True)
            .group_by(day, keys.c.project, used.c.key_id, keys.c.label, used.c.model)
            .order_by(day, used.c.key_id, used.c.model)
            .limit(MAX_ROWS + 1)
        )
        for column, value in (
            (keys.c.project, project),
            (used.c.key_id, key_id),
            (used.c.model, model),
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

    async def by_model(
        self, since: datetime | None, until: datetime | None, *, model: str | None = None
    ) -> list[ModelUsage]:
        """Usage by model, by name; those with none are left out.

        Args:
            since: first moment; None: 30 days ago.
            until: end; None: now.
            model: only of this model.

        Raises:
            UnprocessableInput: there are more models than one answer may have.
            DatabaseUnavailable: it cannot be read.
        """
        used = _used(since or self._days_ago(), until)
        wanted = (
            select(used.c.model, *_summed(used))
            .group_by(used.c.model)
            .order_by(used.c.model)
            .limit(MAX_ROWS + 1)
        )
        if model is not None:
            wanted = wanted.where(used.c.model == model)
        async with self._database.reading() as connection:
            rows = (await connection.execute(wanted)).mappings().all()
        if len(rows) > MAX_ROWS:
            raise UnprocessableInput(f"these are more than {MAX_ROWS} models: ask for one of them")
        return [ModelUsage(**row) for row in rows]

    def _days_ago(self) -> datetime:
        return self._clock.wall() - timedelta(days=DAYS)


def _summed(used: Subquery) -> list[ColumnElement[Any]]:
    """What the rows of a group come to."""
    return [
        *(cast(func.sum(used.c[name]), BigInteger).label(name) for name in COUNTS),
        *(_seconds(func.sum(used.c[name])).label(name) for name in SECONDS),
    ]


def _used(since: datetime, until: datetime | None) -> Subquery:
    """Requests, shares of cold starts, and idle time, with the columns of all."""
    usage, starts = tables.usage, _starts(since, until)
    requests = select(
        usage.c.at,
        usage.c.key_id,
        usage.c.model,
        literal(1).label("requests"),
        cast(usage.c.status.not_in(("ok", "cancelled")), Integer).label("failed"),
        usage.c.prompt_tokens,
        usage.c.output_tokens,
        usage.c.device_s,
        literal(0.0).label("start_device_s"),
        literal(0.0).label("idle_device_s"),
    ).where(usage.c.at >= since)
    if until is not None:
        requests = requests.where(usage.c.at < until)
    holds = tables.start_holds
    held = (
        select(
            holds.c.instance_id,
            holds.c.key_id,
            func.sum(holds.c.requests).label("requests"),
            func.sum(func.sum(holds.c.requests))
            .over(partition_by=holds.c.instance_id)
            .label("all_requests"),
        )
        .group_by(holds.c.instance_id, holds.c.key_id)
        .subquery()
    )
    share = cast(held.c.requests, Double) / cast(held.c.all_requests, Double)
    nothing = [literal(0).label(name) for name in ("requests", "failed", "prompt", "output")]
    shares = select(
        starts.c.at,
        func.coalesce(held.c.key_id, "").label("key_id"),
        starts.c.model,
        *nothing,
        literal(0.0).label("device_s"),
        (starts.c.device_s * func.coalesce(share, 1.0)).label("start_device_s"),
        literal(0.0).label("idle_device_s"),
    ).join_from(starts, held, held.c.instance_id == starts.c.instance_id, isouter=True)
    idle = _idle(since, until)
    idle_shares = select(
        idle.c.at,
        literal("").label("key_id"),
        idle.c.model,
        *nothing,
        literal(0.0).label("device_s"),
        literal(0.0).label("start_device_s"),
        idle.c.device_s.label("idle_device_s"),
    )
    return union_all(requests, shares, idle_shares).subquery()


def _idle(since: datetime, until: datetime | None) -> Subquery:
    """What each hour has more than the one before it, of hours that begin then."""
    times = tables.idle_times
    before = func.lag(times.c.device_s, 1, 0.0).over(
        partition_by=(times.c.instance_id, times.c.worker_id), order_by=times.c.at
    )
    # Every hour is looked at: the first that is wanted needs the one before it.
    wanted = select(
        times.c.at, times.c.model, (times.c.device_s - before).label("device_s")
    ).subquery()
    found = select(wanted).where(wanted.c.at >= since)
    return (found if until is None else found.where(wanted.c.at < until)).subquery()


def _starts(since: datetime, until: datetime | None) -> Subquery:
    """Cold starts, all workers of each together, as of the first that was ready."""
    costs = tables.start_costs
    at = func.min(costs.c.at)
    starts = (
        select(
            costs.c.instance_id,
            costs.c.model,
            at.label("at"),
            func.sum(costs.c.device_s).label("device_s"),
        )
        .group_by(costs.c.instance_id, costs.c.model)
        .having(at >= since)
    )
    return (starts if until is None else starts.having(at < until)).subquery()


def _seconds(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """To the microsecond, as the journal has them."""
    return cast(func.round(cast(value, Numeric), 6), Double)


def as_csv(rows: Sequence[DayUsage]) -> str:
    """Rows with a line of names before them, as RFC 4180 says."""
    text = io.StringIO()
    writer = csv.writer(text)
    names = [each.name for each in fields(DayUsage)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return text.getvalue()
