"""What terms of one process share."""

import asyncio
from dataclasses import dataclass

from pilotlight.common.buckets import Bucket
from pilotlight.common.db.retention import PruneMetrics
from pilotlight.common.db.session import Database
from pilotlight.common.service import Context
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class TermContext:
    """What every term of this process works with, and what outlives it."""

    context: Context[SchedulerSettings]
    database: Database
    world: World
    wake: asyncio.Event
    """Set when a decision may come out differently."""
    bucket: Bucket
    """``instances``."""
    leader_bucket: Bucket
    metrics: SchedulerMetrics
    prune_metrics: PruneMetrics
