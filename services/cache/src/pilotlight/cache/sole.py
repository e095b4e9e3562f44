"""Exactly one cache answers at a time: two that count the same free bytes would grant them twice.

The right to answer is a session advisory lock in PostgreSQL: it ends with its connection, whatever happens to the process.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import psycopg
import structlog

from pilotlight.common.db.session import service_url
from pilotlight.common.errors import PilotlightError
from pilotlight.common.service import Background
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.waiting import Backoff, cancel_all, pause, within

log = structlog.get_logger()

LOCK = 7_016_150_014
"""Key of the advisory lock."""
CHECK_INTERVAL_S = 1.0
DEADLINE_S = 5.0


class SoleHolder:
    """Calls ``begin`` when this process holds the lock, ``end`` when it no longer does; a component."""

    def __init__(
        self,
        settings: DatabaseSettings,
        background: Background,
        begin: Callable[[], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._url = service_url(settings, "cache").set(drivername="postgresql").render_as_string(hide_password=False)
        self._background = background
        self._begin = begin
        self._end = end
        self._rng = random.Random()
        self._backoff = Backoff(first_s=0.1, limit_s=1.0)
        self._competing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to compete; a standby is ready too."""
        self._competing = self._background.spawn("hold the cache's lock", self._compete())

    async def stop(self) -> None:
        """Answer no more, then let go of the lock."""
        await self._end()
        if self._competing is not None:
            await cancel_all([self._competing])
            self._competing = None
            # It may have been about to begin.
            await self._end()

    async def _compete(self) -> None:
        attempt = 0
        while True:
            try:
                await self._hold()
                attempt = 0
            except (psycopg.Error, PilotlightError, OSError) as error:
                log.warning("the cache's lock cannot be held", action="cache_lock_failed", error=str(error))
            await self._end()
            await pause(self._backoff.delay_s(attempt, self._rng))
            attempt += 1

    async def _hold(self) -> None:
        """Return when another cache has the lock; raise when the connection that holds ours is lost."""
        connecting = psycopg.AsyncConnection.connect(self._url, autocommit=True, connect_timeout=5)
        async with await within(DEADLINE_S, connecting, "connecting to the database") as connection:
            taken = await within(DEADLINE_S, connection.execute("SELECT pg_try_advisory_lock(%s)", (LOCK,)), "taking the lock")
            row = await taken.fetchone()
            if row is None or not row[0]:
                return
            log.info("this cache answers", action="cache_active")
            await self._begin()
            while True:
                await pause(CHECK_INTERVAL_S)
                await within(DEADLINE_S, connection.execute("SELECT 1"), "checking the lock")
