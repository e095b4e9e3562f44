"""A lane for each link that chunks come over: how many are read at once, what the link lets
through, and how fast it is.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pilotlight.common.clock import Clock
from pilotlight.dataplane.bandwidth import BandwidthLimit, SourceLimits, is_of_this_host
from pilotlight.dataplane.concurrency import Concurrency
from pilotlight.dataplane.fair_turns import FairTurns, Turn
from pilotlight.dataplane.origin import Origin
from pilotlight.dataplane.priority_semaphore import PrioritySemaphore, Rank, unless_recalled
from pilotlight.dataplane.readers import ReadProgress
from pilotlight.policy.cluster import LinkSpeed, OriginKind

SMOOTHING = 0.3
"""Weight of the newest measurement in a link's bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """Bounds for every lane of a node."""

    least: int
    """Chunks that are read at once when nothing is known of the link yet."""
    most: int
    local: int = 0
    """The same of this machine's own files: the system has them in its memory, perhaps, and then
    it is the cores that read. At least ``least``, at most ``most``."""


class Lane:
    """The reads that share one link. For the event loop alone."""

    def __init__(
        self, limits: LaneLimits, limit: BandwidthLimit, clock: Clock, *, is_local: bool = False
    ) -> None:
        self.bytes_per_s: float | None = None
        """What the link gave lately, all reads together; None: nothing was measured yet."""
        self.probed_bytes_per_s: float | None = None
        """What counts until then: a probe's."""
        self._clock = clock
        self._limit = limit
        self._concurrency = Concurrency(
            limits.least, limits.most, limits.local if is_local else limits.least
        )
        self._permits = PrioritySemaphore(self._concurrency.limit)
        self.turns = FairTurns()
        """Of the fetches that use the link."""
        self._running: set[ReadProgress] = set()
        self._ended_bytes = 0
        self._since_s = 0.0
        self._since_bytes = 0
        self._ends = 0

    @property
    def reads(self) -> int:
        """How many chunks may be read at once at this moment."""
        return self._permits.limit

    @property
    def busy(self) -> int:
        """How many are, or wait for the link to have room."""
        return self._permits.held

    @asynccontextmanager
    async def permit(
        self, size_bytes: int, rank: Rank, recalled: asyncio.Event, turn: Turn | None = None
    ) -> AsyncGenerator[ReadProgress]:
        """One read of ``size_bytes``, once the link has room for it.

        Args:
            size_bytes: All of it.
            rank: Among all that wait.
            recalled: Set when a higher rank waits.
            turn: Counts what it gets; for a rank that follows from that.

        Raises:
            Recalled: ``recalled`` was set while it was waited for.
        """
        permit = await self._permits.take(rank, recalled)
        progress = ReadProgress()
        if not self._running:
            self._begin_window()
        self._running.add(progress)
        try:
            if not self._limit.is_none:
                await unless_recalled(recalled, self._limit.take(size_bytes, rank, turn))
            elif turn is not None:
                turn.took(size_bytes)
            yield progress
        finally:
            self._running.discard(progress)
            self._ended_bytes += progress.bytes
            self._on_end()
            self._permits.give_back(permit)

    def broke(self) -> None:
        """A read broke off, or stalled."""
        self._permits.resize(self._concurrency.broke())
        self._begin_window()

    def _begin_window(self) -> None:
        self._since_s, self._since_bytes, self._ends = self._clock.monotonic_s(), self._bytes, 0

    @property
    def _bytes(self) -> int:
        return self._ended_bytes + sum(progress.bytes for progress in self._running)

    def _on_end(self) -> None:
        """Measure once as many reads have ended as there may be at once."""
        self._ends += 1
        seconds = self._clock.monotonic_s() - self._since_s
        if self._ends < self._permits.limit or seconds <= 0:
            return
        bytes_per_s = (self._bytes - self._since_bytes) / seconds
        known = self.bytes_per_s
        self.bytes_per_s = (
            bytes_per_s if known is None else known + SMOOTHING * (bytes_per_s - known)
        )
        if self._permits.wanted:
            # Else it is not the number of reads that holds it back.
            self._permits.resize(self._concurrency.measured(bytes_per_s))
        self._begin_window()


class Lanes:
    """The lanes of one node, by what origins call their link."""

    def __init__(self, limits: LaneLimits, source_limits: SourceLimits, clock: Clock) -> None:
        """``source_limits`` says what sources may take of their links."""
        self._limits = limits
        self._source_limits = source_limits
        self._clock = clock
        self._lanes: dict[str, tuple[OriginKind, Lane]] = {}

    def of(self, origin: Origin) -> Lane:
        """The lane of an origin's link."""
        if origin.link not in self._lanes:
            limit = (
                self._source_limits.of(origin.link)
                if origin.kind is OriginKind.SOURCE
                else BandwidthLimit(None, self._clock)
            )
            is_local = origin.kind is OriginKind.DISK or is_of_this_host(origin.link)
            self._lanes[origin.link] = (
                origin.kind,
                Lane(self._limits, limit, self._clock, is_local=is_local),
            )
        return self._lanes[origin.link][1]

    def probed(self, origin: Origin, bytes_per_s: float) -> None:
        """An origin's link would give so much, by a probe; its use tells better."""
        self.of(origin).probed_bytes_per_s = bytes_per_s

    def measured(self) -> tuple[LinkSpeed, ...]:
        """What each link gave lately, or a probe found."""
        known = (
            (kind, link, lane.probed_bytes_per_s if lane.bytes_per_s is None else lane.bytes_per_s)
            for link, (kind, lane) in self._lanes.items()
        )
        return tuple(
            LinkSpeed(kind=kind, name=link, bytes_per_s=rate)
            for kind, link, rate in known
            if rate is not None
        )
