import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import Manifest, encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.buckets import LEADER, NODES
from pilotlight.common.bus import Bus
from pilotlight.common.clock import moment_of
from pilotlight.common.errors import CorruptChunk, HostPoolFull, MessageUndecodable, SourceUnavailable, UriNotAllowed
from pilotlight.common.messages.hold import LEADING_KEY, Fetch, Leading, NodeHold, node_hold_subject
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import LOADER_REPORTS, LoaderReport
from pilotlight.common.messages.room import Drop, Dropped, drop_subject
from pilotlight.common.service import Application, Context
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import MakeContext, ReconnectingBus, until
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.loader.app import build
from pilotlight.loader.identity import node_id_of
from pilotlight.loader.manifests import digests_key
from pilotlight.loader.settings import LoaderSettings
from pilotlight.policy.types import (
    Digest,
    Epoch,
    Generation,
    InstanceId,
    Model,
    ModelName,
    Moment,
    NodeFacts,
    NodeId,
    PhaseName,
    ScalingBounds,
    Slo,
    WorkerId,
)

pytestmark = pytest.mark.anyio

ONE = InstanceId("inst-1")
ALL = (0, 1, 2, 3)


@dataclass
class Heard:
    """What the loader says."""

    reports: list[LoaderReport] = field(default_factory=list)
    phases: list[PhaseReport] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def on_report(self, report: LoaderReport) -> None:
        async with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    async def on_phases(self, report: PhaseReport) -> PhasesKept:
        async with self.changed:
            self.phases.append(report)
            self.changed.notify_all()
        return PhasesKept()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: bool(condition()))

    async def report(self, condition: Callable[[LoaderReport], object]) -> LoaderReport:
        await self.until(lambda: self.reports and condition(self.reports[-1]))
        return self.reports[-1]


@dataclass
class Running:
    """A loader in this process."""

    context: Context[LoaderSettings]
    application: Application
    stopped: bool = False

    async def counts(self, metric: str) -> None:
        """Wait until a metric is 1."""
        await until(lambda: self.context.metrics.get_sample_value(metric) == 1, deadline_s=20)

    async def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            for component in reversed(self.application.components):
                await component.stop()


@dataclass
class Cluster:
    """One node, its models, and the test in the place of everybody else."""

    folder: Path
    bus: Bus
    make_context: MakeContext
    heard: Heard
    objects: dict[str, bytes] = field(default_factory=dict)
    loaders: list[Running] = field(default_factory=list)

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.folder / "state")

    async def start(self, **changes: object) -> Running:
        values = {
            "run_dir": self.folder / "run",
            "state_dir": self.folder / "state",
            "log_dir": self.folder / "logs",
            "pool_path": self.folder / "pool",
            "pool_bytes": 16 * 1024 * 1024,
            "model_roots": str(self.folder / "models"),
            "workers": 0,
            **changes,
        }
        context = self.make_context("loader", LoaderSettings(**values), bus=self.bus)
        for key, data in self.objects.items():
            await context.store.put_if_absent(key, data)
        application = await build(context)
        self.loaders.append(Running(context, application))
        for component in application.components:
            await component.start()
        return self.loaders[-1]

    def register(self, name: str = "tiny", **changes: object) -> Model:
        folder = self.folder / "models" / name
        folder.mkdir(parents=True)
        for file, content in tiny_files(tiny_config(**changes)).items():
            (folder / file).write_bytes(content)
        checkpoint = read_checkpoint(FolderSource(folder))
        digest = checkpoint.manifest.digest()
        self.objects[manifest_key(digest)] = encode(checkpoint.manifest)
        return Model(
            name=ModelName(name),
            uri=folder.as_uri(),
            revision=None,
            source_version=checkpoint.source_version,
            digest=digest,
            text_digest=Digest("0" * 64),
            dtype=checkpoint.run_dtype,
            spec=checkpoint.spec,
            slo=Slo(ttft_ms=1000, tpot_ms=100),
            scaling=ScalingBounds(),
        )

    async def hold(self, *fetches: Fetch, epoch: int = 1, sent: Moment | None = None) -> None:
        command = NodeHold(node_id=self.node_id, epoch=Epoch(epoch), fetches=fetches, sent=sent)
        await self.bus.publish(node_hold_subject(self.node_id), command)

    async def drop(self, *digests: Digest) -> tuple[Digest, ...]:
        reply = await self.bus.request(drop_subject(self.node_id), Drop(digests=digests), Dropped, deadline_s=5)
        return reply.digests

    def client(self) -> PoolClient:
        running = self.loaders[-1]
        return PoolClient(running.context.settings.socket, running.context.clock, grace_s=5)

    async def lease(self, model: Model, parts: tuple[int, ...] = ALL) -> list[int]:
        async with await self.client().lease(WorkerId("w"), ONE, model, parts) as lease:
            return [part.part async for part in lease]


def fetch_of(model: Model, instance_id: str = ONE, generation: int = 1, parts: tuple[int, ...] = ALL) -> Fetch:
    return Fetch(instance_id=InstanceId(instance_id), generation=Generation(generation), model=model, parts=parts)


@pytest.fixture
async def cluster(tmp_path: Path, bus: Bus, make_context: MakeContext):
    heard = Heard()
    await bus.subscribe(LOADER_REPORTS, LoaderReport, heard.on_report)
    await bus.serve(PHASES_SUBJECT, PhaseReport, heard.on_phases)
    (tmp_path / "models").mkdir()
    built = Cluster(tmp_path, bus, make_context, heard)
    yield built
    for running in built.loaders:
        await running.stop()


def holds(digest: Digest, parts: tuple[int, ...] = ALL) -> Callable[[LoaderReport], bool]:
    return lambda report: any(copy.digest == digest and copy.parts == parts for copy in report.facts.copies)


async def test_an_order_is_fetched_reported_and_accounted_for(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    now = moment_of(running.context.clock)
    sent = Moment(at_s=now.at_s - 0.2, wall_offset_s=now.wall_offset_s)
    await cluster.hold(fetch_of(model), epoch=4, sent=sent)
    report = await cluster.heard.report(holds(model.digest))
    assert (report.epoch_seen, report.facts.node_id, report.dead_workers) == (4, cluster.node_id, ())
    assert report.facts.pool_bytes - report.facts.pool_free_bytes == report.facts.copies[0].size_bytes
    await cluster.heard.until(lambda: cluster.heard.phases)
    [kept] = cluster.heard.phases
    assert (kept.instance_id, [phase.name for phase in kept.phases]) == (ONE, [PhaseName.FETCH])
    assert kept.phases[0].start_s == sent.at_s
    assert kept.phases[0].end_s > now.at_s
    # A worker finds everything there.
    assert await cluster.lease(model) == list(ALL)
    assert running.context.metrics.get_sample_value("pilotlight_fetches_total", {"code": ""}) == 1


async def test_a_repeated_order_changes_nothing(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    for _ in range(3):
        await cluster.hold(fetch_of(model))
    await cluster.heard.report(holds(model.digest))
    assert await cluster.drop(model.digest) == (model.digest,)
    await cluster.hold(fetch_of(model))
    await cluster.heard.report(lambda report: not report.facts.copies)
    await cluster.hold(fetch_of(model, generation=2))
    await cluster.heard.report(holds(model.digest))
    assert running.context.metrics.get_sample_value("pilotlight_fetches_total", {"code": ""}) == 2


async def test_a_lease_alone_moves_the_bytes(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start()
    assert await cluster.lease(model, (1, 3)) == [1, 3]
    await cluster.heard.report(holds(model.digest, (1, 3)))


async def test_a_lease_is_in_the_way_of_a_drop(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start()
    async with await cluster.client().lease(WorkerId("w"), ONE, model, ALL) as lease:
        assert [part.part async for part in lease] == list(ALL)
        assert await cluster.drop(model.digest) == ()
        await cluster.heard.report(lambda report: [copy.leases for copy in report.facts.copies] == [1])
    await cluster.heard.report(lambda report: [copy.leases for copy in report.facts.copies] == [0])
    assert await cluster.drop(model.digest) == (model.digest,)


async def test_what_nobody_wants_any_more_is_not_fetched_on(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start(link="8kbit")
    await cluster.hold(fetch_of(model))
    report = await cluster.heard.report(lambda report: report.facts.transfers)
    assert report.facts.transfers[0].total_bytes == model.spec.total_bytes
    await cluster.hold()
    await cluster.heard.report(lambda report: not report.facts.transfers)
    await cluster.heard.report(lambda report: report.facts.pool_free_bytes == report.facts.pool_bytes)
    assert running.context.metrics.get_sample_value("pilotlight_fetched_bytes_total") == 0


async def test_older_epochs_are_refused_also_after_a_restart(cluster: Cluster) -> None:
    model, other = cluster.register(), cluster.register("other", vocab_size=64)
    running = await cluster.start(handover=True)
    await cluster.hold(fetch_of(model), epoch=7)
    await cluster.heard.report(holds(model.digest))
    await cluster.hold(fetch_of(other), epoch=6)
    await cluster.hold(fetch_of(model), epoch=7)
    await running.counts("pilotlight_stale_commands_total")
    await running.stop()

    for handover in (False, True):
        cluster.heard.reports.clear()
        again = await cluster.start(handover=handover)
        report = await cluster.heard.report(lambda report: True)
        assert report.epoch_seen == 7
        await cluster.hold(fetch_of(other, "inst-2"), epoch=6)
        await cluster.hold(epoch=8 if handover else 7)
        await again.counts("pilotlight_stale_commands_total")
        await again.stop()
    assert [copy.digest for copy in report.facts.copies] == [], "the pool was removed when the loader stopped for good"


@pytest.mark.parametrize("host_restarted", [False, True])
async def test_a_loader_that_was_away_knows_who_leads_now(cluster: Cluster, host_restarted: bool) -> None:
    """Its own memory says 7, or nothing; 8 was announced while it was away, and never told to it."""
    model = cluster.register()
    running = await cluster.start(handover=True)
    await cluster.hold(epoch=7)
    await cluster.heard.report(lambda report: report.epoch_seen == 7)
    await running.stop()
    if host_restarted:
        (cluster.folder / "pool").unlink()
    bucket = await cluster.bus.bucket(LEADER)
    await bucket.put(LEADING_KEY, Leading(epoch=Epoch(8)))
    cluster.heard.reports.clear()
    again = await cluster.start()
    await cluster.hold(fetch_of(model), epoch=7)
    await again.counts("pilotlight_stale_commands_total")
    report = await cluster.heard.report(lambda report: True)
    assert {one.epoch_seen for one in cluster.heard.reports} == {8}
    assert not report.facts.copies
    assert not report.facts.transfers
    await cluster.hold(fetch_of(model), epoch=8)
    await cluster.heard.report(holds(model.digest))


async def test_a_loader_that_cannot_ask_who_leads_does_not_start(cluster: Cluster) -> None:
    bucket = await cluster.bus.bucket(LEADER)
    await bucket.put(LEADING_KEY, "nonsense")
    with pytest.raises(MessageUndecodable):
        await cluster.start()


async def test_a_restarted_loader_has_the_copies_still(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start(handover=True)
    assert await cluster.lease(model) == list(ALL)
    await running.stop()
    cluster.heard.reports.clear()
    await cluster.start()
    await cluster.heard.report(holds(model.digest))
    (cluster.folder / "models" / "tiny" / "model.safetensors").unlink()
    assert await cluster.lease(model) == list(ALL)


async def test_the_first_fetch_writes_digests_that_bind_every_node(cluster: Cluster) -> None:
    model = cluster.register()
    first = await cluster.start()
    assert await cluster.lease(model) == list(ALL)
    key = digests_key(model.digest)
    await until(lambda: first.context.store.exists(key))
    written = await first.context.store.get(key)
    manifest = msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest)
    assert [len(part) for part in msgspec.json.decode(written)] == [len(part.chunks) for part in manifest.parts]
    await first.stop()

    cluster.objects[key] = written
    weights = cluster.folder / "models" / "tiny" / "model.safetensors"
    times = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    await cluster.start()
    with pytest.raises(CorruptChunk):
        await cluster.lease(model)


async def test_models_outside_the_roots_are_never_read(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start(model_roots=str(cluster.folder / "elsewhere"))
    with pytest.raises(UriNotAllowed):
        await cluster.lease(model)


async def test_a_manifest_that_is_gone(cluster: Cluster) -> None:
    model = cluster.register()
    cluster.objects.clear()
    await cluster.start()
    with pytest.raises(SourceUnavailable, match="manifest"):
        await cluster.lease(model)


async def test_a_pool_that_is_full(cluster: Cluster) -> None:
    model = cluster.register(vocab_size=60_000)
    await cluster.start(pool_bytes=1024 * 1024)
    with pytest.raises(HostPoolFull):
        await cluster.lease(model)


async def test_late_joiners_find_the_node(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start()
    await cluster.lease(model)
    seen: asyncio.Queue[NodeFacts | None] = asyncio.Queue()

    async def on_change(key: str, value: NodeFacts | None) -> None:
        assert key == cluster.node_id
        seen.put_nowait(value)

    watching = asyncio.create_task((await cluster.bus.bucket(NODES)).watch(NodeFacts, on_change))
    async with asyncio.timeout(10):
        while True:
            facts = await seen.get()
            assert facts is not None
            if [copy.parts for copy in facts.copies] == [ALL]:
                break
    watching.cancel()


async def test_the_nodes_state_is_written_again_after_a_reconnect(cluster: Cluster) -> None:
    reconnecting = cluster.bus = ReconnectingBus(cluster.bus)
    await cluster.start()
    bucket = await cluster.bus.bucket(NODES)
    seen: asyncio.Queue[NodeFacts | None] = asyncio.Queue()

    async def on_change(_: str, value: NodeFacts | None) -> None:
        seen.put_nowait(value)

    watching = asyncio.create_task(bucket.watch(NodeFacts, on_change))
    async with asyncio.timeout(10):
        assert await seen.get() is not None
        await bucket.delete(cluster.node_id)
        while await seen.get() is not None:
            pass
        await reconnecting.reconnect()
        assert await seen.get() is not None
    watching.cancel()


async def test_a_worker_is_spawned_and_is_dead_at_once_when_killed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the place of the worker: a module of that name which only says hello.
    package = tmp_path / "stand_in" / "pilotlight"
    package.mkdir(parents=True)
    (package / "worker.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand_in"))
    monkeypatch.setenv("HF_TOKEN", "for the loader alone")
    running = await cluster.start(workers=1)
    worker_id = f"{cluster.node_id}-w0"
    log = cluster.folder / "logs" / "worker-0.log"
    await running.counts("pilotlight_node_workers")
    assert log.read_text() == f"{worker_id} {cluster.node_id} cpu 1 None\n"
    pid = int(msgspec.json.decode((cluster.folder / "state" / "workers" / "0.json").read_bytes())["pid"])
    os.kill(pid, 9)
    await cluster.heard.report(lambda report: report.dead_workers == (worker_id,))
    await cluster.heard.report(lambda report: report.dead_workers == ())
    await running.stop()
    final = await cluster.heard.report(lambda report: report.facts.draining)
    assert final.dead_workers == (worker_id,)
    assert not (cluster.folder / "pool").exists()


STAND_IN = """
import asyncio, os
from pathlib import Path
from pilotlight.common.clock import SystemClock
from pilotlight.dataplane.pool_client import PoolClient
names = ("WORKER_ID", "NODE_ID", "DEVICE", "WORKERS")
print(*(os.environ["PILOTLIGHT_" + name] for name in names), os.environ.get("HF_TOKEN"), flush=True)
client = PoolClient(Path(os.environ["PILOTLIGHT_POOL_SOCKET"]), SystemClock())
asyncio.run(client.hello(os.environ["PILOTLIGHT_WORKER_ID"]))
"""
