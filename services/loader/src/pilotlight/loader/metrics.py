"""What the loader measures, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotlight.common.errors import (
    CorruptChunk,
    HostPoolFull,
    SourceChanged,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
)
from pilotlight.dataplane.pool import HostPool

FETCH_CODES = (
    "",
    *(kind.code for kind in (SourceUnavailable, SourceMissing, SourceDenied, SourceChanged, CorruptChunk, HostPoolFull)),
)
"""How fetches usually end. Each is shown from the start: an alert sees the first of them only when there was a 0 before it."""


class LoaderMetrics:
    """Counters and gauges of one loader."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pool_bytes = Gauge("pilotlight_pool_bytes", "Size of the host pool.", registry=registry)
        self.pool_free_bytes = Gauge(
            "pilotlight_pool_free_bytes", "Bytes of the host pool that nothing takes.", registry=registry
        )
        self.pool_fragmentation = Gauge(
            "pilotlight_pool_fragmentation_ratio", "Share of the free bytes outside the largest free range.", registry=registry
        )
        self.fetched_bytes = Counter(
            "pilotlight_fetched_bytes", "Bytes of parts that were fetched and verified.", registry=registry
        )
        self.fetches = Counter(
            "pilotlight_fetches", "Fetches that ended, by the error they ended with.", ["code"], registry=registry
        )
        for code in FETCH_CODES:
            self.fetches.labels(code=code)
        self.fetch_seconds = Histogram(
            "pilotlight_fetch_seconds",
            "Duration of fetches.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=registry,
        )
        self.stale_commands = Counter("pilotlight_stale_commands", "Commands refused for an older epoch.", registry=registry)
        self.workers = Gauge("pilotlight_node_workers", "Workers that are connected.", registry=registry)
        self.worker_starts = Counter("pilotlight_worker_starts", "Worker processes that were spawned.", registry=registry)

    def watch_pool(self, pool: HostPool) -> None:
        """Read the pool's figures whenever somebody asks for metrics."""
        self.pool_bytes.set(pool.geometry.data_bytes)
        self.pool_free_bytes.set_function(lambda: pool.free_bytes)
        self.pool_fragmentation.set_function(lambda: pool.fragmentation)
