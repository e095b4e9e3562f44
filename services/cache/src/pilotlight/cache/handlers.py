"""What the cache hears and answers."""

import asyncio

import structlog

from pilotlight.cache.books import Books
from pilotlight.cache.pool import PublishedCopies
from pilotlight.cache.repository import CacheRepository
from pilotlight.cache.room import RoomMaker
from pilotlight.cache.settings import CacheSettings
from pilotlight.common.bus import Subscription
from pilotlight.common.db.retention import Pruner
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.messages.reports import (
    LOADER_REPORTS,
    WORKER_REPORTS,
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.messages.room import RELEASE_SUBJECT, RESERVE_SUBJECT, Release, Reserve
from pilotlight.common.newest import Newest
from pilotlight.common.service import Context
from pilotlight.common.waiting import cancel_all, every

log = structlog.get_logger()

SWEEP_INTERVAL_S = 1.0


class Handlers:
    """The cache's subscriptions and its periodic work."""

    def __init__(
        self,
        context: Context[CacheSettings],
        books: Books,
        repository: CacheRepository,
        room: RoomMaker,
        copies: PublishedCopies,
        pruner: Pruner,
    ) -> None:
        self._context = context
        self._books = books
        self._repository = repository
        self._room = room
        self._copies = copies
        self._pruner = pruner
        self._listening: list[Subscription] = []
        self._answering: list[Subscription] = []
        self._periodic: list[asyncio.Task[None]] = []
        self._newest = Newest()

    async def start(self) -> None:
        """Listen to reports: a standby's books are as full as those of the cache that answers."""
        bus = self._context.bus
        bus.on_reconnect(self._resync)
        self._books.listening_since_s = self._context.clock.monotonic_s()
        self._listening = [
            await bus.subscribe(WORKER_REPORTS, WorkerReport, self._on_worker),
            await bus.subscribe(LOADER_REPORTS, LoaderReport, self._on_loader),
        ]

    async def stop(self) -> None:
        """Listen no more."""
        await _end(self._listening)

    async def begin(self, holder_pid: int) -> None:
        """Take over the open grants, then answer. ``holder_pid`` is the database's backend that holds the lock."""
        self._repository.holder_pid = holder_pid
        now_s = self._context.clock.monotonic_s()
        self._books.grants = {grant.grant_id: grant for grant in await self._repository.open_grants(now_s)}
        await self._read_models()
        self._books.hear_epoch(await self._repository.leading_epoch())
        bus = self._context.bus
        # One by one: what is served when this is cancelled is ended like the rest.
        self._answering.append(await bus.serve(RESERVE_SUBJECT, Reserve, self._room.reserve))
        self._answering.append(await bus.serve(RELEASE_SUBJECT, Release, self._room.release))
        self._periodic = [
            self._context.background.spawn("sweep", self._sweep()),
            self._context.background.spawn("copies bucket sweep", self._copies.sweep()),
            self._context.background.spawn("prune old rows", self._pruner.prune_for_ever()),
        ]

    async def end(self) -> None:
        """Answer no more; done already, nothing happens."""
        periodic, self._periodic = self._periodic, []
        await cancel_all(periodic)
        await _end(self._answering)

    async def _on_worker(self, report: WorkerReport) -> None:
        self._books.hear_epoch(report.epoch_seen)
        if not self._newest.is_news(worker_report_subject(report.facts.worker_id), report.incarnation, report.seq):
            return
        self._books.hear_worker(report.facts, self._context.clock.monotonic_s())

    async def _on_loader(self, report: LoaderReport) -> None:
        self._books.hear_epoch(report.epoch_seen)
        if not self._newest.is_news(loader_report_subject(report.facts.node_id), report.incarnation, report.seq):
            return
        self._books.hear_node(report.facts, self._context.clock.monotonic_s())
        if self._answering:
            await self._copies.follow(report.facts)

    async def _resync(self) -> None:
        self._copies.write_anew()

    async def _sweep(self) -> None:
        async for _ in every(SWEEP_INTERVAL_S):
            try:
                await self._read_models()
                await self._room.lapse()
                await self._room.strike()
            except DatabaseUnavailable as error:
                log.warning("books are kept as they are", action="sweep_deferred", error=error.message)

    async def _read_models(self) -> None:
        models = await self._repository.models()
        self._books.draining = await self._repository.drains()
        self._books.pinned = frozenset(model.name for model in models if model.pinned)
        self._books.model_of = {model.digest: model.name for model in models}


async def _end(subscriptions: list[Subscription]) -> None:
    while subscriptions:
        await subscriptions.pop().end()
