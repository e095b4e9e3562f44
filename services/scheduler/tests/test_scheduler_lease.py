"""The lease, on a real PostgreSQL: one leader, by the database's clock, and no write after it is
lost.
"""

from collections.abc import AsyncGenerator, Callable

import pytest
from sqlalchemy import func, insert, select, update

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, NotLeader
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.testing import until
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler import lease
from pilotlight.scheduler.election import RETRY_S
from pilotlight.scheduler.lease import DEADLINE_S, IDLE_S, LEASE_S, RENEW_S, Fence, Lease

pytestmark = pytest.mark.anyio

STOPPED_S = 0.2
ESTIMATE = {"model": "m", "device_kind": "sim", "body": {}}


@pytest.fixture
async def database(
    database_settings: Callable[[str], DatabaseSettings],
) -> AsyncGenerator[Database]:
    database = Database(database_settings("scheduler"), "scheduler", SystemClock())
    await database.start()
    async with database.unit_of_work() as work:
        await work.connection.execute(tables.lease.delete())
        await work.connection.execute(tables.estimates.delete())
    yield database
    await database.stop()


async def expire(database: Database) -> None:
    async with database.unit_of_work() as work:
        await work.connection.execute(
            update(tables.lease).values(expires_at=func.clock_timestamp())
        )


async def test_one_leads_and_the_next_has_a_higher_epoch(database: Database) -> None:
    first, second = Lease(database, "first"), Lease(database, "second")
    assert await first.take(Epoch(1)) == 1
    assert await second.take(Epoch(1)) is None
    assert await first.renew(Epoch(1))
    await expire(database)
    assert not await first.renew(Epoch(1)), (
        "an expired lease is lost even before another scheduler takes it"
    )
    assert await second.take(Epoch(1)) == 2
    assert not await first.renew(Epoch(1))
    assert not await second.renew(Epoch(1)), "the epoch before is not mine"
    await second.give_back(Epoch(2))
    assert await first.take(Epoch(1)) == 3


async def test_a_new_epoch_is_above_every_one_that_was_obeyed(database: Database) -> None:
    only = Lease(database, "only")
    assert await only.take(Epoch(9)) == 9
    assert await only.take(Epoch(1)) == 10, "its own holder may begin anew at once"


async def test_a_stale_leader_cannot_write(database: Database) -> None:
    old, new = Lease(database, "old"), Lease(database, "new")
    epoch = await old.take(Epoch(1))
    assert epoch is not None
    fence = Fence(database, "old", epoch)
    async with fence.unit_of_work() as work:
        await work.connection.execute(insert(tables.estimates).values(**ESTIMATE))
    await expire(database)
    with pytest.raises(NotLeader):
        async with fence.unit_of_work() as work:
            await work.connection.execute(update(tables.estimates).values(body={"late": True}))
    await new.take(Epoch(1))
    with pytest.raises(NotLeader):
        async with fence.unit_of_work() as work:
            await work.connection.execute(update(tables.estimates).values(body={"late": True}))
    async with database.reading() as connection:
        assert (await connection.execute(select(tables.estimates.c.body))).scalar_one() == {}


async def test_the_lease_cannot_change_hands_while_a_fenced_write_is_under_way(
    database: Database,
) -> None:
    old, new = Lease(database, "old"), Lease(database, "new")
    epoch = await old.take(Epoch(1))
    assert epoch is not None
    async with Fence(database, "old", epoch).unit_of_work() as work:
        await work.connection.execute(insert(tables.estimates).values(**ESTIMATE))
        with pytest.raises(DatabaseUnavailable, match="could not obtain lock"):
            async with database.unit_of_work() as taking:
                await taking.connection.execute(select(tables.lease).with_for_update(nowait=True))
    await expire(database)
    assert await new.take(Epoch(1)) == 2


def test_a_try_to_renew_that_is_not_answered_leaves_time_for_another() -> None:
    assert RENEW_S + DEADLINE_S + RETRY_S < LEASE_S
    assert LEASE_S - RENEW_S >= 1.5, "for so long a holder, or its database, may stand still"


async def test_a_standby_knows_how_long_it_has_to_wait(database: Database) -> None:
    held, waiting = Lease(database, "held"), Lease(database, "waiting")
    epoch = await held.take(Epoch(1))
    assert epoch is not None
    assert await waiting.take(Epoch(1)) is None
    assert 0 < waiting.left_s <= LEASE_S
    await held.give_back(epoch)
    assert await waiting.take(Epoch(1)) == 2


@pytest.mark.slow
async def test_a_leader_that_is_stopped_in_the_middle_of_a_write_does_not_keep_the_lease(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the row's lock: the database takes it back, and what was half written is not
    written.
    """
    assert IDLE_S < LEASE_S
    monkeypatch.setattr(lease, "IDLE_S", STOPPED_S)
    old, new = Lease(database, "old"), Lease(database, "new")
    epoch = await old.take(Epoch(1))
    assert epoch is not None

    async def write_and_stop() -> None:
        async with Fence(database, "old", epoch).unit_of_work() as work:
            await work.connection.execute(insert(tables.estimates).values(**ESTIMATE))
            await until(lambda: lock_is_free(database))
            await expire(database)
            assert await new.take(Epoch(1)) == epoch + 1

    with pytest.raises(DatabaseUnavailable):
        await write_and_stop()
    async with database.reading() as connection:
        assert (await connection.execute(select(tables.estimates.c.body))).all() == []


async def lock_is_free(database: Database) -> bool:
    try:
        async with database.unit_of_work() as work:
            await work.connection.execute(select(tables.lease).with_for_update(nowait=True))
    except DatabaseUnavailable:
        return False
    return True
