"""Making room, against real NATS and PostgreSQL, with a worker and a loader played by the test."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import URL, Executable, create_engine, delete, func, insert, select, update
from sqlalchemy.pool import NullPool

from pilotlight.cache import room
from pilotlight.cache.app import build
from pilotlight.cache.books import Books, Grant
from pilotlight.cache.repository import CacheRepository, Orphans
from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.sole import NotSole
from pilotlight.cache.testing import hear
from pilotlight.common.bus import Bus
from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import BusUnavailable, HostPoolFull, NoRoom, NoWorker, StaleCommand
from pilotlight.common.messages.reports import LoaderReport, WorkerReport, loader_report_subject, worker_report_subject
from pilotlight.common.messages.room import (
    RELEASE_SUBJECT,
    RESERVE_SUBJECT,
    Drop,
    Dropped,
    GivenUp,
    GiveUp,
    Release,
    Released,
    Reserve,
    Reserved,
    drop_subject,
    give_up_subject,
)
from pilotlight.common.service import Application, Background
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.dataplane.extents import Extent, Extents
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.testing import copy, held, node, worker
from pilotlight.policy.types import (
    Digest,
    Epoch,
    GrantId,
    HeldStage,
    InstanceId,
    ModelName,
    NodeFacts,
    NodeId,
    WorkerFacts,
    WorkerId,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
WORKER, NODE = WorkerId("w0"), NodeId("n0")
MEMORY = 1000


def stage(instance: str, size: int) -> HeldStage:
    return held(instance, instance, device_bytes=size)


class Peers:
    """A worker and a loader that do what they are told, and remember it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.facts = worker()
        self.node = node(pool_bytes=MEMORY)
        self.busy: set[str] = set()
        self.epoch = Epoch(1)
        self.given_up: list[GiveUp] = []
        self.dropped: list[Drop] = []
        self.pool: Extents | None = None
        """Where its copies lie, where that matters."""
        self.places: dict[str, Extent] = {}

    async def start(self) -> None:
        await self.bus.serve(give_up_subject(WORKER), GiveUp, self.give_up)
        await self.bus.serve(drop_subject(NODE), Drop, self.drop)

    async def give_up(self, request: GiveUp) -> GivenUp:
        self.given_up.append(request)
        gone = tuple(one for one in request.instance_ids if one not in self.busy)
        self.facts = replace(self.facts, held=tuple(one for one in self.facts.held if one.instance_id not in gone))
        return GivenUp(instance_ids=gone)

    async def drop(self, request: Drop) -> Dropped:
        self.dropped.append(request)
        gone = [one for one in self.node.copies if one.digest in request.digests]
        kept = tuple(one for one in self.node.copies if one not in gone)
        free = self.node.pool_free_bytes + sum(one.size_bytes for one in gone)
        self.node = replace(self.node, copies=kept, pool_free_bytes=free)
        for one in gone:
            if self.pool is not None:
                self.pool.give_back(self.places[one.digest])
        fits = self.pool is None or request.wanted is None or self.pool.fits(request.wanted.part_bytes)
        return Dropped(digests=tuple(one.digest for one in gone), fits=fits)

    def lay_out(self, *ranges: tuple[str, int]) -> NodeFacts:
        """Copies with these sizes in this order in the host pool; a range without a name is free."""
        self.pool, end = Extents(MEMORY, 1), 0
        for name, size in ranges:
            if name:
                taken = self.pool.take_at(end, size)
                assert taken is not None
                self.places[f"d-{name}"] = taken
            end += size
        copies = tuple(replace(copy(name, size_bytes=size), idle_s=float(size)) for name, size in ranges if name)
        free, largest = self.pool.free_bytes, self.pool.largest_free_bytes
        return replace(node(pool_bytes=MEMORY), copies=copies, pool_free_bytes=free, pool_largest_free_bytes=largest)

    async def report(self, facts: WorkerFacts | None = None, where: NodeFacts | None = None) -> None:
        self.facts = facts or self.facts
        self.node = where or self.node
        worker_report = WorkerReport(facts=self.facts, incarnation="i", epoch_seen=self.epoch)
        await self.bus.publish(worker_report_subject(WORKER), worker_report)
        await self.bus.publish(loader_report_subject(NODE), LoaderReport(facts=self.node, incarnation="i", epoch_seen=self.epoch))


@pytest.fixture
async def peers(bus: Bus) -> Peers:
    peers = Peers(bus)
    await peers.start()
    return peers


@pytest.fixture
def settings(database_settings: DatabaseSettingsOf, tmp_path: Path) -> CacheSettings:
    url = database_settings("cache").database_url
    return CacheSettings(database_url=url, run_dir=tmp_path, min_residency_s=0.0)


@pytest.fixture(autouse=True)
async def without_grants(settings: CacheSettings) -> None:
    """The database is the module's; its grants are each test's own."""
    database = Database(settings, "cache", SystemClock())
    async with database.unit_of_work() as work:
        await work.connection.execute(delete(tables.grants))
    await database.stop()


@pytest.fixture
async def cache(settings: CacheSettings, make_context: MakeContext, bus: Bus, peers: Peers):
    application = await build(make_context("cache", settings))
    await start(application)
    await until(lambda: answers(bus))
    yield application
    await stop(application)


async def start(application: Application) -> None:
    for component in application.components:
        await component.start()


async def stop(application: Application) -> None:
    for component in reversed(application.components):
        await component.stop()


async def answers(bus: Bus) -> bool:
    try:
        await bus.request(RELEASE_SUBJECT, Release(grant_id="none"), Released, deadline_s=1.0)
    except BusUnavailable:
        return False
    return True


async def reserve(
    bus: Bus, instance: str, device: int, host: int = 0, epoch: int = 0, parts: tuple[int, ...] | None = None
) -> Reserved:
    message = Reserve(
        instance_id=InstanceId(instance),
        model=ModelName(instance),
        digest=Digest(f"d-{instance}"),
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=device,
        host_part_bytes=parts or (host,),
        host_parts=tuple(range(len(parts))) if parts else (),
        lease_s=30.0,
        epoch=Epoch(epoch),
    )
    return await bus.request(RESERVE_SUBJECT, message, Reserved, deadline_s=5.0)


async def heard(bus: Bus, peers: Peers, *stages: HeldStage, where: NodeFacts | None = None) -> None:
    """Report, and wait until the cache has heard: a tiny reservation is answered by a worker that it knows."""
    await peers.report(worker(held_stages=stages), where)

    async def known() -> bool:
        await peers.report()
        try:
            probe = await reserve(bus, "probe", 0)
        except NoWorker:
            return False
        await bus.request(RELEASE_SUBJECT, Release(grant_id=probe.grant_id), Released, deadline_s=2.0)
        return True

    await until(known)


async def test_grants_room_once_for_each_stage(cache: Application, bus: Bus, peers: Peers) -> None:
    await heard(bus, peers)
    first = await reserve(bus, "a", 600)
    assert (await reserve(bus, "a", 600)).grant_id == first.grant_id
    with pytest.raises(NoRoom):
        await reserve(bus, "b", 600)
    await bus.request(RELEASE_SUBJECT, Release(grant_id=first.grant_id), Released, deadline_s=2.0)
    assert (await reserve(bus, "b", 600)).grant_id != first.grant_id


async def test_evicts_the_idle_and_spares_the_busy(cache: Application, bus: Bus, peers: Peers) -> None:
    old, young = replace(stage("old", 500), idle_s=60.0), replace(stage("young", 500), idle_s=1.0)
    await heard(bus, peers, old, young)
    granted = await reserve(bus, "new", 400)
    assert granted.evicted_instances == (InstanceId("old"),)
    assert [one.instance_id for one in peers.facts.held] == ["young"]


async def test_evicts_no_more_than_is_needed(cache: Application, bus: Bus, peers: Peers) -> None:
    """The victims' own grants are still open: their scheduler has not heard of their end."""
    await heard(bus, peers)
    for name in ("a", "b", "c"):
        await reserve(bus, name, 300)
    idle = [replace(stage(name, 300), idle_s=60.0 - age) for age, name in enumerate(("a", "b", "c"))]
    await heard(bus, peers, *idle)
    granted = await reserve(bus, "new", 400)
    assert granted.evicted_instances == (InstanceId("a"),)
    assert [one.instance_id for one in peers.facts.held] == ["b", "c"]


async def test_a_refused_victim_is_replanned_and_in_the_end_there_is_no_room(cache: Application, bus: Bus, peers: Peers) -> None:
    peers.busy = {"a"}
    await heard(bus, peers, replace(stage("a", 900), idle_s=60.0))
    with pytest.raises(NoRoom):
        await reserve(bus, "new", 400)
    assert [one.instance_id for one in peers.facts.held] == ["a"]


async def test_drops_copies_from_the_host_pool(cache: Application, bus: Bus, peers: Peers) -> None:
    await heard(bus, peers, where=node(pool_bytes=MEMORY, copies=(copy("x", size_bytes=800),)))
    granted = await reserve(bus, "new", 100, host=700)
    assert granted.dropped_copies == (Digest("d-x"),)


async def test_frees_more_where_free_bytes_do_not_lie_in_a_row(cache: Application, bus: Bus, peers: Peers) -> None:
    """400 bytes are free, but no 300 of them in a row: the least recently used copy goes, then the next, until the parts fit."""
    await heard(bus, peers, where=peers.lay_out(("", 200), ("b", 290), ("", 200), ("a", 310)))
    granted = await reserve(bus, "new", 100, parts=(100, 300))
    assert granted.dropped_copies == ("d-a",)
    assert [drop.digests for drop in peers.dropped] == [(), ("d-a",)]
    assert [drop.wanted and drop.wanted.part_bytes for drop in peers.dropped] == [(100, 300)] * 2


async def test_goes_on_until_the_parts_fit(cache: Application, bus: Bus, peers: Peers) -> None:
    """Room is made by worth, not by place: what went first was between copies that stay."""
    ranges = (("e", 200), ("a", 110), ("d", 190), ("b", 105), ("c", 195), ("", 200))
    facts = peers.lay_out(*ranges)
    idle_s = {"d-a": 90.0, "d-b": 80.0, "d-c": 70.0, "d-d": 60.0, "d-e": 50.0}
    await heard(bus, peers, where=replace(facts, copies=tuple(replace(one, idle_s=idle_s[one.digest]) for one in facts.copies)))
    granted = await reserve(bus, "new", 100, parts=(300,))
    assert granted.dropped_copies == ("d-a", "d-b", "d-c")
    assert [drop.digests for drop in peers.dropped] == [("d-a",), ("d-b", "d-c")]


async def test_asks_the_loader_for_nothing_where_free_bytes_lie_in_a_row(cache: Application, bus: Bus, peers: Peers) -> None:
    await heard(bus, peers, where=peers.lay_out(("", 100), ("a", 300), ("", 600)))
    assert (await reserve(bus, "new", 100, parts=(300, 300))).dropped_copies == ()
    assert peers.dropped == []
    # Those 600 are promised now; the 100 that are left lie in a row as far as the loader can tell, and it is asked.
    assert (await reserve(bus, "small", 100, parts=(100,))).dropped_copies == ()
    assert [drop.digests for drop in peers.dropped] == [()]


async def test_copies_in_use_may_keep_free_bytes_apart(cache: Application, bus: Bus, peers: Peers) -> None:
    facts = peers.lay_out(("", 300), ("a", 100), ("", 300), ("b", 100), ("", 200))
    await heard(bus, peers, where=replace(facts, copies=tuple(replace(one, leases=1) for one in facts.copies)))
    with pytest.raises(HostPoolFull, match="in a row") as caught:
        await reserve(bus, "new", 100, parts=(400,))
    assert caught.value.retry_after_s
    assert [drop.digests for drop in peers.dropped] == [()]
    assert (await reserve(bus, "new", 100, parts=(300, 300))).dropped_copies == ()


async def test_a_scheduler_of_the_release_before_gets_its_grant(cache: Application, bus: Bus, peers: Peers) -> None:
    """It does not say which parts it wants; whether they fit is seen when they are fetched."""
    await heard(bus, peers, where=peers.lay_out(("", 200), ("b", 290), ("", 200), ("a", 310)))
    assert (await reserve(bus, "new", 100, host=300)).dropped_copies == ()


async def test_says_when_a_model_can_never_fit(cache: Application, bus: Bus, peers: Peers) -> None:
    await heard(bus, peers)
    with pytest.raises(NoWorker):
        await reserve(bus, "huge", MEMORY + 1)
    with pytest.raises(HostPoolFull):
        await reserve(bus, "huge", 1, host=MEMORY + 1)


async def test_grants_outlive_the_process(
    settings: CacheSettings, make_context: MakeContext, bus: Bus, peers: Peers, database_settings: DatabaseSettingsOf
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


async def test_a_second_cache_waits(
    cache: Application, settings: CacheSettings, make_context: MakeContext, bus: Bus, peers: Peers
) -> None:
    """With two that answer, NATS would hand each request to both, and the books of neither would be right."""
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
    message = Reserve(
        instance_id=InstanceId("late"),
        model=ModelName("m"),
        digest=Digest("d"),
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=1,
        host_part_bytes=(),
        lease_s=30.0,
    )
    grant = Grant(
        grant_id=GrantId("late"),
        instance_id=message.instance_id,
        digest=message.digest,
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=1,
        host_bytes=0,
        expires_s=0.0,
    )
    with pytest.raises(NotSole):
        await repository.add_grant(grant, message, [])
    async with database.reading() as connection:
        assert (await connection.execute(select(tables.grants).where(tables.grants.c.grant_id == "late"))).first() is None
    await database.stop()


async def test_an_old_leader_gets_no_room_and_evicts_nothing(cache: Application, bus: Bus, peers: Peers) -> None:
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
    """It reads from the lease who leads, whatever its predecessor was asked and whatever reports say."""
    owner = create_engine(module_database, poolclass=NullPool)
    with owner.begin() as connection:
        connection.execute(delete(tables.lease))
        connection.execute(insert(tables.lease).values(id=1, holder="new", epoch=12, expires_at=func.now()))
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


def change(where: URL, statement: Executable) -> None:
    """Write as the database's owner."""
    engine = create_engine(where, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(statement)
    engine.dispose()


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
    change(module_database, insert(tables.instances).values(instance_id="lives", state="fetching", **row))
    change(module_database, insert(tables.instances).values(instance_id="ended", state="failed", **row))
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
    cache: Application, bus: Bus, peers: Peers, module_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: between the grant and the row lies the scheduler's transaction. Nor because the time of day jumped."""
    await heard(bus, peers)
    await reserve(bus, "never-written", MEMORY)
    assert not await has_room(bus, "next", MEMORY)
    an_hour = timedelta(hours=1)
    change(module_database, update(tables.grants).values(created_at=func.now() - an_hour, expires_at=func.now() - an_hour))
    assert not await has_room(bus, "next", MEMORY)
    monkeypatch.setattr(room, "UNPLANNED_S", 0.1)
    await until(lambda: has_room(bus, "next", MEMORY))


async def test_a_worker_that_reports_while_rows_are_read_keeps_its_grant(bus: Bus) -> None:
    """A cache that has just been started hears of a worker, and of what it holds, in the middle of its first sweep."""
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

        async def end_grants(self, grant_ids: list[GrantId]) -> None:
            assert not self.shown

    rows = Rows()
    maker = room.RoomMaker(books, rows, bus, clock, Background(), Lru(), EvictionRules(min_residency_s=0.0))
    await maker.lapse()
    assert list(books.grants) == [expired.grant_id]
    rows.shown = ()
    hear(books, replace(worker(), held=()), clock.monotonic_s())
    await maker.lapse()
    assert not books.grants


async def test_a_node_that_drains_gets_no_grant_and_its_copies_are_struck(
    cache: Application, bus: Bus, peers: Peers, module_database: URL
) -> None:
    """A copy goes when nobody reads it and no instance there has a grant for it; afterwards the node is granted room again."""

    def struck() -> set[str]:
        engine = create_engine(module_database, poolclass=NullPool)
        of_node = select(tables.evictions.c.subject).where(tables.evictions.c.reason == "its node is being drained")
        with engine.connect() as connection:
            found = set(connection.execute(of_node).scalars())
        engine.dispose()
        return found

    copies = (copy("idle", size_bytes=10), replace(copy("read", size_bytes=10), leases=1), copy("used", size_bytes=10))
    await heard(bus, peers, where=node(pool_bytes=MEMORY, copies=copies))
    granted = await reserve(bus, "used", 100)
    change(module_database, insert(tables.drains).values(node_id=NODE, key_id="", requested_at=func.now()))
    try:
        await until(lambda: [one.digest for one in peers.node.copies] == ["d-read", "d-used"])
        with pytest.raises(NoRoom, match="is being drained"):
            await reserve(bus, "new", 1)
        assert (await reserve(bus, "used", 100)).grant_id == granted.grant_id
        await bus.request(RELEASE_SUBJECT, Release(grant_id=granted.grant_id), Released, deadline_s=2.0)
        await until(lambda: [one.digest for one in peers.node.copies] == ["d-read"])
        await until(lambda: struck() == {"d-idle", "d-used"})
    finally:
        change(module_database, delete(tables.drains))

    async def granted_again() -> bool:
        await peers.report()
        try:
            await reserve(bus, "new", 1)
        except NoRoom:
            return False
        return True

    await until(granted_again)
