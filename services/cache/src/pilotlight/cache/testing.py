"""A cache's surroundings for tests: a worker and a loader that the test plays, and the scheduler
that asks.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import URL, Executable, create_engine
from sqlalchemy.pool import NullPool

from pilotlight.cache.books import Books
from pilotlight.cache.forecasts import Forecasts
from pilotlight.cache.keeper import INTERVAL_S, Keeper
from pilotlight.cache.settings import HostCopies
from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import BusUnavailable, NoWorker
from pilotlight.common.messages.hold import NodePrefetch
from pilotlight.common.messages.reports import (
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
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
from pilotlight.common.service import Application
from pilotlight.common.testing import until
from pilotlight.dataplane.extents import Extent, Extents
from pilotlight.policy.cluster import Copy, HeldStage, NodeFacts, WorkerFacts
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.ids import (
    Digest,
    Epoch,
    Generation,
    GrantId,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.liveness import DEAD_AFTER_S
from pilotlight.policy.model import Model
from pilotlight.policy.scaling import ScalingRules
from pilotlight.policy.testing import copy, held, node, worker

WORKER, NODE = WorkerId("w0"), NodeId("n0")
MEMORY = 1000
DEADLINE_S = 20.0
"""Far beyond what anything here takes."""


def stage(instance: str, size: int) -> HeldStage:
    """An idle stage of a model of the same name."""
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
        """Serve what the cache asks."""
        await self.bus.serve(give_up_subject(WORKER), GiveUp, self.give_up)
        await self.bus.serve(drop_subject(NODE), Drop, self.drop)

    async def give_up(self, request: GiveUp) -> GivenUp:
        """As a worker: everything but what is busy."""
        self.given_up.append(request)
        gone = tuple(one for one in request.instance_ids if one not in self.busy)
        self.facts = replace(
            self.facts, held=tuple(one for one in self.facts.held if one.instance_id not in gone)
        )
        return GivenUp(instance_ids=gone)

    async def drop(self, request: Drop) -> Dropped:
        """As a loader."""
        self.dropped.append(request)
        gone = [one for one in self.node.copies if one.digest in request.digests]
        kept = tuple(one for one in self.node.copies if one not in gone)
        free = self.node.pool_free_bytes + sum(one.size_bytes for one in gone)
        self.node = replace(self.node, copies=kept, pool_free_bytes=free)
        for one in gone:
            if self.pool is not None:
                self.pool.give_back(self.places[one.digest])
        fits = (
            self.pool is None or request.wanted is None or self.pool.fits(request.wanted.part_bytes)
        )
        return Dropped(digests=tuple(one.digest for one in gone), fits=fits)

    def lay_out(self, *ranges: tuple[str, int]) -> NodeFacts:
        """Copies with these sizes in this order in the host pool; a range without a name is
        free.
        """
        self.pool, end = Extents(MEMORY, 1), 0
        for name, size in ranges:
            if name:
                taken = self.pool.take_at(end, size)
                assert taken is not None
                self.places[f"d-{name}"] = taken
            end += size
        copies = tuple(
            replace(copy(name, size_bytes=size), idle_s=float(size))
            for name, size in ranges
            if name
        )
        free, largest = self.pool.free_bytes, self.pool.largest_free_bytes
        return replace(
            node(pool_bytes=MEMORY),
            copies=copies,
            pool_free_bytes=free,
            pool_largest_free_bytes=largest,
        )

    async def report(
        self, facts: WorkerFacts | None = None, where: NodeFacts | None = None
    ) -> None:
        """As both; from now on these are their facts."""
        self.facts = facts or self.facts
        self.node = where or self.node
        worker_report = WorkerReport(facts=self.facts, incarnation="i", epoch_seen=self.epoch)
        await self.bus.publish(worker_report_subject(WORKER), worker_report)
        await self.bus.publish(
            loader_report_subject(NODE),
            LoaderReport(facts=self.node, incarnation="i", epoch_seen=self.epoch),
        )


async def start(application: Application) -> None:
    """Start a service's parts in order."""
    for component in application.components:
        await component.start()


async def stop(application: Application) -> None:
    """Stop them in the reverse order."""
    for component in reversed(application.components):
        await component.stop()


async def answers(bus: Bus) -> bool:
    """Whether a cache answers."""
    try:
        await bus.request(
            RELEASE_SUBJECT, Release(grant_id=GrantId("none")), Released, deadline_s=DEADLINE_S
        )
    except BusUnavailable:
        return False
    return True


async def reserve(
    bus: Bus,
    instance: str,
    device: int,
    host: int = 0,
    epoch: int = 0,
    parts: tuple[int, ...] | None = None,
    generation: int = 1,
    protected: tuple[str, ...] = (),
    *,
    free_room: bool = False,
    promise: bool = False,
) -> Reserved:
    """Ask for room as the scheduler does.

    Args:
        bus: to the cache.
        instance: its id, and its model's name.
        device: bytes on the device.
        host: bytes in the host pool, in one piece.
        epoch: the leader's.
        parts: bytes of each part, in place of ``host``.
        generation: the instance's.
        protected: instances that are owed service.
        free_room: nothing is to go for it.
        promise: it may be answered before its row is there.
    """
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
        generation=Generation(generation),
        protected=tuple(InstanceId(one) for one in protected),
        free_room=free_room,
        promise=promise,
    )
    return await bus.request(RESERVE_SUBJECT, message, Reserved, deadline_s=DEADLINE_S)


async def heard(bus: Bus, peers: Peers, *stages: HeldStage, where: NodeFacts | None = None) -> None:
    """Report, and wait until the cache has heard: a tiny reservation is answered by a worker that
    it knows.
    """
    await peers.report(worker(held_stages=stages), where)

    async def known() -> bool:
        await peers.report()
        try:
            probe = await reserve(bus, "probe", 0)
        except NoWorker:
            return False
        await bus.request(
            RELEASE_SUBJECT, Release(grant_id=probe.grant_id), Released, deadline_s=DEADLINE_S
        )
        return True

    await until(known)


def change(where: URL, statement: Executable) -> None:
    """Write as the database's owner."""
    engine = create_engine(where, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(statement)
    engine.dispose()


def hear(books: Books, facts: WorkerFacts | NodeFacts, now_s: float) -> None:
    """Have books take a report, as they do from the bus."""
    roster = books.roster
    if isinstance(facts, WorkerFacts):
        news = roster.hear_worker(
            WorkerReport(facts=facts, incarnation="a", epoch_seen=Epoch(0)), now_s
        )
    else:
        news = roster.hear_loader(
            LoaderReport(facts=facts, incarnation="a", epoch_seen=Epoch(0)), now_s
        )
    books.follow(news, now_s)


def whole(of: Model) -> Copy:
    """All of a model in a host pool."""
    parts = tuple(range(len(of.spec.part_bytes)))
    return replace(copy(of.name, size_bytes=of.spec.total_bytes), parts=parts)


def on(node_id: NodeId, *copies: Copy, pool_bytes: int = 1000) -> NodeFacts:
    """A node that gives chunks to others, with some copies in its pool."""
    there = tuple(replace(one, node_id=node_id) for one in copies)
    named = replace(node(copies=there, pool_bytes=pool_bytes), node_id=node_id)
    return replace(named, dataplane_host="h", dataplane_port=7)


class KeeperRig:
    """A keeper, and loaders that hear what they are told."""

    def __init__(self, models: Iterable[Model], mode: HostCopies = HostCopies.KEPT) -> None:
        """``models``: that are registered; ``mode``: of which of them a copy is kept."""
        self.clock = ManualClock()
        self.books = Books(models=registered(models))
        self.books.listen(self.clock.monotonic_s())
        self.told: list[tuple[str, NodePrefetch]] = []
        forecasts = Forecasts(self.books, ScalingRules(instance_requests=4))
        self.keeper = Keeper(self.books, self, self.clock, "c1", mode, forecasts)  # type: ignore[arg-type] - of a bus it is ``publish`` alone

    async def publish(self, subject: str, message: Any, **_: Any) -> None:
        """As the bus."""
        self.told.append((subject, message))

    def report(self, *nodes: NodeFacts) -> None:
        """Loaders report."""
        for one in nodes:
            hear(self.books, one, self.clock.monotonic_s())

    def lose(self, *alive: NodeFacts) -> None:
        """Nodes that do not report any more are dead."""
        for _ in range(8):
            self.clock.advance(DEAD_AFTER_S / 4)
            self.report(*alive)
            now_s = self.clock.monotonic_s()
            self.books.follow(self.books.roster.check(now_s), now_s)

    async def follow(self, seconds: float = INTERVAL_S) -> list[tuple[str, list[str]]]:
        """What is told after some time: to whom, and models."""
        self.clock.advance(seconds)
        before = len(self.told)
        await self.keeper.follow()
        return [
            (subject, [one.model.name for one in message.fetches])
            for subject, message in self.told[before:]
        ]
