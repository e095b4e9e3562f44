"""The node's disk tier: opened, measured and filled in the background, let go."""

import asyncio
from collections.abc import Callable
from functools import partial

from pilotlight.common.clock import Clock
from pilotlight.common.service import Context
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.disk_probe import DiskProbe
from pilotlight.dataplane.disk_tier import DiskOrigin, DiskTier
from pilotlight.dataplane.disk_writer import DiskWriter
from pilotlight.dataplane.lanes import Lanes
from pilotlight.dataplane.pool import HostPool
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.loader.settings import LoaderSettings


class NodeDisk:
    """The tier's life: it is written to from start to stop, and read from until the last fetch has
    ended.
    """

    def __init__(self, tier: DiskTier, writer: DiskWriter) -> None:
        self.tier = tier
        self.writer = writer
        self.origin = DiskOrigin(tier)

    async def start(self) -> None:
        """Write from now on."""
        self.writer.start()

    async def stop(self) -> None:
        """Write no more, and let another loader have the folder."""
        await asyncio.to_thread(self.writer.stop)
        self.tier.close()


class DiskProbing:
    """Measures the disk behind the loader's start. What it gives is reported as the speed of other
    links is, until a fetch from it tells better.
    """

    def __init__(
        self,
        disk: NodeDisk,
        copies: HostCopies,
        lanes: Lanes,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        """Prepare it.

        Args:
            disk: What is measured.
            copies: Their fetches go before it.
            lanes: Told what it gives.
            clock: For the time that reads take.
            changed: Called when there is something new to report.
        """
        self._disk = disk
        self._copies = copies
        self._lanes = lanes
        self._clock = clock
        self._changed = changed
        self._probe: DiskProbe | None = None

    async def start(self) -> None:
        """Begin; nothing waits for it."""
        loop = asyncio.get_running_loop()
        self._probe = DiskProbe(
            self._disk.tier,
            self._clock,
            is_busy=lambda: self._copies.is_fetching or self._disk.writer.waiting > 0,
            on_rate=partial(loop.call_soon_threadsafe, self._take),
        )
        self._probe.start()

    async def stop(self) -> None:
        """End it."""
        if self._probe is not None:
            await asyncio.to_thread(self._probe.stop)

    def _take(self, bytes_per_s: float) -> None:
        self._lanes.probed(self._disk.origin, bytes_per_s)
        self._changed()


async def open_disk(
    context: Context[LoaderSettings], pool: HostPool, metrics: LoaderMetrics
) -> NodeDisk | None:
    """The disk tier that the settings ask for.

    Raises:
        DiskTierTaken: another loader uses its folder.
    """
    settings = context.settings
    if settings.disk_tier_dir is None:
        return None
    count = metrics.disk_tier_event
    tier = DiskTier(
        settings.disk_tier_dir.absolute(), settings.disk_tier_bytes, context.clock, count
    )
    await asyncio.to_thread(tier.open)
    metrics.watch_disk(tier)
    return NodeDisk(tier, DiskWriter(tier, pool.path, context.clock, count))
