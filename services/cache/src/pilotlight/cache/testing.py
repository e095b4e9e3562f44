"""A cache's surroundings for tests: a worker and a loader that the test plays, and the scheduler
that asks.
"""

from dataclasses import replace

from sqlalchemy import URL, Executable, create_engine
from sqlalchemy.pool import NullPool

from pilotlight.cache.books import Books
from pilotlight.common.bus import Bus
from pilotlight.common.errors import BusUnavailable, NoWorker
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
from pilotlight.policy.cluster import HeldStage, NodeFacts, WorkerFacts
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
