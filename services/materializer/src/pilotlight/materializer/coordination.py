"""What the materializer answers workers that build, and operators that ask for builds."""

import asyncio

import structlog
from blake3 import blake3
from prometheus_client import CollectorRegistry, Counter

from pilotlight.common.artifact_signing import sign
from pilotlight.common.bus import Bus
from pilotlight.common.errors import (
    BadRequest,
    Conflict,
    CorruptChunk,
    MessageUndecodable,
    PilotlightError,
)
from pilotlight.common.messages.artifacts import (
    BUILD_WANTED_SUBJECT,
    ArtifactInfo,
    ArtifactPublished,
    AskMaterials,
    BuildClaimed,
    BuildHeard,
    BuildWanted,
    ClaimBuild,
    ClaimedBuild,
    EndBuild,
    FinishBuild,
    Materialize,
    Materials,
    ReportBuild,
)
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.service import Background
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.common.waiting import every
from pilotlight.materializer.builds import MANIFEST, BuildRepository
from pilotlight.materializer.handlers import KINDS
from pilotlight.policy.builds import KeepRules, collected, next_build
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import FORMAT, MAX_RANGES, RANGE_GRAPHS, Artifact, Blob

log = structlog.get_logger()

LEASE_S = 15.0
"""A builder that says nothing for this long has lost its build."""
MAX_MANIFEST_BYTES = 1 << 20


class BuildMetrics:
    """What is counted of builds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.builds = Counter(
            "pilotlight_materializer_builds",
            "Builds that were claimed, and how they ended.",
            ["outcome"],
            registry=registry,
        )


class Coordination:
    """Gives builds to workers with time, and lists what comes of them."""

    def __init__(
        self,
        repository: BuildRepository,
        store: ObjectStore,
        bus: Bus,
        cluster_key: bytes,
        metrics: BuildMetrics,
    ) -> None:
        """Serves nothing by itself.

        Args:
            repository: rows.
            store: objects.
            bus: tells workers that something is wanted.
            cluster_key: signs.
            metrics: counts.
        """
        self._repository = repository
        self._store = store
        self._bus = bus
        self._cluster_key = cluster_key
        self._metrics = metrics

    async def claim(self, request: ClaimBuild) -> BuildClaimed:
        """A build for a worker with time, or what room one takes, or nothing.

        A worker asks twice: for what there is, and again when it has room for that. What waits for
        room is no try.
        """
        facts = await self._repository.facts()
        choice = next_build(
            facts.wanted,
            facts.builds,
            facts.listed,
            request.environment,
            room_bytes=request.room_bytes,
            now_s=facts.now_s,
        )
        found, leased_bytes = choice.build, request.leased_bytes
        if found is None or (leased_bytes is not None and found.needed_bytes > leased_bytes):
            waiting = choice.short if found is None else (found, *choice.short)
            if not waiting:
                return BuildClaimed()
            read_s, worker_id = facts.now_s, request.worker_id
            await self._repository.wait(waiting, worker_id, request.room_bytes, read_s)
            return BuildClaimed(needed_bytes=waiting[0].needed_bytes)
        model, fingerprint = found.model, found.fingerprint
        attempt = await self._repository.claim(
            model, fingerprint.digest, request.worker_id, LEASE_S
        )
        if attempt is None:
            return BuildClaimed()
        self._metrics.builds.labels(outcome="claimed").inc()
        log.info(
            "build claimed",
            action="build_claimed",
            model=model.name,
            worker_id=request.worker_id,
            fingerprint=fingerprint.digest,
            attempt=attempt,
        )
        return BuildClaimed(
            build=ClaimedBuild(
                model=model, fingerprint=fingerprint, attempt=attempt, lease_s=LEASE_S
            )
        )

    async def report(self, report: ReportBuild) -> BuildHeard:
        """How far a build is; whether it is still that worker's."""
        most = len(KINDS) + MAX_RANGES
        if len(report.blobs) > most or not all(map(_is_digest, report.blobs)):
            raise BadRequest("blobs must be digests, one of each kind at most", param="blobs")
        return BuildHeard(yours=await self._repository.renew(report, LEASE_S))

    async def end(self, ended: EndBuild) -> BuildHeard:
        """A build ended without an artifact."""
        yours = await self._repository.end(ended)
        if yours:
            self._metrics.builds.labels(outcome="yielded" if ended.yielded else "failed").inc()
            log.info(
                "build ended",
                action="build_ended",
                fingerprint=ended.fingerprint,
                yielded=ended.yielded,
                code=ended.code,
                error=ended.message,
            )
        return BuildHeard(yours=yours)

    async def finish(self, finished: FinishBuild) -> ArtifactPublished:
        """Check, sign and list what a build came to.

        Raises:
            BadRequest: the manifest is none, or of something else.
            NotFound: the object store lacks an object.
            CorruptChunk: an object's bytes are not what is said of them.
            Conflict: the build is another worker's by now.
        """
        blob = Blob(kind=MANIFEST, digest=finished.manifest_digest, size_bytes=finished.size_bytes)
        if finished.size_bytes > MAX_MANIFEST_BYTES or not _is_digest(blob.digest):
            raise BadRequest("that cannot be a manifest", param="manifest_digest")
        artifact = manifest_of(await self._checked(blob))
        if artifact.fingerprint.digest != finished.fingerprint:
            raise BadRequest(
                "the manifest is of another fingerprint than its build", param="fingerprint"
            )
        for one in artifact.blobs:
            known = one.holds in KINDS and one.kind not in (MANIFEST, RANGE_GRAPHS)
            if not known or not _is_digest(one.digest):
                raise BadRequest(f"a manifest names no {one.kind!r}", param="blobs")
            if 0 < one.most_bytes < one.size_bytes:
                raise BadRequest(
                    f"{one.kind} has {one.size_bytes} bytes, and {one.most_bytes} at most",
                    param="blobs",
                )
            await self._checked(one)
        if (artifact.graphs is None) != (artifact.graphs_blob is None):
            raise BadRequest("a manifest has graphs and their layout, or neither", param="blobs")
        if (artifact.compiled is None) != (artifact.compiled_blob is None):
            raise BadRequest(
                "a manifest has compiled kernels and what they fit, or neither", param="blobs"
            )
        if wrong := artifact.wrong_ranges():
            raise BadRequest(f"a manifest's ranges do not hold together: {wrong}", param="blobs")
        infos = [self._signed(finished.fingerprint, one) for one in (blob, *artifact.blobs)]
        if not await self._repository.finish(finished, artifact, infos):
            raise Conflict(
                f"the build {finished.fingerprint} is not {finished.worker_id}'s any more"
            )
        self._metrics.builds.labels(outcome="built").inc()
        log.info("artifact listed", action="artifact_listed", fingerprint=finished.fingerprint)
        return ArtifactPublished(artifact=infos[0])

    async def materialize(self, request: Materialize) -> Materials:
        """An operator asks."""
        await self._repository.ask(request.model)
        await self._bus.publish(BUILD_WANTED_SUBJECT, BuildWanted(model=request.model))
        return await self._repository.materials(request.model)

    async def ask(self, request: AskMaterials) -> Materials:
        """What there is of a model."""
        return await self._repository.materials(request.model)

    async def _checked(self, blob: Blob) -> bytes:
        data = await self._store.get(artifact_key(blob.digest))
        found = await asyncio.to_thread(lambda: blake3(data).hexdigest())
        if found != blob.digest or len(data) != blob.size_bytes:
            raise CorruptChunk(
                f"the blob {blob.digest} has {len(data)} bytes with the digest {found}"
            )
        return data

    def _signed(self, fingerprint: Digest, blob: Blob) -> ArtifactInfo:
        signature = sign(
            self._cluster_key,
            fingerprint=fingerprint,
            kind=blob.kind,
            blob_digest=blob.digest,
            size_bytes=blob.size_bytes,
        )
        return ArtifactInfo(
            fingerprint=fingerprint,
            kind=blob.kind,
            blob_digest=blob.digest,
            size_bytes=blob.size_bytes,
            signature=signature,
        )


class Upkeep:
    """Gives up builds whose workers are silent, and collects what is of no use any more."""

    def __init__(
        self,
        repository: BuildRepository,
        store: ObjectStore,
        background: Background,
        rules: KeepRules,
        interval_s: float,
    ) -> None:
        """Does nothing yet.

        Args:
            repository: rows.
            store: objects.
            background: owns the loop.
            rules: what is kept.
            interval_s: between two looks.
        """
        self._repository = repository
        self._store = store
        self._background = background
        self._rules = rules
        self._interval_s = interval_s
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look from now on."""
        if self._looking is None:
            self._looking = self._background.spawn("upkeep of artifacts", self._look())

    async def stop(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def once(self) -> None:
        """One look.

        Raises:
            DatabaseUnavailable, SourceUnavailable: the next look does what is left.
        """
        await self._repository.expire()
        facts = await self._repository.facts()
        models = [one.model.digest for one in facts.wanted]
        gone = collected(facts.listed, models, self._rules, facts.now_s)
        for digest in await self._repository.collect(gone):
            await self._store.delete(artifact_key(digest))

    async def _look(self) -> None:
        async for _ in every(self._interval_s):
            try:
                await self.once()
            except PilotlightError as error:
                log.warning("upkeep put off", action="artifact_upkeep_failed", error=error.message)


def manifest_of(data: bytes) -> Artifact:
    """The manifest that these bytes are.

    Raises:
        BadRequest: they are none, or of a format that this release does not know.
    """
    try:
        artifact = decode_json(data, Artifact)
    except MessageUndecodable as error:
        raise BadRequest(f"the manifest cannot be read: {error.message}") from error
    if artifact.format != FORMAT:
        raise BadRequest(f"the manifest has format {artifact.format}, and {FORMAT} is known")
    return artifact


def _is_digest(value: str) -> bool:
    return len(value) == 64 and set(value) <= set("0123456789abcdef")
