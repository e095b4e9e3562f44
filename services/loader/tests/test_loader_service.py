import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import Manifest, encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.buckets import LEADER, NODES
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock, ManualClock, moment_of
from pilotlight.common.errors import (
    CorruptChunk,
    DiskTierTaken,
    HostPoolFull,
    MessageUndecodable,
    NotFound,
    PilotlightError,
    SourceChanged,
    SourceUnavailable,
    UriNotAllowed,
)
from pilotlight.common.messages.hold import LEADING_KEY, Fetch, Leading, NodeHold, node_hold_subject
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.messages.pool import RETURN_S
from pilotlight.common.messages.reports import LOADER_REPORTS, LoaderReport
from pilotlight.common.messages.room import Drop, Dropped, Wanted, drop_subject
from pilotlight.common.messages.verify import (
    AskVerification,
    Verification,
    VerificationStatus,
    Verify,
    verification_subject,
    verify_subject,
)
from pilotlight.common.service import Application, Context
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import MakeContext, ReconnectingBus, until
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.loader.app import build
from pilotlight.loader.identity import node_id_of
from pilotlight.loader.manifests import StoredManifests, all_digests_key, digests_key, recorded_digests, unknown_parts
from pilotlight.loader.settings import LoaderSettings
from pilotlight.policy.types import (
    Digest,
    Epoch,
    FetchPriority,
    Generation,
    InstanceId,
    Model,
    ModelName,
    Moment,
    NodeFacts,
    NodeId,
    OriginKind,
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

    async def start(self, *, clock: Clock | None = None, **changes: object) -> Running:
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
        context = self.make_context("loader", LoaderSettings(**values), clock=clock, bus=self.bus)
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
        return (await self.make_room(Drop(digests=digests))).digests

    async def make_room(self, drop: Drop) -> Dropped:
        return await self.bus.request(drop_subject(self.node_id), drop, Dropped, deadline_s=5)

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


async def test_says_whether_what_is_wanted_fits_in_between(cluster: Cluster) -> None:
    """Sixteen units, four for each of four models: of those of every other one no five lie in a row."""
    unit = 64 * 1024
    models = [cluster.register(f"tiny-{number}", vocab_size=96 + number) for number in range(4)]
    await cluster.start(pool_bytes=16 * unit)
    for model in models:
        assert await cluster.lease(model) == list(ALL)
    report = await cluster.heard.report(lambda report: len(report.facts.copies) == 4)
    assert (report.facts.pool_free_bytes, report.facts.pool_largest_free_bytes) == (0, 0)
    whole = Wanted(digest=Digest("ab" * 32), parts=(0, 1), part_bytes=(5 * unit, 3 * unit))
    reply = await cluster.make_room(Drop(digests=(models[0].digest, models[2].digest), wanted=whole))
    assert (set(reply.digests), reply.fits) == ({models[0].digest, models[2].digest}, False)
    report = await cluster.heard.report(lambda report: len(report.facts.copies) == 2)
    assert (report.facts.pool_free_bytes, report.facts.pool_largest_free_bytes) == (8 * unit, 4 * unit)
    half = Wanted(digest=Digest("ab" * 32), parts=(0, 1), part_bytes=(4 * unit, 4 * unit))
    assert (await cluster.make_room(Drop(digests=(), wanted=half))).fits
    # What of a model is there already needs no room.
    there = Wanted(digest=models[1].digest, parts=ALL, part_bytes=(5 * unit,) * 4)
    assert (await cluster.make_room(Drop(digests=(), wanted=there))).fits
    assert (await cluster.make_room(Drop(digests=(models[1].digest,), wanted=whole))).fits


async def test_a_loader_that_took_over_gives_nothing_up_at_once(cluster: Cluster) -> None:
    """Workers that lived on may be reading by a lease that it has not heard of yet."""
    model = cluster.register()
    running = await cluster.start(handover=True)
    assert await cluster.lease(model) == list(ALL)
    await running.stop()
    clock = ManualClock()
    await cluster.start(handover=True, clock=clock)
    assert await cluster.drop(model.digest) == ()
    clock.advance(RETURN_S)
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


async def test_a_report_says_how_far_a_transfer_is_from_whom_it_has_it_and_how_much_it_matters(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start(link="400kbit")
    prefetch = msgspec.structs.replace(fetch_of(model), priority=FetchPriority.PREFETCH)
    await cluster.hold(prefetch)
    report = await cluster.heard.report(lambda report: report.facts.transfers)
    transfer = report.facts.transfers[0]
    assert (transfer.model, transfer.source, transfer.priority) == (model.name, model.uri, FetchPriority.PREFETCH)
    # Said again, an order is as urgent as it is said to be now.
    await cluster.hold(fetch_of(model))
    report = await cluster.heard.report(
        lambda report: [one.priority for one in report.facts.transfers] == [FetchPriority.COLD_START]
    )
    report = await cluster.heard.report(lambda report: any(one.origins for one in report.facts.transfers))
    [share] = report.facts.transfers[0].origins
    assert (share.kind, share.name) == (OriginKind.SOURCE, model.uri)
    assert 0 < share.size_bytes <= report.facts.transfers[0].total_bytes + report.facts.pool_unit_bytes * len(ALL)
    await cluster.heard.report(holds(model.digest))
    report = await cluster.heard.report(lambda report: report.facts.links)
    [link] = report.facts.links
    assert (link.kind, link.name) == (OriginKind.SOURCE, "file://")
    assert 0 < link.bytes_per_s < 400_000 / 8 * 1.5, "what the limit lets through"
    bucket = await running.context.bus.bucket(NODES)
    written = await bucket.get(cluster.node_id, NodeFacts)
    assert written.value is not None
    assert written.value.links == (), "what changes all the time is in the reports alone"


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


async def test_what_is_on_the_disk_needs_no_source(cluster: Cluster) -> None:
    """The host pool is removed with the first loader, the source before the second one: its bytes are on the disk, but for a torn file."""
    model = cluster.register()
    tier = {"disk_tier_dir": cluster.folder / "tier", "disk_tier_bytes": 64 * 1024 * 1024}
    first = await cluster.start(**tier)
    assert await cluster.lease(model) == list(ALL)
    manifest = msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest)
    chunks = sum(len(part.chunks) for part in manifest.parts)
    stored = await cluster.heard.report(lambda report: len(list((cluster.folder / "tier").rglob("*.chunk"))) == chunks)
    assert stored.facts.disk_tier_bytes == tier["disk_tier_bytes"]
    await until(lambda: first.context.store.exists(all_digests_key(model.digest)))
    cluster.objects[all_digests_key(model.digest)] = await first.context.store.get(all_digests_key(model.digest))
    with pytest.raises(DiskTierTaken):
        await cluster.start(**tier, pool_path=cluster.folder / "other")
    await first.stop()

    weights = cluster.folder / "models" / "tiny" / "model.safetensors"
    content, times = weights.read_bytes(), weights.stat()
    weights.unlink()
    again = await cluster.start(**tier)
    assert await cluster.lease(model) == list(ALL)
    report = await cluster.heard.report(holds(model.digest))
    assert report.facts.disk_tier_used_bytes >= stored.facts.disk_tier_used_bytes > 0

    def count(event: str) -> float | None:
        return again.context.metrics.get_sample_value("pilotlight_disk_tier_chunks_total", {"event": event})

    assert (count("read"), count("damaged")) == (chunks, 0)
    assert await cluster.drop(model.digest) == (model.digest,)
    torn = next((cluster.folder / "tier").rglob("*.chunk"))
    os.truncate(torn, 1000)
    with pytest.raises(SourceChanged, match="gone"):
        await cluster.lease(model)
    assert count("damaged") == 1
    assert not torn.exists()
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert await cluster.lease(model) == list(ALL)
    await until(torn.exists)


async def test_the_first_fetch_writes_digests_that_bind_every_node(cluster: Cluster) -> None:
    model = cluster.register()
    first = await cluster.start()
    assert await cluster.lease(model, (1, 3)) == [1, 3]
    parts = await recorded(first, model, (1, 3))
    manifest = msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest)
    assert {part: len(digests) for part, digests in parts.items()} == {part: len(manifest.parts[part].chunks) for part in (1, 3)}
    assert not await first.context.store.exists(digests_key(model.digest, 0)), "nobody has read it"
    assert not await first.context.store.exists(all_digests_key(model.digest))
    assert await cluster.lease(model) == list(ALL)
    await until(lambda: first.context.store.exists(all_digests_key(model.digest)))
    every = await first.context.store.get(all_digests_key(model.digest))
    assert msgspec.json.decode(every) == list((await recorded(first, model, ALL)).values())
    await first.stop()

    weights = cluster.folder / "models" / "tiny" / "model.safetensors"
    times = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    # The whole list binds, and so does a part's own.
    last = digests_key(model.digest, ALL[-1])
    for key, data in ((all_digests_key(model.digest), every), (last, await first.context.store.get(last))):
        cluster.objects[key] = data
        again = await cluster.start()
        with pytest.raises(CorruptChunk):
            await cluster.lease(model)
        await again.stop()
        del cluster.objects[key]


async def recorded(running: Running, model: Model, parts: tuple[int, ...]) -> dict[int, list[str]]:
    """What the store has of some parts, once it has it."""
    store = running.context.store
    for part in parts:
        await until(lambda part=part: store.exists(digests_key(model.digest, part)))
    return {part: msgspec.json.decode(await store.get(digests_key(model.digest, part))) for part in parts}


async def test_two_nodes_that_read_other_bytes_at_once_are_bound_by_one_of_them(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    for part in ALL:
        nodes = [StoredManifests(running.context.store, running.context.background) for _ in range(3)]
        read = [Digest(f"{number:02x}" * 32) for number in range(3)]
        disputed: dict[int, PilotlightError] = {}
        for node in nodes:
            await node.latest(model)
        for number, node in enumerate(nodes):
            node.learned(model, part, (read[number],), partial(disputed.__setitem__, number))
        await until(lambda disputed=disputed: len(disputed) == 2)
        [first] = {0, 1, 2} - disputed.keys()
        assert {type(error) for error in disputed.values()} == {CorruptChunk}
        assert await recorded(running, model, (part,)) == {part: [read[first]]}
        # From now on all of them are checked against the first one's.
        for node in nodes:
            assert (await node.latest(model)).parts[part].chunks[0].digest == read[first]


async def test_a_part_is_bound_by_what_another_node_has_read(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    manifests = StoredManifests(running.context.store, running.context.background)
    await manifests.get(model)
    assert await cluster.lease(model, (0,)) == [0]
    await manifests.publish(model, 2, (Digest("ab" * 32),))
    with pytest.raises(CorruptChunk, match="recorded is abab"):
        await cluster.lease(model, (1, 2))
    assert await cluster.lease(model, (0, 1)) == [0, 1]


async def test_two_nodes_that_read_the_same_agree(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    nodes = [StoredManifests(running.context.store, running.context.background) for _ in range(2)]
    assert await cluster.lease(model) == list(ALL)
    parts = await recorded(running, model, ALL)
    for node in nodes:
        await node.get(model)
    await asyncio.gather(*(node.publish(model, part, tuple(parts[part])) for node in nodes for part in ALL))
    assert await recorded(running, model, ALL) == parts
    fresh = StoredManifests(running.context.store, running.context.background)
    assert unknown_parts(await fresh.latest(model)) == ()


async def test_what_others_record_later_is_noticed_by_the_next_fetch(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    one, two = (StoredManifests(running.context.store, running.context.background) for _ in range(2))
    assert unknown_parts(await one.latest(model)) == ALL
    await two.get(model)
    manifest = await one.get(model)
    digests = {part: tuple(Digest(f"{part:02x}" * 32) for _ in manifest.parts[part].chunks) for part in ALL}
    await two.publish(model, 1, digests[1])
    assert unknown_parts(await one.get(model)) == ALL
    assert unknown_parts(await one.latest(model)) == (0, 2, 3)
    for part in (0, 2, 3):
        await two.publish(model, part, digests[part])
    assert unknown_parts(await one.latest(model)) == ()
    assert recorded_digests(await one.get(model)) == {(p, c): one for p in ALL for c, one in enumerate(digests[p])}


async def verified(cluster: Cluster, model: Model, deadline_s: float = 60.0) -> Verification:
    """Ask for a verification and wait for its end."""
    asked = Verify(model=model, deadline_s=deadline_s)
    found = await cluster.bus.request(verify_subject(cluster.node_id), asked, Verification, deadline_s=5)
    subject = verification_subject(cluster.node_id)

    async def ended() -> bool:
        nonlocal found
        found = await cluster.bus.request(
            subject, AskVerification(verification_id=found.verification_id), Verification, deadline_s=5
        )
        return found.status in (VerificationStatus.DONE, VerificationStatus.FAILED)

    await until(ended)
    return found


async def test_a_verification_fills_in_what_nobody_has_recorded(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    assert await cluster.lease(model, (1,)) == [1]
    before = await recorded(running, model, (1,))
    found = await verified(cluster, model)
    assert (found.status, found.filled_parts, found.differences) == (VerificationStatus.DONE, 3, ())
    assert found.done_bytes == found.total_bytes == sum(file.size_bytes for file in registered_files(cluster, model))
    assert (await recorded(running, model, ALL))[1] == before[1]
    assert await running.context.store.exists(all_digests_key(model.digest))
    again = await verified(cluster, model)
    assert (again.filled_parts, again.difference_count) == (0, 0)
    assert again.verification_id != found.verification_id


def registered_files(cluster: Cluster, model: Model):
    return msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest).files


async def test_a_verification_names_what_differs(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    true = await verified(cluster, model)
    assert true.filled_parts == len(ALL)
    weights = cluster.folder / "models" / "tiny" / "model.safetensors"
    times = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    found = await verified(cluster, model)
    assert (found.status, found.difference_count, found.filled_parts) == (VerificationStatus.DONE, 1, 0)
    assert "model.safetensors" in found.differences[0]
    assert found.differences[0].startswith(f"part {ALL[-1]}, bytes [0, ")
    os.utime(weights, ns=(1, 1))
    changed = await verified(cluster, model)
    assert (changed.status, changed.code) == (VerificationStatus.FAILED, "source_changed")
    assert running.context.metrics.get_sample_value("pilotlight_fetches_total", {"code": "corrupt_chunk"}) == 0


async def test_a_verification_has_a_deadline_and_is_one_at_a_time(cluster: Cluster) -> None:
    model, other = cluster.register(), cluster.register("other", vocab_size=64)
    await cluster.start(link="8kbit")
    subject = verify_subject(cluster.node_id)
    first, same, waiting = [
        await cluster.bus.request(subject, Verify(model=one, deadline_s=1.0), Verification, deadline_s=5)
        for one in (model, model, other)
    ]
    assert first.verification_id == same.verification_id != waiting.verification_id
    assert waiting.status is VerificationStatus.WAITING
    found = await verified(cluster, model)
    assert (found.status, found.code) == (VerificationStatus.FAILED, "deadline_exceeded")
    with pytest.raises(NotFound, match="start another"):
        await cluster.bus.request(
            verification_subject(cluster.node_id), AskVerification(verification_id="n.gone"), Verification, deadline_s=5
        )


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
