"""What the cache hears and answers."""

import asyncio
from collections.abc import Iterable

import structlog
from prometheus_client import Counter

from pilotlight.cache.books import Books
from pilotlight.cache.disks import DiskOrders
from pilotlight.cache.grants import Grants
from pilotlight.cache.keeper import Keeper
from pilotlight.cache.lender import REPEAT_S, Lender
from pilotlight.cache.measures import CacheMeasures
from pilotlight.cache.pool import PublishedCopies
from pilotlight.cache.registrations import Registrations
from pilotlight.cache.repository import CacheRepository
from pilotlight.cache.room import RoomMaker
from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.ungrown import take_back_growth
from pilotlight.common.bus import Subscription
from pilotlight.common.db.retention import Pruner
from pilotlight.common.errors import BusUnavailable, DatabaseUnavailable
from pilotlight.common.messages.arrivals import ARRIVAL_SUBJECTS, Arrivals
from pilotlight.common.messages.room import RELEASE_SUBJECT, RESERVE_SUBJECT, Release, Reserve
from pilotlight.common.roster import News
from pilotlight.common.roster_feed import RosterFeed
from pilotlight.common.service import Context
from pilotlight.common.waiting import cancel_all, every, pause, woken
from pilotlight.policy.cluster import Liveness
from pilotlight.policy.ids import NodeId, WorkerId

log = structlog.get_logger()

SWEEP_INTERVAL_S = 1.0
TOGETHER_S = 0.1
"""A node that comes or dies is answered no sooner after a sweep, nor sooner than that took."""
ESTIMATES_INTERVAL_S = 30.0
"""Estimates are means over cold starts: nothing is decided worse by ones that are a little older.
"""


class Handlers:
    """The cache's subscriptions and its periodic work."""

    def __init__(
        self,
        context: Context[CacheSettings],
        books: Books,
        repository: CacheRepository,
        registrations: Registrations,
        room: RoomMaker,
        lender: Lender,
        keeper: Keeper,
        measures: CacheMeasures,
        copies: PublishedCopies,
        disks: DiskOrders,
        pruner: Pruner,
    ) -> None:
        self._context = context
        self._books = books
        self._repository = repository
        self._registrations = registrations
        self._room = room
        self._lender = lender
        self._keeper = keeper
        self._measures = measures
        self._workers: set[WorkerId] = set()
        """Workers whose loans may not be as they should be."""
        self._worker_reports = asyncio.Event()
        self._copies = copies
        self._disks = disks
        self._pruner = pruner
        self._feed = RosterFeed(context.bus, context.clock, context.background, books.roster)
        self._feed.on_news(self._on_news)
        self._arrivals: Subscription | None = None
        self._answering: list[Subscription] = []
        self._periodic: list[asyncio.Task[None]] = []
        self._reported: set[NodeId] = set()
        """Nodes whose copies may differ from those that were published."""
        self._reports = asyncio.Event()
        self._standing: set[NodeId] = set()
        """Nodes that are not dead."""
        self._other_nodes = asyncio.Event()
        """A node has come or died since the last sweep."""
        self._heard = Counter(
            "pilotlight_cache_arrivals",
            "Arrivals that gateways told the cache of",
            registry=context.metrics,
        )

    async def start(self) -> None:
        """Listen to reports and arrivals: a standby's books are as full as those of the cache that
        answers.
        """
        bus = self._context.bus
        bus.on_reconnect(self._resync)
        self._books.listen(self._context.clock.monotonic_s())
        await self._feed.start()
        self._arrivals = await bus.subscribe(ARRIVAL_SUBJECTS, Arrivals, self._on_arrivals)

    async def stop(self) -> None:
        """Listen no more."""
        await self._feed.stop()
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            await arrivals.end()

    async def begin(self, holder_pid: int) -> None:
        """Take over the open grants, then answer.

        ``holder_pid`` is the database's backend that holds the lock.
        """
        self._repository.holder_pid = holder_pid
        now_s = self._context.clock.monotonic_s()
        self._books.grants = Grants(await self._repository.open_grants(now_s))
        await self._registrations.follow()
        self._books.hear_estimates(await self._repository.estimates(), now_s)
        self._books.hear_epoch(await self._repository.leading_epoch())
        bus = self._context.bus
        # One by one: what is served when this is cancelled is ended like the rest.
        reserve = self._room.reserve
        self._answering.append(await bus.serve(RESERVE_SUBJECT, Reserve, reserve, pressing=True))
        self._answering.append(await bus.serve(RELEASE_SUBJECT, Release, self._room.release))
        self._periodic = [
            self._context.background.spawn("sweep", self._sweep()),
            self._context.background.spawn("read estimates", self._read_estimates()),
            self._context.background.spawn("copies bucket sweep", self._copies.sweep()),
            self._context.background.spawn("publish copies", self._publish()),
            self._context.background.spawn("lend", self._lend()),
            self._context.background.spawn("prune old rows", self._pruner.prune_for_ever()),
            self._context.background.spawn("connect ahead", self._repository.connect_ahead()),
        ]

    async def end(self) -> None:
        """Answer no more; done already, nothing happens."""
        periodic, self._periodic = self._periodic, []
        await cancel_all(periodic)
        await _end(self._answering)

    def _on_news(self, news: News) -> None:
        self._books.hear_epoch(self._books.roster.epoch_seen)
        self._books.follow(news, self._context.clock.monotonic_s())
        self._reported.update(news.nodes)
        self._reports.set()
        self._workers.update(news.workers)
        self._worker_reports.set()
        self._follow_nodes(news.nodes)

    def _follow_nodes(self, node_ids: Iterable[NodeId]) -> None:
        for node_id in node_ids:
            node = self._books.roster.node(node_id)
            stands = node is not None and node.liveness is not Liveness.DEAD
            if stands != (node_id in self._standing):
                self._standing ^= {node_id}
                self._keeper.soon()
                self._other_nodes.set()

    async def _on_arrivals(self, message: Arrivals) -> None:
        new = self._books.hear_arrivals(
            message.life, message.counts, self._context.clock.monotonic_s()
        )
        self._heard.inc(sum(one.count for one in new))
        self._measures.heard(new)

    async def _publish(self) -> None:
        while True:
            await self._reports.wait()
            self._reports.clear()
            reported, self._reported = self._reported, set()
            for node_id in reported:
                node = self._books.roster.node(node_id)
                if node is not None:
                    await self._copies.follow(node)

    async def _lend(self) -> None:
        clock = self._context.clock
        all_s = clock.monotonic_s()
        while True:
            await woken(self._worker_reports, REPEAT_S)
            if clock.monotonic_s() - all_s >= REPEAT_S:
                # What a worker did not hear changes no report of it.
                all_s = clock.monotonic_s()
                self._workers.update(self._books.roster.workers)
            workers, self._workers = self._workers, set()
            for worker_id in workers:
                try:
                    await self._lender.hear(worker_id)
                except BusUnavailable as error:
                    log.info("loans are told later", action="loans_deferred", error=error.message)

    async def _resync(self) -> None:
        self._copies.write_anew()

    async def _sweep(self) -> None:
        while True:
            self._other_nodes.clear()
            began_s = self._context.clock.monotonic_s()
            try:
                await self._registrations.follow()
                await self._room.lapse()
                await take_back_growth(self._books, self._repository, self._context.clock)
                self._measures.follow()
                await self._keep()
                await self._tell_of_thrash()
                await self._room.striker.follow()
            except DatabaseUnavailable as error:
                log.warning(
                    "books are kept as they are", action="sweep_deferred", error=error.message
                )
            rest_s = max(TOGETHER_S, self._context.clock.monotonic_s() - began_s)
            await pause(rest_s)
            await woken(self._other_nodes, max(0.0, SWEEP_INTERVAL_S - rest_s))

    async def _keep(self) -> None:
        try:
            await self._keeper.follow()
            await self._disks.follow()
        except BusUnavailable as error:
            log.info("copies are kept later", action="keeping_deferred", error=error.message)

    async def _tell_of_thrash(self) -> None:
        """Store what was found; what cannot be stored now is told later."""
        while self._books.thrashing:
            found = self._books.thrashing[0]
            await self._repository.add_thrash(found)
            self._books.thrashing.pop(0)
            self._measures.thrashed()
            log.warning(
                found.advice,
                action="thrash",
                models=list(found.models),
                reloads_per_hour=found.reloads_per_hour,
            )

    async def _read_estimates(self) -> None:
        async for _ in every(ESTIMATES_INTERVAL_S):
            try:
                estimates = await self._repository.estimates()
                self._books.hear_estimates(estimates, self._context.clock.monotonic_s())
            except DatabaseUnavailable as error:
                log.warning(
                    "estimates are kept as they are",
                    action="estimates_deferred",
                    error=error.message,
                )


async def _end(subscriptions: list[Subscription]) -> None:
    while subscriptions:
        await subscriptions.pop().end()
