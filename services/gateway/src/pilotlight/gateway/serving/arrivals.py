"""Tells scheduler and cache how often each model is asked for, whether its requests wait or not."""

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.messages.arrivals import Arrivals, arrivals_subject
from pilotlight.common.service import Background
from pilotlight.common.tallies import Tally
from pilotlight.common.waiting import cancel_all, pause, woken
from pilotlight.policy.arrivals import GATHER_S, ArrivalCounters, CounterLife
from pilotlight.policy.ids import GatewayId, ModelName

REPEAT_S = 1.0
"""Once anything has been counted, this is the longest time between two messages."""


class ArrivalPublisher:
    """A component. Messages may be lost: totals are told again (``policy.arrivals``)."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        background: Background,
        gateway_id: GatewayId,
        incarnation: str,
        registry: CollectorRegistry,
    ) -> None:
        """Count from now on.

        Args:
            bus: Where totals are told.
            clock: Of this process.
            background: Owns the task.
            gateway_id: This gateway's id.
            incarnation: Of this process: its totals begin at zero.
            registry: Of this process's metrics.
        """
        self._bus = bus
        self._clock = clock
        self._background = background
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._counters = ArrivalCounters(clock.monotonic_s())
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._counted = Tally(
            "pilotlight_arrivals",
            "Requests that asked for tokens, whatever became of them.",
            (),
            registry,
        )
        self._told = Counter(
            "pilotlight_arrival_messages",
            "Messages that told scheduler and cache of arrivals.",
            registry=registry,
        )
        models = Gauge(
            "pilotlight_arrival_models", "Models whose arrivals are counted.", registry=registry
        )
        models.set_function(lambda: float(self._counters.models))

    def arrived(self, model: ModelName) -> None:
        """Count a request."""
        self._counters.count(model, self._clock.monotonic_s())
        self._counted.add()
        self._changed.set()

    async def start(self) -> None:
        """Tell from now on."""
        if self._task is None:
            self._task = self._background.spawn("publish arrivals", self._publish_for_ever())

    async def stop(self) -> None:
        """Tell what has not been told yet, and no more."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_all((task,))
        if self._counters.changed:
            await self._publish()

    async def _publish_for_ever(self) -> None:
        while True:
            await woken(self._changed, REPEAT_S)
            if self._counters.models:
                await self._publish()
                await pause(GATHER_S)

    async def _publish(self) -> None:
        now_s = self._clock.monotonic_s()
        counts = self._counters.tell(now_s)
        life = CounterLife(
            gateway_id=self._gateway_id,
            number=f"{self._incarnation}.{self._counters.life}",
            age_s=self._counters.age_s(now_s),
        )
        if self._counters.changed:
            self._changed.set()
        await self._bus.publish(
            arrivals_subject(self._gateway_id), Arrivals(life=life, counts=counts)
        )
        self._told.inc()
