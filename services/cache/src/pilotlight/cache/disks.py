"""Tells loaders how important models are on their disks."""

from pilotlight.cache.books import Books
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.messages.room import DISK_ORDER_SUBJECT, DiskOrder
from pilotlight.dataplane.bandwidth import link_of
from pilotlight.policy.cluster import OriginKind, Tier
from pilotlight.policy.eviction.disk import DiskFacts, asked_last, disk_order, measured_bytes_per_s
from pilotlight.policy.ids import Digest

INTERVAL_S = 10.0
REPEAT_S = 60.0
"""Until an order that is as before is told again: a loader may have begun."""


class DiskOrders:
    """What was told last."""

    def __init__(self, books: Books, bus: Bus, clock: Clock) -> None:
        """Has told nothing."""
        self._books = books
        self._bus = bus
        self._clock = clock
        self._told: tuple[Digest, ...] = ()
        self._told_s = float("-inf")
        self._looked_s = float("-inf")

    async def follow(self) -> None:
        """Tell another order within ``INTERVAL_S``. Where no node has a disk tier, none is told.

        Raises:
            BusUnavailable: it is told with a later call.
        """
        now_s = self._clock.monotonic_s()
        nodes = self._books.roster.nodes.values()
        if now_s - self._looked_s < INTERVAL_S or not any(one.disk_tier_bytes for one in nodes):
            return
        self._looked_s = now_s
        order = disk_order(self._books.policies.of(Tier.HOST), self._facts(now_s))
        if order and (order != self._told or now_s - self._told_s >= REPEAT_S):
            await self._bus.publish(DISK_ORDER_SUBJECT, DiskOrder(models=order))
            self._told, self._told_s = order, now_s

    def _facts(self, now_s: float) -> DiskFacts:
        books, arrivals = self._books, self._books.arrivals.recent()
        nodes = tuple(books.roster.nodes.values())
        sources = measured_bytes_per_s(nodes, OriginKind.SOURCE)
        disks = measured_bytes_per_s(nodes, OriginKind.DISK).values()
        return DiskFacts(
            now_s=now_s,
            models=books.models,
            source_bytes_per_s={
                name: sources[link]
                for name in asked_last(books.models, arrivals)
                if (link := link_of(books.models.by_name[name].uri)) in sources
            },
            disk_bytes_per_s=max(disks, default=float("inf")),
            arrivals=arrivals,
        )
