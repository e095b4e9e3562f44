"""Wiring of the cache."""

from pilotlight.cache.books import Books
from pilotlight.cache.disks import DiskOrders
from pilotlight.cache.forecasts import Forecasts
from pilotlight.cache.handlers import Handlers
from pilotlight.cache.keeper import Keeper
from pilotlight.cache.lender import Lender
from pilotlight.cache.measures import CacheMeasures, add_metrics
from pilotlight.cache.pool import PublishedCopies
from pilotlight.cache.registrations import Registrations
from pilotlight.cache.repository import CacheRepository, retention
from pilotlight.cache.room import RoomMaker
from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.sole import SoleHolder
from pilotlight.common.buckets import COPIES
from pilotlight.common.db.measures import measure
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.retention import PruneMetrics, Pruner
from pilotlight.common.db.session import Database
from pilotlight.common.service import Application, Context
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.lending import LendingRules
from pilotlight.policy.scaling import ScalingRules


async def build(context: Context[CacheSettings]) -> Application:
    """Build the service."""
    books = Books(policies=TierPolicies(context.settings.eviction_policy))
    database = Database(context.settings, "cache", context.clock)
    outbox = Outbox(database, context)
    measure(database, outbox, context.metrics)
    repository = CacheRepository(database)
    registrations = Registrations(books, repository)
    rules = EvictionRules(min_residency_s=context.settings.min_residency_s)
    lending = LendingRules(kept_back_share=context.settings.kv_kept_back_share)
    lender = Lender(books, context.bus, context.clock, lending)
    measures = CacheMeasures(books, context.metrics)
    keeper = Keeper(
        books,
        context.bus,
        context.clock,
        context.incarnation,
        context.settings.host_copies,
        Forecasts(books, ScalingRules(instance_requests=context.settings.instance_requests)),
    )
    room = RoomMaker(
        books,
        repository,
        registrations,
        context.bus,
        context.clock,
        context.background,
        rules,
        lender,
        keeper,
        measures,
    )
    copies = PublishedCopies(await context.bus.bucket(COPIES), keeper.had)
    add_metrics(books, lender, context.metrics)
    pruner = Pruner(
        retention(context.settings),
        database,
        context.clock,
        PruneMetrics(context.metrics),
        interval_s=context.settings.prune_interval_s,
    )
    handlers = Handlers(
        context,
        books,
        repository,
        registrations,
        room,
        lender,
        keeper,
        measures,
        copies,
        DiskOrders(books, context.bus, context.clock),
        pruner,
    )
    sole = SoleHolder(context.settings, context.background, handlers.begin, handlers.end)
    return Application(components=[database, outbox, handlers, sole])
