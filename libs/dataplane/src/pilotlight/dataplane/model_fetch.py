"""One model's way into the host pool: a single fetch, however many wait for it.

::

    wanted parts    0 1 2 3 4 ...       the lowest that is missing comes first, for all claims
    chunks          [0a][0b][1a][2a]    a few are read at once; a part is announced as soon as its last chunk is verified

Chunks in flight are the only parallelism: parts become ready in order. The digests of a part that
is read for the first time are recorded as soon as it is whole. But where the source names its files
by their content, the last part is ready only when the files have been checked as a whole, and until
then nothing that was learned is passed on. So no copy is ever whole that was not checked.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import structlog

from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.safetensors import StoredTensor
from pilotlight.common.errors import BadRequest, PilotlightError, SourceChanged
from pilotlight.common.telemetry import span, with_parent
from pilotlight.common.waiting import cancel_all
from pilotlight.dataplane.chunk_fetch import ChunkFetch
from pilotlight.dataplane.chunk_fill import ChunkFill
from pilotlight.dataplane.fetch_tools import FetchListener, FetchTools
from pilotlight.dataplane.file_reads import reads_of
from pilotlight.dataplane.held import HeldChunk, held_chunk
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.readers import Reading
from pilotlight.dataplane.shares import Rate, Shares
from pilotlight.dataplane.source_origin import OpenedLate
from pilotlight.dataplane.whole_files import FileCheck, can_be_checked, check_layout
from pilotlight.policy.cluster import FetchPriority, OriginKind, Transfer
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model
from pilotlight.policy.phase import PhaseName

log = structlog.get_logger()

AHEAD = 1.5
"""For each thread that reads, chunks that are under way or wait for it: one that is late holds up
few behind it.
"""


@dataclass(slots=True, eq=False, kw_only=True)
class PartsClaim:
    """A claim on parts of a model, to be in the pool and stay: a worker's lease, or an order of the
    scheduler.
    """

    instance_id: InstanceId
    model: Model
    parts: tuple[int, ...]
    leased: bool
    """A lease: its parts may be read at any moment. An order only asks for the bytes to be moved.
    """
    trace_parent: str
    since_s: float
    priority: FetchPriority = FetchPriority.COLD_START
    ready: dict[int, float] = field(default_factory=dict[int, float])
    """Parts that are, and since when."""
    error: PilotlightError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_urgent(self) -> bool:
        """Whether a cold start waits for it: for what a stage grows by none does."""
        return self.priority is FetchPriority.COLD_START

    @property
    def missing(self) -> tuple[int, ...]:
        """Parts that are not ready, in execution order."""
        return tuple(part for part in self.parts if part not in self.ready)


@dataclass(slots=True, eq=False, kw_only=True)
class _InFlight:
    image: PartImage
    index: int
    chunk: Chunk
    fill: ChunkFill
    reading: "asyncio.Task[OriginKind]"


class ModelFetch:
    """The fetch of one model: from the first part that is missing to the last that a claim
    wants.
    """

    def __init__(
        self, model: Model, tools: FetchTools, listener: FetchListener, start_s: float
    ) -> None:
        """Nothing is read before ``run``.

        Args:
            model: The one to fetch.
            tools: What it works with.
            listener: Hears how it gets on.
            start_s: When the word was sent that began it, on the host's monotonic clock.
        """
        self.model = model
        self.start_s = start_s
        self.done_bytes = 0
        self.claims: list[PartsClaim] = []
        self.is_spoiled = False
        """The files were checked and are not those that were registered: no part in the pool is
        worth anything."""
        self._tools = tools
        self._listener = listener
        self._shares = Shares(listener)
        self._rate = Rate(start_s)
        self._reading = Reading(tools.readers, self._rank)
        self._filling: dict[int, PartImage] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._to_check = False
        self._reported_until_s: dict[InstanceId, float] = {}
        self._source: OpenedLate | None = None

    @property
    def priority(self) -> FetchPriority:
        """How much it matters: as much as to the claim to which it matters most."""
        return (
            FetchPriority.COLD_START
            if any(claim.is_urgent for claim in self.claims)
            else FetchPriority.PREFETCH
        )

    @property
    def wanted(self) -> tuple[int, ...]:
        """Parts that a claim waits for: those for a cold start first, then in execution order."""
        missing = {part for claim in self.claims for part in claim.missing}
        urgent = {part for claim in self.claims if claim.is_urgent for part in claim.missing}
        return (*sorted(urgent), *sorted(missing - urgent))

    def transfer(self) -> Transfer:
        """How far it is. Bytes are those of whole parts, as a checkpoint stores them."""
        part_bytes = self.model.spec.part_bytes
        to_do = sum(part_bytes[part] for part in self.wanted if part < len(part_bytes))
        filled = sum(self._filled_bytes(image) for image in self._filling.values())
        done, now_s = self.done_bytes + filled, self._tools.clock.monotonic_s()
        return Transfer(
            digest=self.model.digest,
            source=self.model.uri,
            done_bytes=done,
            total_bytes=self.done_bytes + to_do,
            model=self.model.name,
            priority=self.priority,
            bytes_per_s=self._rate.of(done, now_s),
            age_s=now_s - self.start_s,
            origins=self._shares.given,
        )

    async def run(self) -> None:
        """Fetch until no claim waits for a part.

        Raises:
            PilotlightError: a part cannot be had. Parts that were ready before stay.
        """
        first = self.claims[0]
        with (
            with_parent(first.trace_parent),
            span("fetch", model=self.model.name, source=self.model.uri) as current,
        ):
            try:
                await self._tools.faults.delay("fetch")
                manifest = await self._tools.manifests.latest(self.model)
                await self._fill(manifest)
            finally:
                current.set_attribute("bytes", self.done_bytes)
                current.set_attribute(
                    "origins", ", ".join(share.name for share in self._shares.given)
                )
                for kind in OriginKind:
                    current.set_attribute(f"bytes_{kind}", self._shares.of_kind(kind))

    async def cleaned_up(self) -> None:
        """Return when what it did not finish is free again.

        A thread that hangs writes nothing any more when it wakes.
        """
        await cancel_all(waiting.reading for waiting in self._in_flight)
        for waiting in self._in_flight:
            waiting.fill.lose()
        for image in self._filling.values():
            self._tools.pool.discard(image)
        self._filling.clear()
        self._tools.moved.send()

    def held(self, part: int, index: int) -> HeldChunk | None:
        """A chunk of a part that is being filled: one that is entered, or is on its way."""
        image = self._filling.get(part)
        if image is not None and index < image.entered:
            return held_chunk(self._tools.pool, image, index)
        for waiting in self._in_flight:
            if waiting.image.part == part and waiting.index == index:
                chunk, fill = waiting.chunk, waiting.fill
                return HeldChunk(
                    waiting.image, index, chunk.image_offset, chunk.size_bytes, chunk.digest, fill
                )
        return None

    async def closed(self) -> None:
        """Return when no thread works for it any more, and its source is closed."""
        await self._reading.settled()
        if self._source is not None:
            self._source.close()

    async def _fill(self, manifest: Manifest) -> None:
        tools = self._tools
        unknown = any(chunk.digest is None for part in manifest.parts for chunk in part.chunks)
        self._to_check = unknown and can_be_checked(manifest)
        source = self._source = OpenedLate(self.model, manifest, tools.open_source)
        chunks = ChunkFetch(
            model=self.model,
            manifest=manifest,
            source=source,
            nearby=tools.nearby,
            lanes=tools.lanes,
            distrusted=tools.distrusted,
            reading=self._reading,
            rank=self._rank_of,
            observer=self._shares,
            relearn=lambda: tools.manifests.latest(self.model),
        )
        while True:
            while (
                len(self._in_flight) < AHEAD * tools.readers.threads
                and (following := self._next_chunk(manifest)) is not None
            ):
                self._in_flight.append(self._begin(chunks, *following))
            if not self._in_flight:
                return
            oldest = self._in_flight[0]
            kind = await asyncio.shield(oldest.reading)
            if self._to_check and self._is_last(manifest, oldest):
                await self._check_files(source, manifest, oldest)
            self._in_flight.popleft()
            self._enter(oldest, manifest, kind)

    def _next_chunk(self, manifest: Manifest) -> tuple[PartImage, int] | None:
        """The next chunk to read, of the first part that has one; what was begun and is not wanted
        any more is the last.
        """
        pool, digest = self._tools.pool, self.model.digest
        for part in dict.fromkeys((*self.wanted, *self._filling)):
            image = self._filling.get(part)
            if image is None:
                if not part < len(manifest.parts):
                    raise BadRequest(f"{self.model.name} has no part {part}")
                described = manifest.parts[part]
                image = pool.reserve(digest, part, described.image_bytes, len(described.chunks))
                if image.ready:
                    self._announce(image)
                    continue
                self._filling[part] = image
            asked = image.entered + sum(waiting.image is image for waiting in self._in_flight)
            if asked < len(image.slots):
                return image, asked
        return None

    def _begin(self, chunks: ChunkFetch, image: PartImage, index: int) -> _InFlight:
        pool, chunk = self._tools.pool, chunks.manifest.parts[image.part].chunks[index]

        def place(offset: int, data: memoryview) -> None:
            pool.write(image, chunk.image_offset + offset, data)

        library = self._tools.native
        files = reads_of(library, pool, image, chunk) if library is not None else None
        fill = ChunkFill(chunk.digest, chunk.size_bytes, place, files)
        reading = asyncio.create_task(
            chunks.fetch(image.part, index, fill), name=f"fetch part {image.part} chunk {index}"
        )
        self._tools.moved.send()
        return _InFlight(image=image, index=index, chunk=chunk, fill=fill, reading=reading)

    def _rank(self) -> tuple[int, ...]:
        return (0 if self.priority is FetchPriority.COLD_START else 1,)

    def _rank_of(self, part: int) -> tuple[int, ...]:
        """The second half of a model may be on its way while a cold start waits for the first: each
        part has a rank of its own.
        """
        for claim in self.claims:
            if claim.is_urgent and part in claim.parts:
                return (0,)
        return (1,)

    def _is_last(self, manifest: Manifest, read: _InFlight) -> bool:
        """Whether the pool holds all of the model once this is entered."""
        others = (part for part in range(len(manifest.parts)) if part != read.image.part)
        entered = read.image.entered + 1 == len(read.image.slots)
        return entered and all(
            self._tools.pool.find(self.model.digest, part) is not None for part in others
        )

    async def _check_files(self, source: OpenedLate, manifest: Manifest, last: _InFlight) -> None:
        """Check the files as a whole, several at a time; then every digest in the pool is one that
        may be passed on.

        Raises:
            SourceChanged: they are not those that were registered.
        """
        pool = self._tools.pool
        found = {part: pool.find(self.model.digest, part) for part in range(len(manifest.parts))}
        images = {last.image.part: last.image} | {
            part: image for part, image in found.items() if image is not None
        }

        def view(part: int, offset: int, size_bytes: int) -> memoryview:
            return pool.view(images[part], offset, size_bytes)

        async def check(file: FileCheck) -> tuple[StoredTensor, ...]:
            what = f"checking {file.file.name} of {self.model.uri}"
            return await self._reading.run(what, lambda progress: file.run(source, view, progress))

        with span("check", model=self.model.name, files=len(manifest.files)):
            checks = [
                asyncio.create_task(check(file), name=f"check {file.file.name}")
                for file in FileCheck.every(manifest)
            ]
            try:
                check_layout(
                    manifest,
                    (tensor for tensors in await asyncio.gather(*checks) for tensor in tensors),
                )
            except SourceChanged as error:
                self.is_spoiled = True
                raise SourceChanged(f"{self.model.uri}: {error.message}") from error
            finally:
                await cancel_all(checks)
        self._to_check = False
        for part in images.keys() - {last.image.part}:
            self._learn(manifest, images[part])

    def _enter(self, read: _InFlight, manifest: Manifest, kind: OriginKind) -> None:
        image, chunk, digest = read.image, read.chunk, read.fill.found
        chunk_range = (chunk.image_offset, chunk.image_offset + chunk.size_bytes)
        self._tools.pool.enter_chunk(image, chunk_range, digest, read.fill.units)
        self._tools.moved.send()
        for keeper in self._tools.keepers:
            keeper.keep(
                digest,
                self._tools.pool.file_offset(image) + chunk.image_offset,
                chunk.size_bytes,
                kind,
                self.model.digest,
            )
        if image.ready:
            del self._filling[image.part]
            self.done_bytes += image.image_bytes
            if not self._to_check:
                self._learn(manifest, image)
            self._announce(image)

    def _learn(self, manifest: Manifest, image: PartImage) -> None:
        """Record a part's digests, unless they are recorded."""
        if any(chunk.digest is None for chunk in manifest.parts[image.part].chunks):
            digests = self._tools.pool.chunk_digests(image)
            self._tools.manifests.learned(
                self.model, image.part, digests, self._listener.on_disputed
            )

    def _announce(self, image: PartImage) -> None:
        now_s = self._tools.clock.monotonic_s()
        for claim in self.claims:
            if image.part in claim.parts:
                claim.ready.setdefault(image.part, now_s)
                claim.changed.set()
        self._listener.on_ready()

    def account(self, instance_id: InstanceId) -> None:
        """Record what it did for an instance since it was last asked.

        It works without a break: that is one interval. What is fetched for no instance is part of
        no start.
        """
        if not instance_id:
            return
        tools, now_s = self._tools, self._tools.clock.monotonic_s()
        wanted_since_s = min(
            claim.since_s for claim in self.claims if claim.instance_id == instance_id
        )
        start_s = max(self.start_s, wanted_since_s, self._reported_until_s.get(instance_id, 0.0))
        if now_s <= start_s:
            return
        self._reported_until_s[instance_id] = now_s
        detail = ", ".join(
            f"{share.size_bytes} bytes from {share.name}" for share in self._shares.given
        )
        tools.phases.record(instance_id, PhaseName.FETCH, start_s, now_s, detail=detail)

    def _filled_bytes(self, image: PartImage) -> int:
        entered = image.image_bytes * image.entered // max(1, len(image.slots))
        coming = sum(
            reading.fill.received_bytes for reading in self._in_flight if reading.image is image
        )
        return min(image.image_bytes, entered + coming)
