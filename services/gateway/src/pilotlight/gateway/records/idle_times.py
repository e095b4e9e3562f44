"""Time in which models are loaded and nobody uses the device, in the database.

Workers count it, from a stage's load on, and say in their reports what it has come to. Every
gateway hears that and writes it, of each hour the most that was heard: so it does not matter how
many write, and one that comes back after a kill finds in the next report what it has missed.
"""

import asyncio
from datetime import datetime
from typing import NamedTuple, Protocol

import structlog
from sqlalchemy import func
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.roster import News
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause
from pilotlight.policy.cluster import WorkerFacts
from pilotlight.policy.ids import InstanceId, ModelName, WorkerId

log = structlog.get_logger()

WRITE_EVERY_S = 10.0
ROWS_AT_ONCE = 1000
MAX_WAITING = 100_000
"""Rows that wait for a database that is away; more are not taken, and a later report has them."""


class Workers(Protocol):
    """What workers said last (``Fleet``)."""

    def worker(self, worker_id: WorkerId) -> WorkerFacts | None:
        """One of them."""
        ...

    def workers(self) -> tuple[WorkerFacts, ...]:
        """All of them."""
        ...


class _Stage(NamedTuple):
    instance_id: InstanceId
    worker_id: WorkerId


class _Heard(NamedTuple):
    hour: datetime
    model: ModelName
    device_s: float


class IdleTimes:
    """Hears reports and writes rows; a component."""

    def __init__(
        self, database: Database, clock: Clock, background: Background, fleet: Workers
    ) -> None:
        self._database = database
        self._clock = clock
        self._background = background
        self._fleet = fleet
        self._heard: dict[_Stage, float] = {}
        """What each stage has come to."""
        self._unwritten: dict[tuple[_Stage, datetime], _Heard] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write from now on."""
        if self._task is None:
            self._task = self._background.spawn("idle times", self._write_for_ever())

    async def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None
            await self._write()

    def hear(self, news: News) -> None:
        """Note what workers say that have said something."""
        for worker_id in news.workers:
            facts = self._fleet.worker(worker_id)
            for held in facts.held if facts is not None else ():
                stage = _Stage(held.instance_id, worker_id)
                if held.idle_device_s > self._heard.get(stage, 0.0):
                    self._note(stage, held.model, held.idle_device_s)

    def _note(self, stage: _Stage, model: ModelName, device_s: float) -> None:
        hour = self._clock.wall().replace(minute=0, second=0, microsecond=0)
        key = (stage, hour)
        if key in self._unwritten or len(self._unwritten) < MAX_WAITING:
            self._heard[stage] = device_s
            self._unwritten[key] = _Heard(hour, model, device_s)

    async def _write_for_ever(self) -> None:
        while True:
            await pause(WRITE_EVERY_S)
            await self._write()
            self._forget()

    def _forget(self) -> None:
        held = {
            _Stage(one.instance_id, worker.worker_id)
            for worker in self._fleet.workers()
            for one in worker.held
        }
        self._heard = {stage: told for stage, told in self._heard.items() if stage in held}

    async def _write(self) -> None:
        """Write what was heard; what cannot be written now stays."""
        # In one order at all gateways, so that two never wait for each other's rows.
        rows = sorted(self._unwritten.items(), key=lambda item: item[0])
        try:
            for first in range(0, len(rows), ROWS_AT_ONCE):
                some = rows[first : first + ROWS_AT_ONCE]
                await self._put([(stage, heard) for (stage, _), heard in some])
                for key, heard in some:
                    if self._unwritten[key] is heard:
                        del self._unwritten[key]
        except DatabaseUnavailable as error:
            log.warning(
                "idle times are kept until the database is back",
                action="idle_times_deferred",
                rows=len(self._unwritten),
                error=error.message,
            )

    async def _put(self, rows: list[tuple[_Stage, _Heard]]) -> None:
        table = tables.idle_times
        wanted = insert(table).values(
            [
                {
                    "instance_id": stage.instance_id,
                    "worker_id": stage.worker_id,
                    "at": heard.hour,
                    "model": heard.model,
                    "device_s": heard.device_s,
                }
                for stage, heard in rows
            ]
        )
        more = func.greatest(table.c.device_s, wanted.excluded.device_s)
        async with self._database.unit_of_work() as work:
            await work.connection.execute(
                wanted.on_conflict_do_update(
                    index_elements=[table.c.instance_id, table.c.worker_id, table.c.at],
                    set_={"device_s": more},
                )
            )
