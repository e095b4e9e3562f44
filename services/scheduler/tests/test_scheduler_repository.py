"""A row of an instance is changed only by a writer that has seen it as it is."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest
from sqlalchemy import delete, func, insert, select

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import Conflict
from pilotlight.common.settings import DatabaseSettings
from pilotlight.policy.ids import Epoch, Generation
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import instance
from pilotlight.scheduler.lease import Fence, Lease
from pilotlight.scheduler.repository import SchedulerRepository

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def database(
    database_settings: Callable[[str], DatabaseSettings],
) -> AsyncGenerator[Database]:
    database = Database(database_settings("scheduler"), "scheduler", SystemClock())
    await database.start()
    yield database
    async with database.unit_of_work() as work:
        await work.connection.execute(delete(tables.instances))
    await database.stop()


async def stored(database: Database, one: Instance) -> None:
    row = {
        "instance_id": one.instance_id,
        "model": one.model,
        "digest": one.digest,
        "state": one.state.value,
        "generation": one.generation,
        "epoch": one.epoch,
        "body": {},
        "created_at": func.now(),
        "updated_at": func.now(),
    }
    async with database.unit_of_work() as work:
        await work.connection.execute(insert(tables.instances).values(**row))


@pytest.mark.parametrize(
    "seen",
    [{"generation": Generation(1)}, {"epoch": Epoch(3)}, {"state": InstanceState.LOADING}, {}],
    ids=["generation", "epoch", "state", "as it is"],
)
async def test_a_row_moves_only_from_what_was_seen(
    database: Database, seen: dict[str, object]
) -> None:
    now = replace(instance(state=InstanceState.READY), generation=Generation(2), epoch=Epoch(4))
    await stored(database, now)
    lease = Lease(database, "leader")
    epoch = await lease.take(Epoch(5))
    assert epoch is not None
    repository = SchedulerRepository(database, Fence(database, "leader", epoch), SystemClock())
    before = replace(now, **seen)
    after = replace(now, generation=Generation(3), epoch=epoch)
    if seen:
        with pytest.raises(Conflict):
            await repository.move(before, after)
    else:
        await repository.move(before, after)
    async with database.reading() as connection:
        generation = (await connection.execute(select(tables.instances.c.generation))).scalar_one()
    assert generation == (now.generation if seen else after.generation)
    await lease.give_back(epoch)
