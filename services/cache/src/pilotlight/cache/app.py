"""Wiring of the cache."""

from prometheus_client import CollectorRegistry, Gauge

from pilotlight.cache.books import Books
from pilotlight.cache.handlers import Handlers
from pilotlight.cache.pool import PublishedCopies
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


def add_metrics(books: Books, registry: CollectorRegistry) -> None:
    """Gauges that read the books when they are scraped."""
    grants = Gauge("pilotlight_cache_grants", "Grants of room that are open", registry=registry)
    grants.set_function(lambda: len(books.grants))
    gateways = Gauge(
        "pilotlight_cache_arrival_gateways",
        "Gateways that tell the cache of arrivals",
        registry=registry,
    )
    gateways.set_function(lambda: books.arrivals.gateways)
    models = Gauge(
        "pilotlight_cache_arrival_models",
        "Models of which the cache knows when they were asked for last",
        registry=registry,
    )
    models.set_function(lambda: books.arrivals.models)


async def build(context: Context[CacheSettings]) -> Application:
    """Build the service."""
    books = Books()
    database = Database(context.settings, "cache", context.clock)
    outbox = Outbox(database, context)
    measure(database, outbox, context.metrics)
    repository = CacheRepository(database)
    rules = EvictionRules(min_residency_s=context.settings.min_residency_s)
    room = RoomMaker(books, repository, context.bus, context.clock, context.background, rules)
    copies = PublishedCopies(await context.bus.bucket(COPIES))
    add_metrics(books, context.metrics)
    pruner = Pruner(
        retention(context.settings),
        database,
        context.clock,
        PruneMetrics(context.metrics),
        interval_s=context.settings.prune_interval_s,
    )
    handlers = Handlers(context, books, repository, room, copies, pruner)
    sole = SoleHolder(context.settings, context.background, handlers.begin, handlers.end)
    return Application(components=[database, outbox, handlers, sole])
