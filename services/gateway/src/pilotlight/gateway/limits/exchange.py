"""Gateways tell each other what they have let in of the limits that they share. No request waits
for it.
"""

import asyncio

from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.clock import Clock
from pilotlight.common.messages.limits import LIMIT_SUBJECTS, LimitTotals, limits_subject
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause, woken
from pilotlight.gateway.limits.limiter import Limiter
from pilotlight.policy.ids import GatewayId

TELL_S = 0.05
"""The shortest time between two messages: what others know is older than this by their way alone.
"""
REPEAT_S = 1.0
"""The longest: it says that this gateway is there."""


class LimitExchange:
    """A component."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        background: Background,
        limiter: Limiter,
        gateway_id: GatewayId,
    ) -> None:
        """Tell nothing yet.

        Args:
            bus: to the others.
            clock: of this process.
            background: owns the task.
            limiter: whose totals are told.
            gateway_id: of this gateway.
        """
        self._bus = bus
        self._clock = clock
        self._background = background
        self._limiter = limiter
        self._gateway_id = gateway_id
        self._seq = 0
        self._looked_s = clock.monotonic_s()
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Tell and hear from now on."""
        if self._task is None:
            self._subscription = await self._bus.subscribe(
                LIMIT_SUBJECTS, LimitTotals, self._on_totals
            )
            self._task = self._background.spawn("exchange limits", self._tell_for_ever())

    async def stop(self) -> None:
        """Tell and hear no more."""
        if self._subscription is not None:
            await self._subscription.end()
            self._subscription = None
        if self._task is not None:
            await cancel_all((self._task,))
            self._task = None

    async def _tell_for_ever(self) -> None:
        while True:
            now_s = self._clock.monotonic_s()
            if now_s - self._looked_s >= REPEAT_S:
                self._looked_s = now_s
                self._limiter.look(connected=self._bus.connected)
            self._limiter.changed.clear()
            self._seq += 1
            await self._bus.publish(
                limits_subject(self._gateway_id),
                LimitTotals(
                    gateway_id=self._gateway_id, seq=self._seq, totals=self._limiter.tell()
                ),
            )
            await pause(TELL_S)
            await woken(self._limiter.changed, REPEAT_S - TELL_S)

    async def _on_totals(self, heard: LimitTotals) -> None:
        self._limiter.hear(heard.gateway_id, heard.seq, heard.totals)
