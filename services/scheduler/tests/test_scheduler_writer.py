"""What is written at the same time is one transaction; what cannot be written is alone in that."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Executable, delete, select, text, update

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.events import Event
from pilotlight.common.db.session import Database
from pilotlight.common.errors import Conflict, NotLeader
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.testing import until
from pilotlight.policy.ids import Epoch
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import instance
from pilotlight.scheduler.lease import Fence, Lease
from pilotlight.scheduler.rows import Move, Rows
from pilotlight.scheduler.writer import Writer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Counted(Fence):
    """Counts transactions."""

    count = 0

    async def write_at_once(
        self, statement: Executable, parameters: Mapping[str, Any], events: Sequence[Event] = ()
    ) -> list[tuple[Any, ...]]:
        """One more."""
        self.count += 1
        return await super().write_at_once(statement, parameters, events)


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


@pytest.fixture
async def fence(database: Database) -> AsyncGenerator[Counted]:
    lease = Lease(database, "leader")
    epoch = await lease.take(Epoch(1))
    assert epoch is not None
    yield Counted(database, "leader", epoch)
    await lease.give_back(epoch)


async def states(database: Database) -> dict[str, str]:
    table = tables.instances
    async with database.reading() as connection:
        rows = (await connection.execute(select(table.c.instance_id, table.c.state))).all()
    return {row.instance_id: row.state for row in rows}


def many(count: int) -> list[Instance]:
    return [
        instance(instance_id=f"i{at}", state=InstanceState.FETCHING, worker_id=f"w{at}")
        for at in range(count)
    ]


def moved(one: Instance, *path: InstanceState) -> list[Rows]:
    """The changes of one instance, one after the other."""
    steps = [one, *(replace(one, state=state) for state in path)]
    return [Rows(moves=(Move(before=before, after=after),)) for before, after in pairwise(steps)]


async def written(writer: Writer, each: Sequence[Rows]) -> list[BaseException | None]:
    """All at the same time; what came of each."""
    return await asyncio.gather(*(writer.write(rows) for rows in each), return_exceptions=True)


async def test_writes_that_wait_share_a_transaction(database: Database, fence: Counted) -> None:
    writer, ones = Writer(fence), many(40)
    assert await written(writer, [Rows(instances=(one,)) for one in ones]) == [None] * 40
    assert await states(database) == {one.instance_id: "fetching" for one in ones}
    assert fence.count == 2, "the first one began at once, all others came while it was under way"


async def test_a_row_that_is_another_one_is_the_matter_of_its_writer_alone(
    database: Database, fence: Counted
) -> None:
    writer, ones = Writer(fence), many(5)
    await written(writer, [Rows(instances=tuple(ones))])
    wrong = replace(ones[2], state=InstanceState.READY)
    changes = [
        rows for one in (*ones[:2], wrong, *ones[3:]) for rows in moved(one, InstanceState.LOADING)
    ]
    met = await written(writer, changes)
    assert [type(one) for one in met] == [type(None)] * 2 + [Conflict] + [type(None)] * 2
    assert await states(database) == {
        one.instance_id: "fetching" if one is ones[2] else "loading" for one in ones
    }


async def test_changes_of_one_row_are_made_in_their_order(
    database: Database, fence: Counted
) -> None:
    writer, (one,) = Writer(fence), many(1)
    first, second = moved(one, InstanceState.LOADING, InstanceState.READY)
    assert await written(writer, [Rows(instances=(one,)), first, second]) == [None] * 3
    assert await states(database) == {"i0": "ready"}


async def test_after_the_term_nothing_is_written(database: Database, fence: Counted) -> None:
    await Lease(database, "leader").give_back(fence.epoch)
    writer = Writer(fence)
    met = await written(writer, [Rows(instances=(one,)) for one in many(3)])
    assert [type(one) for one in met] == [NotLeader] * 3
    assert await states(database) == {}


async def test_a_write_that_waited_for_a_taker_looks_at_the_lease_behind_it(
    database: Database, fence: Counted
) -> None:
    """What it saw before it waited is over: another leads by now."""
    writer, (one,) = Writer(fence), many(1)
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND usename = 'pilotlight_scheduler' AND wait_event_type = 'Lock'"
    )
    async with database.asking() as observer:

        async def waits() -> bool:
            return (await observer.execute(waiting)).scalar_one() == 1

        async with database.unit_of_work() as taker:
            taken = update(tables.lease).values(holder="next", epoch=tables.lease.c.epoch + 1)
            await taker.connection.execute(taken)
            late = asyncio.create_task(writer.write(Rows(instances=(one,))))
            await until(waits)
            assert not late.done()
        with pytest.raises(NotLeader):
            await late
    assert await states(database) == {}
    async with database.unit_of_work() as work:
        await work.connection.execute(delete(tables.lease))
