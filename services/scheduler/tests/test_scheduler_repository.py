"""A row of an instance is changed only by a writer that has seen it as it is."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest
from sqlalchemy import delete, func, insert, select

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.errors import Conflict
from pilotlight.common.settings import DatabaseSettings
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.reconcile import Change
from pilotlight.policy.ids import Epoch, Generation, WorkerId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.model import Stage
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import instance, model
from pilotlight.scheduler.applier import Applier
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.lease import Fence, Lease
from pilotlight.scheduler.repository import SchedulerRepository
from pilotlight.scheduler.rows import Move

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
        "body": to_row_json(one),
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
            await repository.move([Move(before=before, after=after)])
    else:
        await repository.move([Move(before=before, after=after)])
    async with database.reading() as connection:
        generation = (await connection.execute(select(tables.instances.c.generation))).scalar_one()
    assert generation == (now.generation if seen else after.generation)
    await lease.give_back(epoch)


async def test_instances_that_a_group_became_are_read_by_the_next_leader(
    database: Database,
) -> None:
    """With their model, from the decision that made them; the group as it is from then on."""
    before = replace(
        instance(state=InstanceState.CONSOLIDATING), generation=Generation(2), epoch=Epoch(4)
    )
    places = tuple(
        replace(before.placements[0], worker_id=WorkerId(f"w{at}"), held=part)
        for at, part in enumerate((Stage(0, 2), Stage(2, 4)))
    )
    before = replace(before, placements=places, targets=2)
    await stored(database, before)
    lease = Lease(database, "leader")
    epoch = await lease.take(Epoch(5))
    assert epoch is not None
    clock = SystemClock()
    book, effects = Book(), Unheard()
    book.put(Record(instance=before, model=model()))
    repository = SchedulerRepository(database, Fence(database, "leader", epoch), clock)
    applier = Applier(
        epoch=epoch,
        clock=clock,
        book=book,
        repository=repository,
        publisher=effects,
        cold_starts=effects,
        effects=effects,
    )
    change = Change(
        instance_id=before.instance_id,
        events=(InstanceEvent.CONSOLIDATION_DONE,),
        reason="a worker has the whole model",
        placements=places[:1],
        become=places[1:],
        targets=1,
    )
    await applier.apply((change,))
    found = {one.instance.instance_id: one for one in (await repository.load()).instances}
    (new,) = (one for name, one in found.items() if name != before.instance_id)
    assert new.model.digest == before.digest
    assert (new.instance.lead, new.instance.state) == ("w1", InstanceState.FETCHING)
    assert new.instance.placements[0].grown_from == before.instance_id
    assert {one.instance.instance_id for one in book.rows()} == {before.instance_id, *found}
    assert effects.published == {*found, before.instance_id}
    await lease.give_back(epoch)


class Unheard:
    """Who is told of what became of instances."""

    def __init__(self) -> None:
        self.published = set[str]()

    def publish(self, one: Instance, _: object = None) -> None:
        self.published.add(one.instance_id)

    def is_awaited(self, _: str) -> bool:
        return False

    def release(self, _: str) -> None:
        """Grants are not looked at here."""
