"""One model's way into the host pool: a single fetch, however many wait for it.

::

    wanted parts    0 1 2 3 4 ...       the lowest that is missing comes first, whoever wants it
    chunks          [0a][0b][1a][2a]    a few are read at once; a part is announced as soon as its last chunk is verified

Chunks in flight are the only parallelism: parts become ready in order. Where the source names its files by their content and
nobody has recorded the chunks' digests yet, the last part is ready only when the files have been checked as a whole; until then
nothing that was learned is passed on. So no copy is ever whole that was not checked.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.safetensors import StoredTensor
from pilotlight.common.clock import Clock, wall_offset_s
from pilotlight.common.errors import BadRequest, CorruptChunk, PilotlightError, SourceChanged
from pilotlight.common.faults import Faults
from pilotlight.common.telemetry import span, with_parent
from pilotlight.common.waiting import cancel_all
from pilotlight.dataplane.fetch import ChunkSource, OpenSource, Readers, Reading, ReadProgress
from pilotlight.dataplane.links import Links
from pilotlight.dataplane.pool import HostPool, PartImage
from pilotlight.dataplane.whole_files import FileCheck, can_be_checked, check_layout
from pilotlight.policy.types import Digest, InstanceId, Model, Phase, PhaseName, Transfer

log = structlog.get_logger()


class Manifests(Protocol):
    """Where manifests come from and what was learned about chunks goes to."""

    async def get(self, model: Model) -> Manifest:
        """The manifest with every chunk digest that is known.

        Raises:
            SourceUnavailable: it cannot be read.
        """
        ...

    def learned(self, model: Model, digests: dict[tuple[int, int], Digest]) -> None:
        """Remember the digests of chunks, by (part, chunk), that somebody read for the first time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTools:
    """What every fetch of a node works with."""

    pool: HostPool
    readers: Readers
    manifests: Manifests
    open_source: OpenSource
    links: Links
    faults: Faults
    clock: Clock
    process: str
    """Names this process in phases."""


@dataclass(slots=True, eq=False, kw_only=True)
class Holder:
    """Somebody who wants parts of a model to be in the pool, and stay: a worker's lease, or an order of the scheduler."""

    instance_id: InstanceId
    model: Model
    parts: tuple[int, ...]
    leased: bool
    """A lease: its parts may be read at any moment. An order only asks for the bytes to be moved."""
    trace_parent: str
    since_s: float
    ready: dict[int, float] = field(default_factory=dict[int, float])
    """Parts that are, and since when."""
    error: PilotlightError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def missing(self) -> tuple[int, ...]:
        """Parts that are not ready, in execution order."""
        return tuple(part for part in self.parts if part not in self.ready)


@dataclass(slots=True, eq=False, kw_only=True)
class _InFlight:
    image: PartImage
    index: int
    chunk: Chunk
    reading: "asyncio.Task[Digest]"


class ModelFetch:
    """The fetch of one model: from the first part that is missing to the last that somebody wants."""

    def __init__(self, model: Model, tools: FetchTools, on_ready: Callable[[], None], start_s: float) -> None:
        """``start_s`` is when the word was sent that began it."""
        self.model = model
        self.start_s = start_s
        self.done_bytes = 0
        self.holders: list[Holder] = []
        self.is_spoiled = False
        """The files were checked and are not those that were registered: no part in the pool is worth anything."""
        self._tools = tools
        self._on_ready = on_ready
        self._reading = Reading(tools.readers)
        self._link = tools.links.of(model.uri)
        self._filling: dict[int, PartImage] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._learned: dict[tuple[int, int], Digest] = {}
        self._to_check = False
        self._reported_until_s: dict[InstanceId, float] = {}
        self._source: ChunkSource | None = None

    @property
    def wanted(self) -> tuple[int, ...]:
        """Parts that somebody waits for, in execution order."""
        return tuple(sorted({part for holder in self.holders for part in holder.missing}))

    def transfer(self) -> Transfer:
        """How far it is. Bytes are those of whole parts, as a checkpoint stores them."""
        part_bytes = self.model.spec.part_bytes
        to_do = sum(part_bytes[part] for part in self.wanted if part < len(part_bytes))
        filled = sum(self._filled_bytes(image) for image in self._filling.values())
        return Transfer(
            digest=self.model.digest,
            source=self.model.uri,
            done_bytes=self.done_bytes + filled,
            total_bytes=self.done_bytes + to_do,
        )

    async def run(self) -> None:
        """Fetch until nobody waits for a part.

        Raises:
            PilotlightError: a part cannot be had. Parts that were ready before stay.
        """
        first = self.holders[0]
        with with_parent(first.trace_parent), span("fetch", model=self.model.name, source=self.model.uri) as current:
            try:
                await self._tools.faults.delay("fetch")
                manifest = await self._tools.manifests.get(self.model)
                await self._fill(manifest)
            finally:
                current.set_attribute("bytes", self.done_bytes)

    async def cleaned_up(self) -> None:
        """Return when no thread works for it and what it did not finish is free again."""
        await cancel_all(waiting.reading for waiting in self._in_flight)
        await self._reading.settled()
        for image in self._filling.values():
            self._tools.pool.discard(image)
        self._filling.clear()
        if self._source is not None:
            self._source.close()
        if self._learned and not self._to_check:
            self._tools.manifests.learned(self.model, self._learned)

    async def _fill(self, manifest: Manifest) -> None:
        tools = self._tools
        unknown = any(chunk.digest is None for part in manifest.parts for chunk in part.chunks)
        self._to_check = unknown and can_be_checked(manifest)
        source = await self._reading.run(f"opening {self.model.uri}", lambda _: self._open(manifest))
        while True:
            while len(self._in_flight) < tools.readers.threads and (following := self._next_chunk(manifest)) is not None:
                image, index = following
                chunk = manifest.parts[image.part].chunks[index]
                task = asyncio.create_task(self._read(source, image, chunk), name=f"fetch part {image.part} chunk {index}")
                self._in_flight.append(_InFlight(image=image, index=index, chunk=chunk, reading=task))
            if not self._in_flight:
                return
            oldest = self._in_flight[0]
            digest = await asyncio.shield(oldest.reading)
            if self._to_check and self._is_last(manifest, oldest):
                await self._check_files(source, manifest, oldest.image)
            self._in_flight.popleft()
            self._enter(oldest, digest)

    def _next_chunk(self, manifest: Manifest) -> tuple[PartImage, int] | None:
        """The next chunk to read: of the part that is being filled, else the first of the lowest missing part."""
        for image in self._filling.values():
            asked = image.entered + sum(waiting.image is image for waiting in self._in_flight)
            if asked < len(image.slots):
                return image, asked
        pool, digest = self._tools.pool, self.model.digest
        for part in self.wanted:
            if part in self._filling:
                continue
            if not part < len(manifest.parts):
                raise BadRequest(f"{self.model.name} has no part {part}")
            chunks = manifest.parts[part].chunks
            image = pool.reserve(digest, part, manifest.parts[part].image_bytes, len(chunks))
            if image.ready:
                self._announce(image)
                continue
            self._filling[part] = image
            return image, 0
        return None

    def _open(self, manifest: Manifest) -> ChunkSource:
        # Kept from within the thread: a fetch that is cancelled meanwhile must still close it.
        self._source = self._tools.open_source(self.model, manifest)
        return self._source

    async def _read(self, source: ChunkSource, image: PartImage, chunk: Chunk) -> Digest:
        pool = self._tools.pool

        def read(progress: ReadProgress) -> Digest:
            pool.back(image, chunk.image_offset, chunk.size_bytes)
            with pool.view(image, chunk.image_offset, chunk.size_bytes) as into:
                return source.read_chunk(chunk, into, progress)

        await self._link.take(chunk.size_bytes)
        return await self._reading.run(f"part {image.part} of {self.model.name} from {self.model.uri}", read)

    def _is_last(self, manifest: Manifest, read: _InFlight) -> bool:
        """Whether the pool holds all of the model once this is entered."""
        others = (part for part in range(len(manifest.parts)) if part != read.image.part)
        entered = read.image.entered + 1 == len(read.image.slots)
        return entered and all(self._tools.pool.find(self.model.digest, part) is not None for part in others)

    async def _check_files(self, source: ChunkSource, manifest: Manifest, last: PartImage) -> None:
        """Check the files as a whole, several at a time; then every digest in the pool is one that may be passed on.

        Raises:
            SourceChanged: they are not those that were registered.
        """
        pool = self._tools.pool
        found = {part: pool.find(self.model.digest, part) for part in range(len(manifest.parts))}
        images = {last.part: last} | {part: image for part, image in found.items() if image is not None}

        def view(part: int, offset: int, size_bytes: int) -> memoryview:
            return pool.view(images[part], offset, size_bytes)

        async def check(file: FileCheck) -> tuple[StoredTensor, ...]:
            what = f"checking {file.file.name} of {self.model.uri}"
            return await self._reading.run(what, lambda progress: file.run(source, view, progress))

        with span("check", model=self.model.name, files=len(manifest.files)):
            checks = [asyncio.create_task(check(file), name=f"check {file.file.name}") for file in FileCheck.every(manifest)]
            try:
                check_layout(manifest, (tensor for tensors in await asyncio.gather(*checks) for tensor in tensors))
            except SourceChanged as error:
                self.is_spoiled = True
                raise SourceChanged(f"{self.model.uri}: {error.message}") from error
            finally:
                await cancel_all(checks)
        for part, image in images.items():
            self._learned.update({(part, index): digest for index, digest in enumerate(pool.chunk_digests(image))})
        self._to_check = False

    def _enter(self, read: _InFlight, digest: Digest) -> None:
        image, chunk = read.image, read.chunk
        if chunk.digest is None:
            self._learned[image.part, read.index] = digest
        elif chunk.digest != digest:
            raise CorruptChunk(
                f"{self.model.uri}: part {image.part}, bytes [{chunk.image_offset}, {chunk.image_offset + chunk.size_bytes}) "
                f"have digest {digest[:16]}…, recorded is {chunk.digest[:16]}…"
            )
        span_of_chunk = (chunk.image_offset, chunk.image_offset + chunk.size_bytes)
        self._tools.pool.enter_chunk(image, span_of_chunk, digest)
        if image.ready:
            del self._filling[image.part]
            self.done_bytes += image.image_bytes
            self._announce(image)

    def _announce(self, image: PartImage) -> None:
        now_s = self._tools.clock.monotonic_s()
        for holder in self.holders:
            if image.part in holder.parts:
                holder.ready.setdefault(image.part, now_s)
                holder.changed.set()
        self._on_ready()

    def account(self, instance_id: InstanceId) -> tuple[Phase, ...]:
        """What it did for an instance since it was last asked. It works without a break, so that is one interval at most."""
        tools, now_s = self._tools, self._tools.clock.monotonic_s()
        wanted_since_s = min(holder.since_s for holder in self.holders if holder.instance_id == instance_id)
        start_s = max(self.start_s, wanted_since_s, self._reported_until_s.get(instance_id, 0.0))
        if now_s <= start_s:
            return ()
        self._reported_until_s[instance_id] = now_s
        phase = Phase(
            name=PhaseName.FETCH,
            start_s=start_s,
            end_s=now_s,
            wall_offset_s=wall_offset_s(tools.clock),
            process=tools.process,
            detail=f"{self.done_bytes} bytes from {self.model.uri}",
        )
        return (phase,)

    def _filled_bytes(self, image: PartImage) -> int:
        return image.image_bytes * image.entered // max(1, len(image.slots))
