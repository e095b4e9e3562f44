"""Cold starts in the database: for whom they were, and what they had of devices.

Several gateways hear of one start. Each writes for whom *it* held requests; of what a load took all
say the same, and the first row stays. So nothing is counted twice, also by a gateway that was
killed and has come back, and who pays how much follows from the rows alone (``UsageReader``).
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

import structlog
from sqlalchemy import Table
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause
from pilotlight.policy.ids import GatewayId, InstanceId, ModelName, WorkerId

log = structlog.get_logger()

AGAIN_S = 1.0
"""Until a database that was away is tried again."""
MAX_WAITING = 10_000
"""Rows that wait for the database; beyond it the oldest are dropped, and that is logged."""


class StartCosts:
    """Writes rows as they come; a component."""

    def __init__(
        self, database: Database, clock: Clock, background: Background, gateway_id: GatewayId
    ) -> None:
        self._database = database
        self._clock = clock
        self._background = background
        self._gateway_id = gateway_id
        self._rows: deque[tuple[Table, dict[str, Any]]] = deque(maxlen=MAX_WAITING)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Write from now on."""
        if self._task is None:
            self._task = self._background.spawn("costs of starts", self._write_for_ever())

    async def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None
            await self._write()

    def held(self, instance_id: InstanceId, waited: Mapping[str, int]) -> None:
        """As ``StartBook.held``."""
        for key_id, requests in waited.items():
            self._add(
                tables.start_holds,
                instance_id=instance_id,
                gateway_id=self._gateway_id,
                key_id=key_id,
                requests=requests,
            )

    def took(
        self, instance_id: InstanceId, worker_id: WorkerId, model: ModelName, device_s: float
    ) -> None:
        """As ``StartBook.took``."""
        self._add(
            tables.start_costs,
            instance_id=instance_id,
            worker_id=worker_id,
            model=model,
            device_s=device_s,
        )

    def _add(self, table: Table, **row: object) -> None:
        if len(self._rows) == MAX_WAITING:
            log.error("the cost of a start is lost", action="start_cost_dropped")
        self._rows.append((table, {**row, "at": self._clock.wall()}))
        self._wake.set()

    async def _write_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not await self._write():
                await pause(AGAIN_S)
                self._wake.set()

    async def _write(self) -> bool:
        """Whether all that was there is written. A row leaves when it is."""
        rows = list(self._rows)
        try:
            async with self._database.unit_of_work() as work:
                for table, row in rows:
                    await work.connection.execute(
                        insert(table).values(**row).on_conflict_do_nothing()
                    )
        except DatabaseUnavailable as error:
            log.warning(
                "costs of starts are kept until the database is back",
                action="start_costs_deferred",
                rows=len(rows),
                error=error.message,
            )
            return False
        for each in rows:
            if self._rows and self._rows[0] is each:
                self._rows.popleft()
        return True
