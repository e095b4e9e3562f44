"""Small models on disk, a pool for each test, and the tools of a fetch around them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import Manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.faults import Faults
from pilotlight.common.phases import PhaseRecorder
from pilotlight.dataplane.bandwidth import SourceLimits
from pilotlight.dataplane.chunk_fetch import Distrusted
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.fetch_tools import FetchTools
from pilotlight.dataplane.file_reads import native_reads
from pilotlight.dataplane.lanes import LaneLimits, Lanes
from pilotlight.dataplane.model_fetch import PartsClaim
from pilotlight.dataplane.origin import Keeper, Nearby
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.readers import Readers
from pilotlight.dataplane.source_origin import OpenSource, SourceOrigin
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest, InstanceId, ModelName
from pilotlight.policy.model import Model, ScalingBounds, Slo
from pilotlight.policy.phase import Phase

POOL_BYTES = 64 * 1024 * 1024


@dataclass
class Registered:
    """A model, its folder, its manifest."""

    model: Model
    folder: Path
    manifest: Manifest

    @property
    def parts(self) -> range:
        """Numbers of all parts."""
        return range(len(self.manifest.parts))


@pytest.fixture
def register(tmp_path: Path) -> Callable[..., Registered]:
    def make(name: str = "tiny", shards: int = 1, **changes: Any) -> Registered:
        folder = tmp_path / name
        folder.mkdir()
        for file, content in tiny_files(tiny_config(**changes), shards=shards).items():
            (folder / file).write_bytes(content)
        checkpoint = read_checkpoint(FolderSource(folder))
        model = Model(
            name=ModelName(name),
            uri=folder.as_uri(),
            revision=None,
            source_version=checkpoint.source_version,
            digest=checkpoint.manifest.digest(),
            text_digest=Digest("0" * 64),
            dtype=checkpoint.run_dtype,
            spec=checkpoint.spec,
            slo=Slo(ttft_ms=1000, tpot_ms=100),
            scaling=ScalingBounds(),
        )
        return Registered(model, folder, checkpoint.manifest)

    return make


@dataclass
class KnownManifests:
    """Manifests in memory, and what was learned about their chunks."""

    manifests: dict[Digest, Manifest] = field(default_factory=dict)
    hold_back: asyncio.Event | None = None
    reads: int = 0
    disputed: Callable[[PilotlightError], None] | None = None

    async def get(self, model: Model) -> Manifest:
        self.reads += 1
        if self.hold_back is not None:
            await self.hold_back.wait()
        return self.manifests[model.digest]

    async def latest(self, model: Model) -> Manifest:
        return await self.get(model)

    def learned(
        self,
        model: Model,
        part: int,
        digests: tuple[Digest, ...],
        disputed: Callable[[PilotlightError], None],
    ) -> None:
        known = {(part, chunk): digest for chunk, digest in enumerate(digests)}
        self.manifests[model.digest] = self.manifests[model.digest].with_digests(known)
        self.disputed = disputed


@dataclass
class Seen:
    """What an observer heard."""

    recorder: PhaseRecorder
    taken: list[tuple[InstanceId, Phase]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    given: list[tuple[OriginKind, int]] = field(default_factory=list)
    failed: list[tuple[OriginKind, str, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_copies_changed(self) -> None:
        self.changed.set()

    @property
    def phases(self) -> list[tuple[InstanceId, Phase]]:
        """Everything that was recorded so far."""
        for instance_id in self.recorder.pending:
            self.taken += [(instance_id, phase) for phase in self.recorder.take(instance_id).phases]
        return self.taken

    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None:
        self.given.append((kind, size_bytes))

    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None:
        self.failed.append((kind, name, code))

    def on_fetch_ended(self, seconds: float, size_bytes: int, code: str) -> None:
        self.ended.append(code)


class Owner:
    """Owns the tasks of one test."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        return task


@dataclass
class Node:
    """A host pool with everything that fills it."""

    pool: HostPool
    copies: HostCopies
    manifests: KnownManifests
    seen: Seen
    tools: FetchTools

    def add(self, registered: Registered) -> Registered:
        self.manifests.manifests[registered.model.digest] = registered.manifest
        return registered

    async def drain(self, claim: PartsClaim) -> list[int]:
        """The parts that a claim waits for, in the order in which they come."""
        async with asyncio.timeout(10):
            return [part.part async for part in self.copies.ready_parts(claim)]

    async def settled(self) -> None:
        """Wait until nothing is fetched."""
        async with asyncio.timeout(10):
            while self.copies.transfers() or self.copies._fetches:
                self.seen.changed.clear()
                await self.seen.changed.wait()


@pytest.fixture
async def make_node(tmp_path: Path, anyio_backend: str):
    nodes: list[Node] = []

    def make(
        *,
        pool_bytes: int = POOL_BYTES,
        bytes_per_s: float | None = None,
        faults: str = "",
        open_source: OpenSource | None = None,
        stall_timeout_s: float = 10.0,
        nearby: Sequence[Nearby] = (),
        keepers: Sequence[Keeper] = (),
        threads: int = 4,
        native: bool = True,
    ) -> Node:
        clock = SystemClock()
        pool = HostPool.open(tmp_path / f"pool-{len(nodes)}", pool_bytes, clock)
        manifests, seen = KnownManifests(), Seen(PhaseRecorder(clock, "loader"))
        tools = FetchTools(
            pool=pool,
            readers=Readers(threads, stall_timeout_s),
            manifests=manifests,
            open_source=open_source or open_folder,
            lanes=Lanes(
                LaneLimits(least=threads, most=threads), SourceLimits(bytes_per_s, clock), clock
            ),
            distrusted=Distrusted(clock),
            faults=Faults.parse(faults),
            clock=clock,
            phases=seen.recorder,
            native=native_reads() if native else None,
            nearby=tuple(nearby),
            keepers=tuple(keepers),
        )
        nodes.append(Node(pool, HostCopies(tools, Owner(), seen), manifests, seen, tools))
        return nodes[-1]

    yield make
    for node in nodes:
        await node.copies.stop()
        node.pool.close(remove=True)


def open_folder(model: Model, manifest: Manifest) -> SourceOrigin:
    return SourceOrigin(FolderSource(Path(model.uri.removeprefix("file://"))), manifest, model.uri)
