"""Grants: they outlive the process, lapse with their instance, and are one cache's alone."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import URL, create_engine, delete, func, insert, select, update
from sqlalchemy.pool import NullPool

from pilotlight.cache import room
from pilotlight.cache.app import build
from pilotlight.cache.books import Books
from pilotlight.cache.forecasts import Forecasts
from pilotlight.cache.grants import Grant
from pilotlight.cache.keeper import Keeper
from pilotlight.cache.lender import Lender
from pilotlight.cache.measures import CacheMeasures
from pilotlight.cache.repository import Added, CacheRepository, Orphans
from pilotlight.cache.settings import CacheSettings, HostCopies
from pilotlight.cache.sole import NotSole
from pilotlight.cache.testing import (
    MEMORY,
    NODE,
    WORKER,
    Peers,
    answers,
    change,
    hear,
    heard,
    reserve,
    stage,
    start,
    stop,
)
from pilotlight.common.bus import Bus
from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import HostPoolFull, NoRoom, StaleCommand
from pilotlight.common.messages.room import (
    GRANT_SETTLED_SUBJECT,
    RELEASE_SUBJECT,
    GrantSettled,
    Release,
    Released,
)
from pilotlight.common.service import Application, Background
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.ids import Digest, Epoch, Generation, GrantId, InstanceId, ModelName
from pilotlight.policy.lending import LendingRules
from pilotlight.policy.scaling import ScalingRules
from pilotlight.policy.testing import worker

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_grants_outlive_the_process(
    settings: CacheSettings,
    make_context: MakeContext,
    bus: Bus,
    peers: Peers,
    database_settings: DatabaseSettingsOf,
) -> None:
    first = await build(make_context("cache", settings))
    await start(first)
    await until(lambda: answers(bus))
    await heard(bus, peers)
    granted = await reserve(bus, "kept", 600)
    await stop(first)
    second = await build(make_context("cache", settings))
    await start(second)
    await until(lambda: answers(bus))
    await heard(bus, peers)
    assert (await reserve(bus, "kept", 600)).grant_id == granted.grant_id
    context = make_context("cache", settings)
    database = Database(settings, "cache", context.clock)
    async with database.reading() as connection:
        rows = (await connection.execute(select(tables.grants.c.instance_id))).scalars().all()
    assert "kept" in rows
    await database.stop()
    await stop(second)


async def test_a_grant_grows_with_the_generation_of_its_stage(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    """What it has counts for what it asks; what others have goes for the rest alone."""
    idle = replace(stage("idle", 300), idle_s=60.0)
    await heard(bus, peers, idle)
    first = await reserve(bus, "a", 400)
    await heard(bus, peers, idle, replace(stage("a", 400), in_flight=1))
    assert (await reserve(bus, "a", 600)).grant_id == first.grant_id, (
        "the same generation is the same grant"
    )
    grown = await reserve(bus, "a", 600, generation=2)
    assert grown.grant_id != first.grant_id
    assert grown.evicted_instances == ()
    assert (await reserve(bus, "a", 600, generation=2)).grant_id == grown.grant_id
    with pytest.raises(NoRoom):
        await reserve(bus, "b", 900)
    larger = await reserve(bus, "a", 900, generation=3)
    assert larger.evicted_instances == (InstanceId("idle"),)
    await bus.request(RELEASE_SUBJECT, Release(grant_id=first.grant_id), Released, deadline_s=2.0)
    with pytest.raises(NoRoom):
        await reserve(bus, "b", 101)
    assert await reserve(bus, "b", 100)


async def test_a_cache_that_starts_anew_knows_of_which_generation_a_grant_is(
    settings: CacheSettings, make_context: MakeContext, bus: Bus, peers: Peers
) -> None:
    """A stage that is loaded at its old generation still brings the layers that it was granted more
    room for.
    """
    loaded = stage("a", 400)
    first = await build(make_context("cache", settings))
    await start(first)
    await until(lambda: answers(bus))
    await heard(bus, peers)
    await reserve(bus, "a", 400)
    await heard(bus, peers, loaded)
    grown = await reserve(bus, "a", 600, host=800, generation=2)
    await stop(first)
    second = await build(make_context("cache", settings))
    await start(second)
    await until(lambda: answers(bus))
    await heard(bus, peers, loaded)
    assert (await reserve(bus, "a", 900, generation=2)).grant_id == grown.grant_id, (
        "the same generation is the same grant"
    )
    with pytest.raises(HostPoolFull):
        await reserve(bus, "b", 100, host=300)
    await heard(bus, peers, replace(loaded, device_bytes=600, generation=Generation(2)))
    assert await reserve(bus, "b", 100, host=300)
    await stop(second)


async def test_a_worker_with_room_for_all_is_granted_the_host_pool_for_the_rest(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    """Its device's room does not change when it takes on the other layers."""
    await heard(bus, peers)
    first = await reserve(bus, "a", 400, parts=(100, 100))
    await heard(bus, peers, stage("a", 400))
    assert await reserve(bus, "b", 100, host=800)
    await bus.request(
        RELEASE_SUBJECT,
        Release(grant_id=(await reserve(bus, "b", 100, host=800)).grant_id),
        Released,
        deadline_s=2.0,
    )
    grown = await reserve(bus, "a", 400, parts=(100, 100, 100, 100), generation=2)
    assert grown.grant_id != first.grant_id
    with pytest.raises(HostPoolFull):
        await reserve(bus, "b", 100, host=800)
    assert await reserve(bus, "b", 100, host=600)


async def test_of_promised_room_nobody_else_gets_anything_and_its_row_is_told(
    cache: Application, settings: CacheSettings, bus: Bus, peers: Peers
) -> None:
    told: list[GrantSettled] = []
    await bus.hear(GRANT_SETTLED_SUBJECT, GrantSettled, told.append)
    await heard(bus, peers, replace(stage("idle", 900), idle_s=60.0))
    promised = await reserve(bus, "first", MEMORY, promise=True)
    assert not promised.written
    assert promised.evicted_instances == ("idle",)
    with pytest.raises(NoRoom):
        await reserve(bus, "second", 1, promise=True)
    await until(lambda: told)
    database = Database(settings, "cache", SystemClock())
    async with database.reading() as connection:
        rows = (await connection.execute(select(tables.grants.c.grant_id))).scalars().all()
    await database.stop()
    assert [(one.grant_id, one.code) for one in told] == [(rows[0], "")]
    assert rows == [promised.grant_id]
    again = await reserve(bus, "first", MEMORY)
    assert (again.grant_id, again.written) == (promised.grant_id, True)


async def test_a_second_cache_waits(
    cache: Application, settings: CacheSettings, make_context: MakeContext, bus: Bus, peers: Peers
) -> None:
    """With two that answer, NATS would hand each request to both, and the books of neither would be
    right.
    """
    context = make_context("cache", settings)
    standby = await build(context)
    await start(standby)
    await heard(bus, peers)
    await reserve(bus, "a", 100)
    assert context.metrics.get_sample_value("pilotlight_cache_grants") == 0
    await stop(standby)


async def test_a_cache_that_lost_its_lock_grants_nothing(
    cache: Application, settings: CacheSettings, bus: Bus, peers: Peers
) -> None:
    """Before it notices that the connection with the lock is gone, it may still be asked."""
    await heard(bus, peers)
    database = Database(settings, "cache", SystemClock())
    repository = CacheRepository(database)
    grant = Grant(
        grant_id=GrantId("late"),
        instance_id=InstanceId("late"),
        digest=Digest("d"),
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=1,
        host_bytes=0,
        expires_s=0.0,
    )
    with pytest.raises(NotSole):
        await repository.write_grants([Added(grant=grant, model=ModelName("m"), lease_s=30.0)], [])
    async with database.reading() as connection:
        assert (
            await connection.execute(
                select(tables.grants).where(tables.grants.c.grant_id == "late")
            )
        ).first() is None
    await database.stop()


async def test_an_old_leader_gets_no_room_and_evicts_nothing(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    await heard(bus, peers, replace(stage("idle", 900), idle_s=60.0))
    await reserve(bus, "new", 50, epoch=7)
    with pytest.raises(StaleCommand):
        await reserve(bus, "old", 900, epoch=6)
    assert peers.given_up == []
    peers.epoch = Epoch(9)
    await peers.report()

    async def refused() -> bool:
        try:
            await reserve(bus, "new", 50, epoch=8)
        except StaleCommand:
            return True
        return False

    await until(refused)


async def test_a_cache_that_starts_anew_refuses_an_old_leader(
    settings: CacheSettings, make_context: MakeContext, bus: Bus, peers: Peers, module_database: URL
) -> None:
    """It reads from the lease which scheduler leads, whatever its predecessor was asked and
    whatever reports say.
    """
    owner = create_engine(module_database, poolclass=NullPool)
    with owner.begin() as connection:
        connection.execute(delete(tables.lease))
        connection.execute(
            insert(tables.lease).values(id=1, holder="new", epoch=12, expires_at=func.now())
        )
    application = await build(make_context("cache", settings))
    await start(application)
    await until(lambda: answers(bus))
    await heard(bus, peers)
    with pytest.raises(StaleCommand):
        await reserve(bus, "old", 1, epoch=11)
    assert (await reserve(bus, "new", 1, epoch=12)).grant_id
    await stop(application)
    with owner.begin() as connection:
        connection.execute(delete(tables.lease))
    owner.dispose()


async def has_room(bus: Bus, instance: str, device: int, epoch: int = 0) -> bool:
    try:
        await reserve(bus, instance, device, epoch=epoch)
    except NoRoom:
        return False
    return True


async def test_the_grant_of_an_instance_that_has_ended_lapses_before_its_lease(
    cache: Application, bus: Bus, peers: Peers, module_database: URL
) -> None:
    """The word that gives it back was lost."""
    now = {"created_at": func.now(), "updated_at": func.now()}
    row = {"model": "m", "digest": "d", "generation": 1, "epoch": 1, "body": {}, **now}
    await heard(bus, peers)
    await reserve(bus, "lives", 500)
    await reserve(bus, "ended", 500)
    change(
        module_database,
        insert(tables.instances).values(instance_id="lives", state="fetching", **row),
    )
    change(
        module_database, insert(tables.instances).values(instance_id="ended", state="failed", **row)
    )
    try:
        await until(lambda: has_room(bus, "next", 500))
        assert not await has_room(bus, "another", 1)
    finally:
        change(module_database, delete(tables.instances))


async def test_a_newer_leader_finds_no_grants_that_its_predecessor_made_and_never_wrote_down(
    cache: Application, bus: Bus, peers: Peers, module_database: URL
) -> None:
    await heard(bus, peers)
    peers.epoch = Epoch(3)
    await reserve(bus, "never-written", MEMORY, epoch=3)
    with pytest.raises(NoRoom):
        await reserve(bus, "next", MEMORY, epoch=3)
    assert await has_room(bus, "next", MEMORY, epoch=4)


async def test_a_grant_whose_instance_is_never_written_down_lapses(
    cache: Application,
    bus: Bus,
    peers: Peers,
    module_database: URL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at once: between the grant and the row lies the scheduler's transaction.

    Nor because the time of day jumped.
    """
    await heard(bus, peers)
    await reserve(bus, "never-written", MEMORY)
    assert not await has_room(bus, "next", MEMORY)
    an_hour = timedelta(hours=1)
    change(
        module_database,
        update(tables.grants).values(
            created_at=func.now() - an_hour, expires_at=func.now() - an_hour
        ),
    )
    assert not await has_room(bus, "next", MEMORY)
    monkeypatch.setattr(room, "UNPLANNED_S", 0.1)
    await until(lambda: has_room(bus, "next", MEMORY))


async def test_a_worker_that_reports_while_rows_are_read_keeps_its_grant(bus: Bus) -> None:
    """A cache that has just been started hears of a worker, and of what it holds, in the middle of
    its first sweep.
    """
    clock = SystemClock()
    books = Books(listening_since_s=clock.monotonic_s())
    expired = Grant(
        grant_id=GrantId("expired"),
        instance_id=InstanceId("serves"),
        digest=Digest("serves"),
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=100,
        host_bytes=0,
        expires_s=clock.monotonic_s() - 1.0,
    )
    books.grants[expired.grant_id] = expired

    class Rows:
        shown = (stage("serves", 100),)

        async def orphans(self) -> Orphans:
            hear(books, replace(worker(), held=self.shown), clock.monotonic_s())
            return Orphans(over=frozenset(), unwritten=frozenset())

        async def write_grants(self, added: Sequence[Added], ended: Sequence[GrantId]) -> None:
            assert ended
            assert not self.shown

    rows = Rows()
    lender = Lender(books, bus, clock, LendingRules())
    maker = room.RoomMaker(
        books,
        rows,
        None,
        bus,
        clock,
        Background(),
        EvictionRules(min_residency_s=0.0),
        lender,
        Keeper(books, bus, clock, "i", HostCopies.OFF, Forecasts(books, ScalingRules())),
        CacheMeasures(books, CollectorRegistry()),
    )
    await maker.lapse()
    assert list(books.grants) == [expired.grant_id]
    rows.shown = ()
    hear(books, replace(worker(), held=()), clock.monotonic_s())
    await maker.lapse()
    assert not books.grants
