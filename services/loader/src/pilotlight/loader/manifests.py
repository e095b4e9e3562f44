"""Manifests from the object store, and the chunk digests that the first fetch of each part fills
in.

Digests lie beside the manifest, under its digest, an object for each part::

    digests/v2/<manifest>/0.json        of part 0's chunks, in order; written once, by the first node that has read all of the part
    digests/v2/<manifest>/all.json      of all parts, once all are there: what saves the other nodes from reading them one by one

Every later fetch is checked against them. A node that was second and read something else gives up
what it has read.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
import structlog

from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import Manifest, decode
from pilotlight.common.errors import (
    CorruptChunk,
    InternalError,
    NotFound,
    PilotlightError,
    SourceUnavailable,
    error_of,
)
from pilotlight.common.service import Background
from pilotlight.common.store import ObjectStore, manifest_key
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Model

log = structlog.get_logger()

MAX_KNOWN = 256
"""Manifests that are kept decoded."""
PUBLISH_TRIES = 6
READS = 16
"""Objects that are read at once."""

_Part = list[Digest]
T = TypeVar("T")
Disputed = Callable[[PilotlightError], None]


def digests_key(digest: Digest, part: int) -> str:
    """Where the digests of a part's chunks lie, in order."""
    return f"digests/v2/{digest}/{part}.json"


def all_digests_key(digest: Digest) -> str:
    """Where those of all parts lie, in order."""
    return f"digests/v2/{digest}/all.json"


class StoredManifests:
    """``Manifests`` of the data plane, on the object store."""

    def __init__(self, store: ObjectStore, background: Background) -> None:
        self._store = store
        self._background = background
        self._known: OrderedDict[Digest, Manifest] = OrderedDict()
        self._reading: dict[Digest, asyncio.Task[Manifest]] = {}
        self._reads = asyncio.Semaphore(READS)
        self._rng = random.Random()

    async def get(self, model: Model) -> Manifest:
        """The manifest, with some of the chunk digests that are recorded.

        Raises:
            SourceUnavailable: it is not in the store, or the store cannot be read.
            BadCheckpoint: what the store holds is not that manifest.
        """
        known = self._known.get(model.digest)
        if known is None:
            return await self.latest(model)
        self._known.move_to_end(model.digest)
        return known

    async def latest(self, model: Model) -> Manifest:
        """The manifest with every chunk digest that is recorded by now. Raises what ``get``
        raises.
        """
        digest = model.digest
        known = self._known.get(digest)
        if known is not None and not unknown_parts(known):
            self._known.move_to_end(digest)
            return known
        reading = self._reading.get(digest)
        if reading is None:
            reading = self._reading[digest] = asyncio.create_task(
                self._read(model), name=f"read manifest {digest[:12]}"
            )
            reading.add_done_callback(lambda _: self._reading.pop(digest, None))
        # Several may wait for it: one that leaves must not take it from the others.
        return await asyncio.shield(reading)

    def learned(
        self, model: Model, part: int, digests: tuple[Digest, ...], disputed: Disputed
    ) -> None:
        """Record the digests of a part that was read here.

        Args:
            model: The part's.
            part: Its index.
            digests: Of its chunks, in order.
            disputed: Called when others are recorded.
        """
        self._background.spawn(
            f"publish digests of part {part} of {model.name}",
            self._publish(model, part, digests, disputed),
        )

    async def publish(self, model: Model, part: int, digests: tuple[Digest, ...]) -> None:
        """Record the digests of a part, unless they are; and those of all parts together, once all
        are.

        Raises:
            CorruptChunk: others are recorded.
            SourceUnavailable: the store cannot be read or written.
        """
        key = digests_key(model.digest, part)
        if not await self._store.put_if_absent(key, msgspec.json.encode(digests)):
            recorded = await self._read_part(model.digest, part)
            if recorded is not None and tuple(recorded) != digests:
                raise CorruptChunk(
                    f"{model.uri}: part {part} was read before, and its bytes were others"
                )
        known = self._known.get(model.digest)
        if known is None:
            return
        known = await asyncio.to_thread(_with_parts, known, {part: list(digests)})
        # Other parts may have become known meanwhile.
        known = self._remember(model.digest, known)
        if not unknown_parts(known):
            every = [[chunk.digest for chunk in found.chunks] for found in known.parts]
            await self._store.put_if_absent(
                all_digests_key(model.digest), msgspec.json.encode(every)
            )

    async def _publish(
        self, model: Model, part: int, digests: tuple[Digest, ...], disputed: Disputed
    ) -> None:
        backoff = Backoff(first_s=0.5, limit_s=30.0)
        for attempt in range(PUBLISH_TRIES):
            try:
                await self.publish(model, part, digests)
                return
            except CorruptChunk as error:
                # Two nodes read different bytes under one version of the source: only a person can
                # tell which are right.
                log.error(
                    "nodes disagree about a model's bytes",
                    action="digests_disagree",
                    model=model.name,
                    part=part,
                )
                disputed(error)
                return
            except PilotlightError as error:
                log.warning(
                    "digests not stored",
                    action="digests_store_failed",
                    model=model.name,
                    error=error.message,
                )
            await pause(backoff.delay_s(attempt, self._rng))

    async def _read(self, model: Model) -> Manifest:
        digest, known = model.digest, self._known.get(model.digest)
        every = asyncio.create_task(
            self._read_object(all_digests_key(digest), list[_Part]),
            name=f"read digests {digest[:12]}",
        )
        try:
            if known is None:
                known = await self._read_manifest(digest)
            parts = await every
        finally:
            every.cancel()
        if parts is None:
            missing = unknown_parts(known)
            found = await asyncio.gather(*(self._read_part(digest, part) for part in missing))
            recorded = {
                part: digests
                for part, digests in zip(missing, found, strict=True)
                if digests is not None
            }
        else:
            recorded = dict(enumerate(parts))
        return self._remember(digest, await asyncio.to_thread(_with_parts, known, recorded))

    async def _read_manifest(self, digest: Digest) -> Manifest:
        try:
            data = await self._store.get(manifest_key(digest))
        except NotFound as error:
            raise SourceUnavailable(
                f"the manifest {digest[:12]} is gone: {error.message}"
            ) from error
        # A manifest of a large model takes some milliseconds, which the event loop has not got.
        return await asyncio.to_thread(_decode, data, digest)

    async def _read_part(self, digest: Digest, part: int) -> _Part | None:
        return await self._read_object(digests_key(digest, part), _Part)

    async def _read_object(self, key: str, kind: type[T]) -> T | None:
        try:
            async with self._reads:
                data = await self._store.get(key)
        except NotFound:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise InternalError(f"{key} is no list of digests: {error}") from error

    def _remember(self, digest: Digest, manifest: Manifest) -> Manifest:
        """Keep a manifest, with what another one of the same checkpoint knows."""
        before = self._known.get(digest)
        if before is not None and before is not manifest:
            manifest = _with_digests(manifest, recorded_digests(before))
        self._known[digest] = manifest
        self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return manifest


def unknown_parts(manifest: Manifest) -> tuple[int, ...]:
    """Parts with a chunk that has no digest."""
    return tuple(
        number
        for number, part in enumerate(manifest.parts)
        if any(chunk.digest is None for chunk in part.chunks)
    )


def recorded_digests(manifest: Manifest) -> dict[tuple[int, int], Digest]:
    """The digests of the chunks that have one, by (part, chunk)."""
    return {
        (p, c): chunk.digest
        for p, part in enumerate(manifest.parts)
        for c, chunk in enumerate(part.chunks)
        if chunk.digest is not None
    }


def _decode(data: bytes, digest: Digest) -> Manifest:
    try:
        manifest = decode(data)
    except CheckpointError as error:
        raise error_of(error.code, str(error)) from error
    if manifest.digest() != digest:
        raise InternalError(
            f"the object under the manifest's key {digest[:12]} is another manifest"
        )
    return manifest


def _with_parts(manifest: Manifest, recorded: Mapping[int, _Part]) -> Manifest:
    return _with_digests(
        manifest,
        {(part, c): known for part, chunks in recorded.items() for c, known in enumerate(chunks)},
    )


def _with_digests(manifest: Manifest, digests: Mapping[tuple[int, int], Digest]) -> Manifest:
    try:
        return manifest.with_digests(digests)
    except CheckpointError as error:
        raise error_of(error.code, str(error)) from error
    except KeyError as error:
        raise InternalError(
            f"the digests of {manifest.digest()[:12]} name a chunk that it has not got: {error}"
        ) from error
