"""A node for tests: a loader in this process, tiny models on disk, and the test in the place of all
other services.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.messages.hold import (
    Fetch,
    NodeHold,
    NodePrefetch,
    node_hold_subject,
    prefetch_subject,
)
from pilotlight.common.messages.phases import PhaseReport, PhasesKept
from pilotlight.common.messages.reports import LoaderReport
from pilotlight.common.messages.room import Drop, Dropped, drop_subject
from pilotlight.common.service import Application, Context
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import MakeContext, until
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.loader.app import build
from pilotlight.loader.identity import node_id_of
from pilotlight.loader.manifests import digests_key
from pilotlight.loader.opening_ahead import OpeningAhead
from pilotlight.loader.settings import LoaderSettings
from pilotlight.policy.ids import Digest, Epoch, Generation, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model, ScalingBounds, Slo
from pilotlight.policy.phase import Moment

ONE = InstanceId("inst-1")
ALL = (0, 1, 2, 3)


@dataclass
class Heard:
    """What the loader says."""

    reports: list[LoaderReport] = field(default_factory=list[LoaderReport])
    phases: list[PhaseReport] = field(default_factory=list[PhaseReport])
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def on_report(self, report: LoaderReport) -> None:
        """A loader reports."""
        async with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    async def on_phases(self, report: PhaseReport) -> PhasesKept:
        """A loader tells phases, as to the leader."""
        async with self.changed:
            self.phases.append(report)
            self.changed.notify_all()
        return PhasesKept()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what was heard is such."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: bool(condition()))

    async def report(self, condition: Callable[[LoaderReport], object]) -> LoaderReport:
        """The first last report that is such."""
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
        """In order, once."""
        if not self.stopped:
            self.stopped = True
            for component in reversed(self.application.components):
                await component.stop()


@dataclass
class Cluster:
    """One node, its models, and the test in the place of all other services."""

    folder: Path
    bus: Bus
    make_context: MakeContext
    heard: Heard
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What the object store has when a loader starts."""
    loaders: list[Running] = field(default_factory=list[Running])

    @property
    def node_id(self) -> NodeId:
        """As the loader makes it up at its first start."""
        return node_id_of(self.folder / "state")

    async def start(
        self, *, clock: Clock | None = None, opening: OpeningAhead | None = None, **changes: Any
    ) -> Running:
        """A loader whose settings are changed so; on the folders of the one before."""
        values: dict[str, Any] = {
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
        application = await build(context, opening=opening)
        self.loaders.append(Running(context, application))
        for component in application.components:
            await component.start()
        return self.loaders[-1]

    def register(self, name: str = "tiny", **changes: Any) -> Model:
        """A tiny model of another configuration, as the gateway registers it."""
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
        """Command as the scheduler does."""
        command = NodeHold(node_id=self.node_id, epoch=Epoch(epoch), fetches=fetches)
        await self.bus.publish(node_hold_subject(self.node_id), command, sent=sent)

    async def prefetch(self, *fetches: Fetch, cache: str = "c", seq: int = 0) -> None:
        """Have fetched ahead, as the cache does."""
        command = NodePrefetch(node_id=self.node_id, cache=cache, fetches=fetches, seq=seq)
        await self.bus.publish(prefetch_subject(self.node_id), command)

    async def drop(self, *digests: Digest) -> tuple[Digest, ...]:
        """What of these the loader gave up."""
        return (await self.make_room(Drop(digests=digests))).digests

    async def make_room(self, drop: Drop) -> Dropped:
        """Ask as the cache does."""
        return await self.bus.request(drop_subject(self.node_id), drop, Dropped, deadline_s=5)

    def client(self) -> PoolClient:
        """A worker's way to the pool."""
        running = self.loaders[-1]
        return PoolClient(running.context.settings.socket, running.context.clock, grace_s=5)

    async def lease(self, model: Model, parts: tuple[int, ...] = ALL) -> list[int]:
        """Take parts as a worker does; which came."""
        async with await self.client().lease(WorkerId("w"), ONE, model, parts) as lease:
            return [part.part async for part in lease]


def fetch_of(
    model: Model, instance_id: str = ONE, generation: int = 1, parts: tuple[int, ...] = ALL
) -> Fetch:
    """An order to fetch parts."""
    return Fetch(
        instance_id=InstanceId(instance_id),
        generation=Generation(generation),
        model=model,
        parts=parts,
    )


def holds(digest: Digest, parts: tuple[int, ...] = ALL) -> Callable[[LoaderReport], bool]:
    """Whether a report names a copy of exactly these parts."""
    return lambda report: any(
        copy.digest == digest and copy.parts == parts for copy in report.facts.copies
    )


async def recorded(running: Running, model: Model, parts: tuple[int, ...]) -> dict[int, list[str]]:
    """What the store has of some parts, once it has it."""
    store = running.context.store
    for part in parts:
        await until(lambda part=part: store.exists(digests_key(model.digest, part)))
    return {
        part: msgspec.json.decode(await store.get(digests_key(model.digest, part)))
        for part in parts
    }
