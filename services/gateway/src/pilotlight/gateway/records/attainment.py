"""How many requests kept their model's SLO, by minute, in the database.

Requests only count. Every ten seconds what was counted goes to the minute in which it is looked at,
and the whole minute is written under this gateway's name: a row that is written twice says the
same, so a try whose answer was lost does no harm.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime

import structlog
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause
from pilotlight.gateway.schema.attained import Attained

log = structlog.get_logger()

WRITE_EVERY_S = 10.0
ROWS_AT_ONCE = 1000
MAX_WAITING = 100_000
"""Rows that wait for a database that is away; of more, the oldest are dropped: it is a curve."""

COUNTS = tuple(Attained.__slots__)


class Attainment:
    """Takes counts and writes rows; a component."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        background: Background,
        gateway_id: str,
        counted: Callable[[], Mapping[str, Attained]],
    ) -> None:
        """Nothing is written yet.

        Args:
            database: takes the rows.
            clock: says which minute it is.
            background: owns the task that writes.
            gateway_id: of this process alone.
            counted: what was counted since it was called last, by model.
        """
        self._database = database
        self._clock = clock
        self._background = background
        self._gateway_id = gateway_id
        self._counted = counted
        self._minute = clock.wall().replace(second=0, microsecond=0)
        self._known: dict[str, Attained] = {}
        """What this minute has come to, by model."""
        self._unwritten: dict[tuple[datetime, str], Attained] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write from now on."""
        if self._task is None:
            self._task = self._background.spawn("attainment", self._write_for_ever())

    async def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None
            self._take()
            await self._write()

    async def _write_for_ever(self) -> None:
        while True:
            await pause(WRITE_EVERY_S)
            self._take()
            await self._write()

    def _take(self) -> None:
        minute = self._clock.wall().replace(second=0, microsecond=0)
        if minute != self._minute:
            self._minute, self._known = minute, {}
        for model, counts in self._counted().items():
            self._known.setdefault(model, Attained()).add(counts)
            self._unwritten[minute, model] = self._known[model]
        while len(self._unwritten) > MAX_WAITING:
            del self._unwritten[next(iter(self._unwritten))]

    async def _write(self) -> None:
        rows = list(self._unwritten)
        try:
            for first in range(0, len(rows), ROWS_AT_ONCE):
                some = rows[first : first + ROWS_AT_ONCE]
                await self._put(some)
                for key in some:
                    del self._unwritten[key]
        except DatabaseUnavailable as error:
            log.warning(
                "what kept its SLO is kept until the database is back",
                action="attainment_deferred",
                rows=len(self._unwritten),
                error=error.message,
            )

    async def _put(self, rows: list[tuple[datetime, str]]) -> None:
        table = tables.attainment
        wanted = insert(table).values(
            [
                {
                    "gateway_id": self._gateway_id,
                    "model": model,
                    "at": minute,
                    **{name: getattr(self._unwritten[minute, model], name) for name in COUNTS},
                }
                for minute, model in rows
            ]
        )
        async with self._database.unit_of_work() as work:
            await work.connection.execute(
                wanted.on_conflict_do_update(
                    index_elements=[table.c.gateway_id, table.c.model, table.c.at],
                    set_={name: wanted.excluded[name] for name in COUNTS},
                )
            )
