"""Events leave through here: committed with what they tell of, published after it, in order, at
least once, stored once.

A row goes when the stream has confirmed it. A crash in between publishes the row again under the
same event id, which the stream drops. One publisher for each schema works at a time, whichever
process it is in. Order is that of the rows' ids: two units of work that overlap may come in either
order, one after the other never.
"""

import asyncio
import math
import random
from typing import Any

import structlog
from sqlalchemy import Row, delete, func, select

from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import BusUnavailable, DatabaseUnavailable
from pilotlight.common.messages.events import Event, event_subject
from pilotlight.common.service import Context
from pilotlight.common.telemetry import with_parent
from pilotlight.common.waiting import Backoff, cancel_all, pause, woken

log = structlog.get_logger()

POLL_S = 5.0
"""Safety net: for rows whose kick was lost with the process that wrote them."""
BATCH = 64
"""Rows that are published within one transaction."""
FIRST_S = 0.005
"""So long a publication waits where none was of late: what follows a commit goes first, such as a
start's commands."""
LINGER_S = 0.05
"""So long a publication waits for more rows, ..."""
BUSY_S = 0.2
"""... where the one before it ended so lately: each is a transaction."""


class Outbox:
    """Publishes one schema's outbox to the stream EVENTS: a component."""

    def __init__(self, database: Database, context: Context[Any]) -> None:
        self._database = database
        self._table = tables.outboxes[database.schema]
        self._bus = context.bus
        self._background = context.background
        self._clock = context.clock
        self._rng = random.Random()
        self._kicked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waiting_since_s: float | None = None
        database.on_events(self._kicked.set)

    @property
    def lag_s(self) -> float:
        """For how long events have been waiting because they could not be published; 0 when none
        do.
        """
        return (
            0.0
            if self._waiting_since_s is None
            else self._clock.monotonic_s() - self._waiting_since_s
        )

    async def start(self) -> None:
        """Publish from now on."""
        if self._task is None:
            self._kicked.set()
            self._task = self._background.spawn(
                f"outbox of {self._database.schema}", self._publish_for_ever()
            )

    async def stop(self) -> None:
        """Publish what is there, if the stream takes it, and no more."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_all((task,))
        try:
            await self.publish_all()
        except (BusUnavailable, DatabaseUnavailable) as error:
            log.warning(
                "events wait for the next start",
                action="outbox_left",
                schema=self._database.schema,
                error=error.message,
            )

    async def publish_all(self) -> None:
        """Publish every row that is committed now.

        Raises:
            BusUnavailable: the stream did not confirm; the row and those after it stay.
            DatabaseUnavailable: the rows cannot be read.
        """
        while await self._publish_some() == BATCH:
            pass

    async def _publish_for_ever(self) -> None:
        backoff = Backoff()
        failures, published_s = 0, -math.inf
        while True:
            await woken(self._kicked, POLL_S)
            is_busy = self._clock.monotonic_s() - published_s < BUSY_S
            await pause(LINGER_S if is_busy else FIRST_S)
            self._kicked.clear()
            try:
                await self.publish_all()
                published_s = self._clock.monotonic_s()
                failures, self._waiting_since_s = 0, None
            except (BusUnavailable, DatabaseUnavailable) as error:
                if failures == 0:
                    self._waiting_since_s = self._clock.monotonic_s()
                    log.warning(
                        "events wait",
                        action="outbox_waits",
                        schema=self._database.schema,
                        error=error.message,
                    )
                await pause(backoff.delay_s(failures, self._rng))
                failures += 1
                self._kicked.set()

    async def _publish_some(self) -> int:
        published: list[int] = []
        failure: BusUnavailable | None = None
        async with self._database.unit_of_work() as work:
            await work.connection.execute(
                select(func.pg_advisory_xact_lock(func.hashtext(self._table.fullname)))
            )
            rows = (
                await work.connection.execute(
                    select(self._table).order_by(self._table.c.id).limit(BATCH)
                )
            ).all()
            for row in rows:
                try:
                    await self._publish(row)
                except BusUnavailable as error:
                    failure = error
                    break
                published.append(row.id)
            if published:
                await work.connection.execute(
                    delete(self._table).where(self._table.c.id.in_(published))
                )
        if failure is not None:
            raise failure
        return len(published)

    async def _publish(self, row: Row[Any]) -> None:
        event = Event(
            event_id=row.event_id,
            kind=row.kind,
            entity=row.entity,
            at=row.at.isoformat(),
            data=row.data,
        )
        with with_parent(row.trace_parent):
            await self._bus.publish_event(
                event_subject(self._database.schema, row.kind), row.event_id, event
            )
