"""A loader that speaks for its workers: when it may, and what listeners know of them then."""

import asyncio

import pytest

from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.pool import Relayed, WorkerHere, WorkerSaid
from pilotlight.common.messages.reports import (
    COALESCE_SUBJECT,
    LOADER_REPORTS,
    NODE_REPORTS,
    Coalesce,
    LoaderReport,
    NodeReport,
    WorkerReport,
)
from pilotlight.common.roster import Roster
from pilotlight.common.roster_feed import RosterFeed
from pilotlight.common.testing import until
from pilotlight.common.waiting import cancel_all, every
from pilotlight.dataplane.report_connection import ReportConnection
from pilotlight.loader.testing import Cluster
from pilotlight.policy.cluster import Liveness
from pilotlight.policy.ids import Epoch, WorkerId
from pilotlight.policy.testing import worker

pytestmark = pytest.mark.anyio

DEADLINE_S = 60.0
"""On a machine that is busy with other tests, too."""


class Scripted:
    """A worker's end, as far as reports go."""

    def __init__(self, cluster: Cluster, index: int = 0) -> None:
        self.facts = worker(index)
        self.relayed = list[int]()
        self._cluster = cluster
        self._connection: ReportConnection | None = None
        self._seq = 0
        self.silent = False
        self._tasks = (
            asyncio.create_task(
                cluster.client().hello(self.facts.worker_id, 4_000_000 + index, self)
            ),
            asyncio.create_task(self._live()),
        )

    def opened(self, connection: ReportConnection) -> None:
        self._connection = connection

    def on_relayed(self, relayed: Relayed) -> None:
        self.relayed.append(relayed.seq)
        if not relayed.seq:
            self.say()

    def closed(self) -> None:
        self._connection = None

    def say(self) -> None:
        self._seq += 1
        report = WorkerReport(facts=self.facts, incarnation="a", epoch_seen=Epoch(1), seq=self._seq)
        self.send(WorkerSaid(report=encode_json(report), seq=self._seq))

    def send(self, message: WorkerSaid | WorkerHere) -> None:
        assert self._connection is not None
        assert self._connection.send(message)

    async def end(self) -> None:
        await cancel_all(self._tasks)

    async def _live(self) -> None:
        async for _ in every(0.1):
            if self._connection is not None and self._seq and not self.silent:
                self.send(WorkerHere())


@pytest.fixture
async def node(cluster: Cluster):
    """A loader, a worker, and a listener."""
    running = await cluster.start()
    context = running.context
    feed = RosterFeed(cluster.bus, context.clock, context.background, Roster())
    await feed.start()
    said = list[NodeReport]()

    async def on_node(report: NodeReport) -> None:
        said.append(report)

    await cluster.bus.subscribe(NODE_REPORTS, NodeReport, on_node)
    scripted = Scripted(cluster)
    yield cluster, feed.roster, scripted, said
    await scripted.end()
    await feed.stop()


async def test_a_loader_speaks_for_its_workers_when_every_listener_understands(node) -> None:
    cluster, roster, scripted, said = node
    await until(lambda: cluster.heard.reports, deadline_s=DEADLINE_S)
    assert not said
    assert not scripted.relayed, "a worker reports itself until then"
    await cluster.bus.publish(COALESCE_SUBJECT, Coalesce(for_s=60.0))
    await until(lambda: 1 in scripted.relayed, deadline_s=DEADLINE_S)
    await until(lambda: WorkerId("w0") in roster.workers, deadline_s=DEADLINE_S)
    counted = len(cluster.heard.reports)
    await until(lambda: sum(not one.parts for one in said) >= 3, deadline_s=DEADLINE_S)
    assert len(cluster.heard.reports) == counted, "the loader no longer reports by itself"
    assert roster.workers[WorkerId("w0")].facts.liveness is Liveness.ALIVE
    await cluster.bus.publish(COALESCE_SUBJECT, Coalesce(for_s=0.0))
    await until(lambda: len(cluster.heard.reports) >= counted + 2, deadline_s=DEADLINE_S)


async def test_a_change_is_told_at_once_and_a_listener_that_begins_asks(node) -> None:
    cluster, roster, scripted, _ = node
    await cluster.bus.publish(COALESCE_SUBJECT, Coalesce(for_s=60.0))
    await until(lambda: WorkerId("w0") in roster.workers, deadline_s=DEADLINE_S)
    scripted.facts = worker(0, memory_bytes=123)
    scripted.say()
    await until(
        lambda: roster.workers[WorkerId("w0")].facts.device.memory_bytes == 123,
        deadline_s=DEADLINE_S,
    )
    context = cluster.loaders[-1].context
    late = RosterFeed(cluster.bus, context.clock, context.background, Roster())
    await late.start()
    await until(lambda: WorkerId("w0") in late.roster.workers, deadline_s=DEADLINE_S)
    assert late.roster.workers[WorkerId("w0")].facts.device.memory_bytes == 123
    assert cluster.node_id in late.roster.nodes
    await late.stop()


async def test_a_worker_that_says_nothing_to_its_loader_is_suspect_then_dead(node) -> None:
    cluster, roster, scripted, _ = node
    await cluster.bus.publish(COALESCE_SUBJECT, Coalesce(for_s=60.0))
    await until(lambda: WorkerId("w0") in roster.workers, deadline_s=DEADLINE_S)
    scripted.silent = True
    seen = set[Liveness]()

    def dead() -> bool:
        seen.add(roster.workers[WorkerId("w0")].facts.liveness)
        return Liveness.DEAD in seen

    await until(dead, deadline_s=DEADLINE_S)
    assert Liveness.SUSPECT in seen
    scripted.silent = False
    await until(
        lambda: roster.workers[WorkerId("w0")].facts.liveness is Liveness.ALIVE,
        deadline_s=DEADLINE_S,
    )


async def test_a_worker_that_ends_is_dead_at_once_and_no_longer_spoken_for(node) -> None:
    cluster, roster, scripted, said = node
    await cluster.bus.publish(COALESCE_SUBJECT, Coalesce(for_s=60.0))
    await until(lambda: WorkerId("w0") in roster.workers, deadline_s=DEADLINE_S)
    await scripted.end()
    await until(
        lambda: roster.workers[WorkerId("w0")].facts.liveness is Liveness.DEAD,
        deadline_s=DEADLINE_S,
    )
    # The roster hears it by a subscription of its own.
    await until(lambda: any(WorkerId("w0") in one.gone for one in said), deadline_s=DEADLINE_S)


async def test_a_worker_of_the_release_before_is_not_asked_for_reports(
    cluster: Cluster,
) -> None:
    await cluster.start()
    await cluster.bus.publish(COALESCE_SUBJECT, Coalesce(for_s=60.0))
    said = list[NodeReport]()

    async def on_node(report: NodeReport) -> None:
        said.append(report)

    await cluster.bus.subscribe(NODE_REPORTS, NodeReport, on_node)
    hello = asyncio.create_task(cluster.client().hello(WorkerId("w0"), 4_000_000))
    await until(lambda: len(said) >= 2, deadline_s=DEADLINE_S)
    assert all(set(one.parts) <= {""} for one in said)
    await cancel_all((hello,))


async def test_the_reports_of_the_release_before_are_heard(cluster: Cluster) -> None:
    running = await cluster.start()
    context = running.context
    feed = RosterFeed(cluster.bus, context.clock, context.background, Roster())
    await feed.start()
    heard = list[LoaderReport]()

    async def on_loader(report: LoaderReport) -> None:
        heard.append(report)

    await cluster.bus.subscribe(LOADER_REPORTS, LoaderReport, on_loader)
    await until(lambda: heard and cluster.node_id in feed.roster.nodes, deadline_s=DEADLINE_S)
    await feed.stop()
