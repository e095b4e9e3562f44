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
from pilotlight.dataplane.disk_tier import DiskEvent, DiskTier
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import NodeId

FETCH_CODES = (
    "",
    *(
        kind.code
        for kind in (
            SourceUnavailable,
            SourceMissing,
            SourceDenied,
            SourceChanged,
            CorruptChunk,
            HostPoolFull,
        )
    ),
)
"""How fetches usually end. Each is shown from the start: an alert sees the first of them only when
there was a 0 before it."""


class LoaderMetrics:
    """Counters and gauges of one loader."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pool_bytes = Gauge(
            "pilotlight_pool_bytes", "Size of the host pool.", registry=registry
        )
        self.pool_free_bytes = Gauge(
            "pilotlight_pool_free_bytes",
            "Bytes of the host pool that nothing takes.",
            registry=registry,
        )
        self.pool_fragmentation = Gauge(
            "pilotlight_pool_fragmentation_ratio",
            "Share of the free bytes outside the largest free range.",
            registry=registry,
        )
        self.reports = Counter(
            "pilotlight_node_reports",
            "Reports of this node and its workers together, by what they said: the whole, a change, or that nothing changed.",
            ["what"],
            registry=registry,
        )
        for what in ("whole", "change", "heartbeat"):
            self.reports.labels(what=what)
        self.fetched_bytes = Counter(
            "pilotlight_fetched_bytes",
            "Bytes of parts that were fetched and verified.",
            registry=registry,
        )
        self.fetches = Counter(
            "pilotlight_fetches",
            "Fetches that ended, by the error they ended with.",
            ["code"],
            registry=registry,
        )
        for code in FETCH_CODES:
            self.fetches.labels(code=code)
        self.origin_bytes = Counter(
            "pilotlight_origin_bytes",
            "Bytes of verified chunks, by what they came from.",
            ["kind"],
            registry=registry,
        )
        self.origin_failures = Counter(
            "pilotlight_origin_failures",
            "Origins that a fetch set aside, by what they are and the error; corrupt_chunk: one that gave wrong bytes.",
            ["kind", "code"],
            registry=registry,
        )
        for kind in OriginKind:
            self.origin_bytes.labels(kind=kind)
            self.origin_failures.labels(kind=kind, code=CorruptChunk.code)
        self.link_sent_bytes = Counter(
            "pilotlight_link_sent_bytes",
            "Bytes of chunks that went to another node.",
            ["node"],
            registry=registry,
        )
        self.link_received_bytes = Counter(
            "pilotlight_link_received_bytes",
            "Bytes of chunks that came from another node, verified or not.",
            ["node"],
            registry=registry,
        )
        self.links_refused = Counter(
            "pilotlight_links_refused",
            "Connections between nodes that ended because one did not take the other for a node of its cluster, or not for a sound one.",
            registry=registry,
        )
        self.disk_tier_bytes = Gauge(
            "pilotlight_disk_tier_bytes",
            "Limit of the disk tier; 0: there is none.",
            registry=registry,
        )
        self.disk_tier_used_bytes = Gauge(
            "pilotlight_disk_tier_used_bytes",
            "Bytes that the disk tier's files take.",
            registry=registry,
        )
        self.disk_tier_chunks = Counter(
            "pilotlight_disk_tier_chunks",
            "Chunks of the disk tier, by what happened to them.",
            ["event"],
            registry=registry,
        )
        for event in DiskEvent:
            self.disk_tier_chunks.labels(event=event)
        self.fetch_seconds = Histogram(
            "pilotlight_fetch_seconds",
            "Duration of fetches.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=registry,
        )
        self.stale_commands = Counter(
            "pilotlight_stale_commands", "Commands refused for an older epoch.", registry=registry
        )
        self.workers = Gauge(
            "pilotlight_node_workers", "Workers that are connected.", registry=registry
        )
        self.write_failures = Counter(
            "pilotlight_loader_write_failures",
            "Times that the loader could not write down which process a worker is: its disk is full, or can only be read.",
            registry=registry,
        )
        self.worker_starts = Counter(
            "pilotlight_worker_starts", "Worker processes that were spawned.", registry=registry
        )

    def on_sent(self, node_id: NodeId, size_bytes: int) -> None:
        """Chunks went to a node. Any thread."""
        self.link_sent_bytes.labels(node=node_id).inc(size_bytes)

    def on_received(self, node_id: NodeId, size_bytes: int) -> None:
        """Chunks came from a node. Any thread."""
        self.link_received_bytes.labels(node=node_id).inc(size_bytes)

    def on_refused(self) -> None:
        """A connection was refused. Any thread."""
        self.links_refused.inc()

    def disk_tier_event(self, event: DiskEvent) -> None:
        """Something happened to a chunk of the disk tier. Any thread."""
        self.disk_tier_chunks.labels(event=event).inc()

    def watch_disk(self, tier: DiskTier) -> None:
        """Read the disk tier's figures with each request for metrics."""
        self.disk_tier_bytes.set(tier.limit_bytes)
        self.disk_tier_used_bytes.set_function(lambda: tier.used_bytes)

    def watch_pool(self, pool: HostPool) -> None:
        """Read the pool's figures with each request for metrics."""
        self.pool_bytes.set(pool.geometry.data_bytes)
        self.pool_free_bytes.set_function(lambda: pool.free_bytes)
        self.pool_fragmentation.set_function(lambda: pool.fragmentation)
