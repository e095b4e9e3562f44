"""Whether nodes may coalesce their reports: not while a listener of the release before runs, which
would take every worker for dead.

Every process writes into the bucket ``health`` every second or two, and says there what it
understands; a process of the release before says nothing. Each scheduler, leader or not, watches
that, and tells all loaders as long as only processes that understand were seen. A loader that has
not been told reports as every release understands it.
"""

import msgspec

from pilotlight.common.buckets import HEALTH
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.reports import COALESCE_SUBJECT, Coalesce, Understands
from pilotlight.common.service import Background
from pilotlight.common.waiting import every

LISTENERS = frozenset({"gateway", "scheduler", "cache"})
SURE_AFTER_S = 6.0
"""A listener of the release before would have written three times."""
SAY_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
FOR_S = 60.0
"""How long loaders go by a word: a cluster without any scheduler goes on for so long."""


class ReportStyle:
    """A component of schedulers: says when nodes may coalesce their reports."""

    def __init__(self, bus: Bus, clock: Clock, background: Background) -> None:
        self._bus = bus
        self._clock = clock
        self._background = background
        self._doubt_s = clock.monotonic_s()
        """When there was reason to think that a listener does not understand."""
        self._said_s: float | None = None
        """When nodes were told last that they may; None: they may not."""
        self._started = False

    async def start(self) -> None:
        """Watch and say from now on."""
        if self._started:
            return
        self._started = True
        self._doubt_s = self._clock.monotonic_s()
        self._bus.on_reconnect(self._again)
        bucket = await self._bus.bucket(HEALTH)
        self._background.spawn("releases of listeners", bucket.watch(msgspec.Raw, self.on_written))
        self._background.spawn("style of reports", self._say_for_ever())

    async def stop(self) -> None:
        """What was said lasts for a while."""

    async def on_written(self, service: str, said: msgspec.Raw | None) -> None:
        """A process has written into the bucket: ``Understands``, or null."""
        if service in LISTENERS and not _understands(said):
            self._doubt_s = self._clock.monotonic_s()
            await self.say()

    async def say(self) -> None:
        """Tell all loaders what they may do, when it is another thing or time to repeat it."""
        now_s = self._clock.monotonic_s()
        if now_s - self._doubt_s < SURE_AFTER_S:
            if self._said_s is not None:
                self._said_s = None
                await self._bus.publish(COALESCE_SUBJECT, Coalesce(for_s=0.0))
        elif self._said_s is None or now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            await self._bus.publish(COALESCE_SUBJECT, Coalesce(for_s=FOR_S))

    async def _again(self) -> None:
        """What was written meanwhile was not heard."""
        self._doubt_s = self._clock.monotonic_s()

    async def _say_for_ever(self) -> None:
        async for _ in every(LOOK_EVERY_S):
            await self.say()


def _understands(said: msgspec.Raw | None) -> bool:
    value = b"null" if said is None else bytes(said)
    return value != b"null" and decode_json(value, Understands).node_reports
