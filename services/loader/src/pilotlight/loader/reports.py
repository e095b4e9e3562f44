"""What the loader tells all services: its report, or that of the whole node (``coalescing``), and
the node's last state for late joiners.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import structlog

from pilotlight.common.buckets import NODES
from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.messages.reports import (
    COALESCE_SUBJECT,
    REPORT_INTERVAL_S,
    Coalesce,
    LoaderReport,
    TellWhole,
    loader_report_subject,
    node_report_subject,
    whole_subject,
)
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, pause, woken
from pilotlight.dataplane.chunk_fetch import Distrusted
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.disk_tier import DiskTier
from pilotlight.dataplane.pool import HostPool
from pilotlight.loader.coalescing import Coalescing
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.policy.cluster import Copy, Liveness, NodeFacts, OriginKind
from pilotlight.policy.ids import NodeId, WorkerId

log = structlog.get_logger()

GATHER_S = 0.02
"""Changes that come this close together travel together; the first one waits for none."""
SETTLE_S = 0.5
"""Between two writes of the node's last state."""
RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What of a node's facts does not change while its loader runs."""

    node_id: NodeId
    host: str
    nic_bytes_per_s: float
    incarnation: str
    dataplane: tuple[str, int] = ("", 0)
    """Host and port at which other nodes reach it."""


class Changes:
    """Says that there is something new to report."""

    def __init__(self) -> None:
        self.report = asyncio.Event()
        self.state = asyncio.Event()

    def note(self) -> None:
        """Something changed."""
        self.report.set()
        self.state.set()


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Reports copies and workers."""

    shape: NodeShape
    pool: HostPool
    copies: HostCopies
    dead_workers: Callable[[], Collection[WorkerId]]
    changes: Changes
    coalescing: Coalescing
    leaving: bool
    """The node leaves when this process stops: no other loader takes over."""
    bus: Bus
    background: Background
    distrusted: Distrusted
    disk: DiskTier | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    _subscriptions: list[Subscription] = field(default_factory=list[Subscription])
    _stopping: bool = False
    _seq: int = 0
    _written: NodeFacts | None = None
    """What the bucket has, as far as is known."""

    async def start(self) -> None:
        """Report from now on."""
        if self._tasks:
            return
        self.bus.on_reconnect(self._on_reconnect)
        node_id, coalescing = self.shape.node_id, self.coalescing
        self._subscriptions = [
            await self.bus.subscribe(COALESCE_SUBJECT, Coalesce, coalescing.on_coalesce),
            await self.bus.subscribe(whole_subject(node_id), TellWhole, coalescing.on_whole),
        ]
        self._tasks = [
            self.background.spawn("loader reports", self._report_for_ever()),
            self.background.spawn("node state", self._keep_state_for_ever()),
        ]

    async def stop(self) -> None:
        """Say for the last time what is held, and whether anything may still be planned for this
        node.
        """
        if not self._tasks:
            return
        tasks, self._tasks = self._tasks, []
        while self._subscriptions:
            await self._subscriptions.pop().end()
        await cancel_all(tasks)
        self._stopping = self.leaving
        await self._publish()

    def facts(self) -> NodeFacts:
        """The node as it is now."""
        return NodeFacts(
            node_id=self.shape.node_id,
            host=self.shape.host,
            liveness=Liveness.ALIVE,
            nic_bytes_per_s=self.shape.nic_bytes_per_s,
            pool_bytes=self.pool.geometry.data_bytes,
            pool_unit_bytes=self.pool.geometry.unit_bytes,
            pool_free_bytes=self.pool.free_bytes,
            copies=self.copies.copies(self.shape.node_id),
            transfers=self.copies.transfers(),
            links=self.copies.links(),
            draining=self._stopping,
            pool_largest_free_bytes=self.pool.largest_free_bytes,
            dataplane_host=self.shape.dataplane[0],
            dataplane_port=self.shape.dataplane[1],
            disk_tier_bytes=self.disk.limit_bytes if self.disk is not None else 0,
            disk_tier_used_bytes=self.disk.used_bytes if self.disk is not None else 0,
            distrusted=self.distrusted.names,
        )

    async def _report_for_ever(self) -> None:
        while True:
            await self._publish()
            await pause(GATHER_S)
            wait_s = REPORT_INTERVAL_S
            if self.coalescing.allowed:
                wait_s = max(GATHER_S, min(wait_s, self.coalescing.wait_s()))
            await woken(self.changes.report, wait_s - GATHER_S)

    async def _publish(self) -> None:
        self._seq += 1
        report = LoaderReport(
            facts=self.facts(),
            incarnation=self.shape.incarnation,
            epoch_seen=self.pool.highest_epoch,
            dead_workers=tuple(sorted(self.dead_workers())),
            seq=self._seq,
        )
        if not self.coalescing.allowed:
            await self.bus.publish(loader_report_subject(self.shape.node_id), report)
            return
        whole = self.coalescing.report(report)
        if whole is not None:
            await self.bus.publish(node_report_subject(self.shape.node_id), whole)
            if self.bus.connected:
                self.coalescing.confirm()

    async def _keep_state_for_ever(self) -> None:
        while True:
            self.changes.state.clear()
            facts = self.facts()
            if self._written is None or _slow(facts) != _slow(self._written):
                self._written = facts
                try:
                    bucket = await self.bus.bucket(NODES)
                    await bucket.put(self.shape.node_id, facts)
                except BusUnavailable as error:
                    self._written = None
                    log.warning(
                        "node's state not written", action="node_state_failed", error=error.message
                    )
                    await pause(RETRY_S)
                    continue
            await pause(SETTLE_S)
            await self.changes.state.wait()

    async def _on_reconnect(self) -> None:
        """The server may have come back without its memory."""
        self._written = None
        self.changes.note()


class CopyObserver:
    """Hears of copies and fetches: reports and measures."""

    def __init__(self, changes: Changes, metrics: LoaderMetrics) -> None:
        self._changes = changes
        self._metrics = metrics

    def on_copies_changed(self) -> None:
        self._changes.note()

    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None:
        self._metrics.origin_bytes.labels(kind=kind).inc(size_bytes)

    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None:
        self._metrics.origin_failures.labels(kind=kind, code=code).inc()

    def on_fetch_ended(self, seconds: float, size_bytes: int, code: str) -> None:
        self._metrics.fetch_seconds.observe(seconds)
        self._metrics.fetched_bytes.inc(size_bytes)
        self._metrics.fetches.labels(code=code).inc()


def _slow(facts: NodeFacts) -> NodeFacts:
    """Facts without what changes all the time."""
    copies = tuple(sorted((_bare(copy) for copy in facts.copies), key=lambda copy: copy.digest))
    volatile = replace(
        facts,
        transfers=(),
        links=(),
        pool_free_bytes=0,
        pool_largest_free_bytes=None,
        disk_tier_used_bytes=0,
    )
    return replace(volatile, copies=copies)


def _bare(copy: Copy) -> Copy:
    return replace(copy, idle_s=0.0, leases=0)
