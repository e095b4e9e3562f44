"""The node's disk tier: opened, filled in the background, let go."""

import asyncio

from pilotlight.common.service import Context
from pilotlight.dataplane.disk_tier import DiskOrigin, DiskTier
from pilotlight.dataplane.disk_writer import DiskWriter
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
