"""The right to grant, on a real database."""

import asyncio

import pytest
from sqlalchemy import func, select, text

from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.sole import GRANTING, LOCK, SOLE, wait_for_grants
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.session import Database
from pilotlight.common.testing import until

pytestmark = pytest.mark.anyio


async def test_a_grant_that_waited_for_a_successor_looks_for_the_lock_behind_it(
    settings: CacheSettings,
) -> None:
    """What it saw before it waited may be over: the successor has read which grants there are."""
    database = Database(settings, "cache", SystemClock())
    held = select(SOLE)
    async with database.asking() as holder, database.asking() as observer:
        pid = (await holder.execute(select(func.pg_backend_pid()))).scalar_one()
        await holder.execute(select(func.pg_advisory_lock(LOCK)))

        async def granted() -> bool:
            return bool(await database.write_at_once(held, {"holder_pid": pid}))

        async def waits() -> bool:
            waiting = text(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
                "AND ((classid::bigint << 32) | objid::bigint) = :key"
            )
            return (await observer.execute(waiting, {"key": GRANTING})).scalar_one() == 1

        assert await granted()
        async with database.unit_of_work() as successor:
            await wait_for_grants(successor.connection)
            late = asyncio.create_task(granted())
            await until(waits)
            await holder.execute(select(func.pg_advisory_unlock(LOCK)))
        assert not await late
    await database.stop()
