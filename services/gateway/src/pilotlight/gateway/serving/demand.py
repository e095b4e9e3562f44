"""Tells the scheduler what this gateway holds: on change, every 250 ms while there is something,
and once when it is over. The scheduler's word that a model fits on no worker ends what waits for
it.
"""

import asyncio

from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.errors import NoWorker
from pilotlight.common.messages.demand import (
    NEVER_FITS_SUBJECT,
    DemandVector,
    NeverFits,
    demand_subject,
)
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause, woken
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.policy.ids import GatewayId

REPEAT_S = 0.25
IDLE_S = 30.0
NEVER_FITS_AGAIN_S = 60.0
"""Until another worker may be there."""
GATHER_S = 0.005
"""Changes that follow one another closely travel together; the first goes at once."""
GATHER_EACH_S = 0.0001
"""More, for each request that waits: all of them are looked at each time, and of a thousand one
more changes little."""


def gather_s(held: int) -> float:
    """How long changes are gathered while so many requests wait, in seconds."""
    return min(GATHER_S + GATHER_EACH_S * held, REPEAT_S)


class DemandPublisher:
    """A component. The vector is whole each time, so nothing depends on having heard the last
    one.
    """

    def __init__(
        self, queue: PendingQueue, bus: Bus, background: Background, gateway_id: GatewayId
    ) -> None:
        self._queue = queue
        self._bus = bus
        self._background = background
        self._gateway_id = gateway_id
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._never_fits: Subscription | None = None
        self._seq = 0

    async def start(self) -> None:
        """Publish from now on."""
        if self._task is None:
            self._queue.on_change = self._changed.set
            self._bus.on_reconnect(self._again)
            self._never_fits = await self._bus.subscribe(
                NEVER_FITS_SUBJECT, NeverFits, self._on_never_fits
            )
            self._task = self._background.spawn("publish demand", self._publish_for_ever())

    async def stop(self) -> None:
        """Say that nothing is held any more."""
        if self._task is None:
            return
        await cancel_all((self._task,))
        self._task = None
        if self._never_fits is not None:
            await self._never_fits.end()
            self._never_fits = None
        await self._publish()

    async def _publish_for_ever(self) -> None:
        told = False
        while True:
            changed = await woken(self._changed, REPEAT_S if told else IDLE_S)
            if changed or told:
                told = await self._publish()
                await pause(gather_s(self._queue.held))

    async def _publish(self) -> bool:
        demands = self._queue.demand()
        self._seq += 1
        vector = DemandVector(gateway_id=self._gateway_id, demands=demands, seq=self._seq)
        await self._bus.publish(demand_subject(self._gateway_id), vector)
        return bool(demands)

    async def _on_never_fits(self, told: NeverFits) -> None:
        error = NoWorker(
            f"{told.model} cannot be loaded: {told.message}", retry_after_s=NEVER_FITS_AGAIN_S
        )
        self._queue.refuse(told.model, told.digest, error)

    async def _again(self) -> None:
        self._changed.set()
