"""What the scheduler hears and answers: reports, demand and models always; the leader's subjects
while it leads.
"""

import asyncio

import structlog
from prometheus_client import Counter, Gauge

from pilotlight.common.bus import Subscription
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.messages.arrivals import ARRIVAL_SUBJECTS, Arrivals
from pilotlight.common.messages.demand import (
    DEMAND_SUBJECTS,
    EVICT_SUBJECT,
    WARM_SUBJECT,
    DemandVector,
    Evict,
    Warm,
    Warming,
    demand_subject,
)
from pilotlight.common.messages.events import GATEWAY_EVENTS, Event
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport
from pilotlight.common.messages.room import GRANT_SETTLED_SUBJECT, GrantSettled
from pilotlight.common.newest import Newest
from pilotlight.common.roster import News
from pilotlight.common.roster_feed import RosterFeed
from pilotlight.common.service import Context
from pilotlight.common.waiting import cancel_all, woken
from pilotlight.scheduler.leader import Term
from pilotlight.scheduler.registered import ModelReader
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.world import World

log = structlog.get_logger()

RELIST_S = 5.0
"""Models are listed at least so often: an event may be lost, its absence must not matter."""


class Listening:
    """A component: keeps the world current, in leader and standbys alike."""

    def __init__(
        self,
        context: Context[SchedulerSettings],
        world: World,
        models: ModelReader,
        wake: asyncio.Event,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._world = world
        self._models = models
        self._wake = wake
        self._relist = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._newest = Newest()
        self._feed = RosterFeed(context.bus, context.clock, context.background, world.roster)
        self._feed.on_news(self._on_news)
        registry = context.metrics
        self._arrivals = Counter(
            "pilotlight_scheduler_arrivals",
            "Arrivals that gateways told the scheduler of",
            registry=registry,
        )
        heard = Gauge(
            "pilotlight_scheduler_arrival_gateways",
            "Gateways that tell the scheduler of arrivals",
            registry=registry,
        )
        heard.set_function(lambda: world.arrivals.gateways)

    async def start(self) -> None:
        """Listen from now on.

        Raises:
            DatabaseUnavailable: the models cannot be listed.
        """
        if self._subscriptions:
            return
        bus = self._context.bus
        self._world.listen(self._clock.monotonic_s())
        await self._feed.start()
        self._subscriptions = [
            await bus.subscribe(DEMAND_SUBJECTS, DemandVector, self._on_demand),
            await bus.subscribe(ARRIVAL_SUBJECTS, Arrivals, self._on_arrivals),
            await bus.subscribe(GATEWAY_EVENTS, Event, self._on_event),
        ]
        await self.relist()
        bus.on_reconnect(self._reconnected)
        self._tasks = [
            self._context.background.spawn("list models", self._relist_for_ever()),
        ]

    async def stop(self) -> None:
        """Listen no more."""
        for subscription in self._subscriptions:
            await subscription.end()
        self._subscriptions = []
        await self._feed.stop()
        tasks, self._tasks = self._tasks, []
        await cancel_all(tasks)

    async def relist(self) -> None:
        """List models and drains now.

        Raises:
            DatabaseUnavailable: they cannot be listed; the last lists stay.
        """
        models, drains = await self._models.models(), await self._models.drains()
        self._world.profiles = await self._models.profiles()
        changed = self._world.hear_models(models)
        if self._world.hear_drains(drains, self._clock.monotonic_s()) or changed:
            self._wake.set()

    def _on_news(self, news: News) -> None:
        if self._world.follow(news):
            self._wake.set()

    async def _on_demand(self, vector: DemandVector) -> None:
        if not self._newest.is_news(demand_subject(vector.gateway_id), "", vector.seq):
            return
        changed = self._world.hear_demand(vector, self._clock.monotonic_s())
        if any(demand.model not in self._world.models for demand in vector.demands):
            # Registered a moment ago: its event may be lost, or still be on its way.
            self._relist.set()
        if changed:
            self._wake.set()

    async def _on_arrivals(self, message: Arrivals) -> None:
        new = self._world.hear_arrivals(message.life, message.counts, self._clock.monotonic_s())
        self._arrivals.inc(new)

    async def _on_event(self, event: Event) -> None:
        self._relist.set()

    async def _reconnected(self) -> None:
        self._world.reconnects += 1
        self._relist.set()
        self._wake.set()

    async def _relist_for_ever(self) -> None:
        while True:
            await woken(self._relist, RELIST_S)
            try:
                await self.relist()
            except DatabaseUnavailable as error:
                log.warning(
                    "models are kept as they are", action="relist_deferred", error=error.message
                )


class LeaderSubjects:
    """Serves what only the leader answers, for one term."""

    def __init__(
        self, context: Context[SchedulerSettings], term: Term, listening: Listening, world: World
    ) -> None:
        self._bus = context.bus
        self._term = term
        self._listening = listening
        self._world = world
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Answer from now on.

        Raises:
            BusUnavailable: NATS cannot be reached; ``stop`` ends what had begun.
        """
        serve, begun = self._bus.serve, self._subscriptions
        begun.append(await serve(PHASES_SUBJECT, PhaseReport, self._term.cold_starts.keep))
        begun.append(await serve(WARM_SUBJECT, Warm, self._warm))
        begun.append(await serve(EVICT_SUBJECT, Evict, self._term.operators.evict))
        hear = self._term.room.hear
        begun.append(await self._bus.hear(GRANT_SETTLED_SUBJECT, GrantSettled, hear))

    async def stop(self) -> None:
        """Answer no more."""
        for subscription in self._subscriptions:
            await subscription.end()
        self._subscriptions = []

    async def _warm(self, ask: Warm) -> Warming:
        if ask.model not in self._world.models:
            await self._listening.relist()
        return await self._term.operators.warm(ask)
