"""Manifests from the object store, and the chunk digests that the first fetch of a model fills in.

Digests lie beside the manifest, under its digest: whoever has read every chunk of a model first writes them, everyone who fetches
later is checked against them.
"""

import asyncio
import random
from collections import OrderedDict

import msgspec
import structlog

from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import Manifest, decode
from pilotlight.common.errors import InternalError, NotFound, PilotlightError, SourceUnavailable, error_of
from pilotlight.common.service import Background
from pilotlight.common.store import ObjectStore, manifest_key
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.types import Digest, Model

log = structlog.get_logger()

MAX_KNOWN = 256
"""Manifests that are kept decoded."""
PUBLISH_TRIES = 6

_Parts = list[list[Digest]]


def digests_key(digest: Digest) -> str:
    """Where the chunk digests of a manifest lie: for each part, in order, the digest of each of its chunks."""
    return f"digests/{digest}.json"


class StoredManifests:
    """``Manifests`` of the data plane, on the object store."""

    def __init__(self, store: ObjectStore, background: Background) -> None:
        self._store = store
        self._background = background
        self._known: OrderedDict[Digest, Manifest] = OrderedDict()
        self._reading: dict[Digest, asyncio.Task[Manifest]] = {}
        self._rng = random.Random()

    async def get(self, model: Model) -> Manifest:
        """The manifest with every chunk digest that is known.

        Raises:
            SourceUnavailable: it is not in the store, or the store cannot be read.
            BadCheckpoint: what the store holds is not that manifest.
        """
        digest = model.digest
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        reading = self._reading.get(digest)
        if reading is None:
            reading = self._reading[digest] = asyncio.create_task(self._read(digest), name=f"read manifest {digest[:12]}")
            reading.add_done_callback(lambda _: self._reading.pop(digest, None))
        # Several may wait for it: one that leaves must not take it from the others.
        return await asyncio.shield(reading)

    def learned(self, model: Model, digests: dict[tuple[int, int], Digest]) -> None:
        """Remember digests, and write them to the store once every chunk of the model has one."""
        known = self._known.get(model.digest)
        if known is None:
            return
        try:
            known = known.with_digests(digests)
        except CheckpointError as error:
            log.error("chunk digests contradict each other", action="digests_disagree", model=model.name, error=str(error))
            return
        self._remember(model.digest, known)
        parts = [[chunk.digest for chunk in part.chunks if chunk.digest is not None] for part in known.parts]
        if [len(part) for part in parts] == [len(part.chunks) for part in known.parts]:
            self._background.spawn(f"publish digests of {model.name}", self._publish(model, parts))

    async def _read(self, digest: Digest) -> Manifest:
        try:
            data, digests = await asyncio.gather(self._store.get(manifest_key(digest)), self._read_digests(digest))
        except NotFound as error:
            raise SourceUnavailable(f"the manifest {digest[:12]} is gone: {error.message}") from error
        # A manifest of a large model takes some milliseconds, which the event loop has not got.
        manifest = await asyncio.to_thread(_decode, data, digest, digests)
        self._remember(digest, manifest)
        return manifest

    async def _read_digests(self, digest: Digest) -> _Parts:
        try:
            data = await self._store.get(digests_key(digest))
        except NotFound:
            return []
        try:
            return msgspec.json.decode(data, type=_Parts)
        except msgspec.DecodeError as error:
            raise InternalError(f"{digests_key(digest)} is no list of digests: {error}") from error

    async def _publish(self, model: Model, parts: _Parts) -> None:
        backoff, key = Backoff(first_s=0.5, limit_s=30.0), digests_key(model.digest)
        for attempt in range(PUBLISH_TRIES):
            try:
                if not await self._store.put_if_absent(key, msgspec.json.encode(parts)):
                    await self._compare(model, parts)
                return
            except PilotlightError as error:
                log.warning("digests not stored", action="digests_store_failed", model=model.name, error=error.message)
            await pause(backoff.delay_s(attempt, self._rng))

    async def _compare(self, model: Model, parts: _Parts) -> None:
        if await self._read_digests(model.digest) != parts:
            # Two nodes read different bytes under one version of the source: only a person can tell which are right.
            log.error("nodes disagree about a model's bytes", action="digests_disagree", model=model.name, digest=model.digest)

    def _remember(self, digest: Digest, manifest: Manifest) -> None:
        self._known[digest] = manifest
        self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _decode(data: bytes, digest: Digest, parts: _Parts) -> Manifest:
    try:
        manifest = decode(data)
        if manifest.digest() != digest:
            raise InternalError(f"the object under the manifest's key {digest[:12]} is another manifest")
        return manifest.with_digests({(p, c): known for p, part in enumerate(parts) for c, known in enumerate(part)})
    except CheckpointError as error:
        raise error_of(error.code, str(error)) from error
    except KeyError as error:
        raise InternalError(f"the digests of {digest[:12]} name a chunk that it has not got: {error}") from error
