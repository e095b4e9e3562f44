"""Exactly one cache answers at a time: two that count the same free bytes would grant them twice.

The right to answer is a session advisory lock in PostgreSQL: it ends with its connection, whatever
happens to the process. A cache that has lost it without knowing could still grant; so the statement
that writes a grant checks the lock, and a successor reads the open grants only when no such
statement is under way.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import psycopg
import structlog
from sqlalchemy import column, text
from sqlalchemy.ext.asyncio import AsyncConnection

from pilotlight.common.db.session import conninfo_of, service_url
from pilotlight.common.errors import PilotlightError, TransientError
from pilotlight.common.service import Background
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.waiting import Backoff, cancel_all, pause, within

log = structlog.get_logger()

LOCK = 7_016_150_014
"""Key of the advisory lock that the answering cache holds."""
GRANTING = 7_016_150_015
"""Key of the lock that a grant shares, and a successor takes alone."""
SOLE = (
    text(
        "SELECT pid FROM (SELECT (SELECT pid FROM pg_locks WHERE granting.taken IS NOT NULL "
        "AND locktype = 'advisory' AND granted AND pid = :holder_pid "
        "AND ((classid::bigint << 32) | objid::bigint) = :lock) AS pid FROM "
        "(SELECT pg_advisory_xact_lock_shared(:granting)::text AS taken OFFSET 0) AS granting "
        "OFFSET 0) AS holder WHERE pid IS NOT NULL"
    )
    .bindparams(lock=LOCK, granting=GRANTING)
    .columns(column("pid"))
    .cte("sole")
)
"""The backend that holds the lock if it is ``:holder_pid``, in a statement that writes what only
the sole cache may, if this has its row. It looks for the lock when it has the other one: the inner
query needs what taking that gave."""
CHECK_INTERVAL_S = 1.0
DEADLINE_S = 5.0


class SoleHolder:
    """Calls ``begin`` when this process holds the lock, ``end`` when it no longer does; a
    component.
    """

    def __init__(
        self,
        settings: DatabaseSettings,
        background: Background,
        begin: Callable[[int], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        url = service_url(settings, "cache")
        self._conninfo = conninfo_of(url, connect_timeout=5)
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
                log.warning(
                    "the cache's lock cannot be held", action="cache_lock_failed", error=str(error)
                )
            await self._end()
            await pause(self._backoff.delay_s(attempt, self._rng))
            attempt += 1

    async def _hold(self) -> None:
        """Return when another cache has the lock; raise when the connection that holds ours is
        lost.
        """
        connecting = psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        async with await within(DEADLINE_S, connecting, "connecting to the database") as connection:
            taken = await within(
                DEADLINE_S,
                connection.execute("SELECT pg_try_advisory_lock(%s)", (LOCK,)),
                "taking the lock",
            )
            row = await taken.fetchone()
            if row is None or not row[0]:
                return
            log.info("this cache answers", action="cache_active")
            await self._begin(connection.info.backend_pid)
            while True:
                await pause(CHECK_INTERVAL_S)
                await within(DEADLINE_S, connection.execute("SELECT 1"), "checking the lock")


class NotSole(TransientError):
    """Another cache answers by now; nothing was written."""

    code = "not_sole"


async def wait_for_grants(connection: AsyncConnection) -> None:
    """Within a successor's transaction: every grant of its predecessor is committed or will be
    refused.
    """
    await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": GRANTING})
