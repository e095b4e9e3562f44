"""What the materializer answers on the bus."""

import asyncio

import structlog
from blake3 import blake3

from pilotlight.common.artifact_signing import is_signed, sign
from pilotlight.common.errors import BadRequest, CorruptChunk
from pilotlight.common.messages.artifacts import (
    ArtifactInfo,
    ArtifactPublished,
    ArtifactsFound,
    FindArtifacts,
    PublishArtifact,
)
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.materializer.builds import BuildRepository
from pilotlight.materializer.repository import ArtifactRepository

log = structlog.get_logger()

KINDS = frozenset(
    {
        "manifest",
        "profile",
        "kv_layout",
        "graphs",
        "range_graphs",
        "kernel_images",
        "compile_cache",
    }
)
"""What there is; graphs of a range have its layers behind them in their own (``Blob.holds``)."""
HEX_DIGITS = frozenset("0123456789abcdef")


class Handlers:
    """Finds and publishes artifacts."""

    def __init__(
        self,
        repository: ArtifactRepository,
        builds: BuildRepository,
        store: ObjectStore,
        cluster_key: bytes,
    ) -> None:
        """Serves nothing by itself.

        Args:
            repository: artifacts.
            builds: what they were made for.
            store: their bytes.
            cluster_key: signs.
        """
        self._repository = repository
        self._builds = builds
        self._store = store
        self._cluster_key = cluster_key

    async def find(self, request: FindArtifacts) -> ArtifactsFound:
        """Artifacts of a fingerprint that carry this cluster's signature; others are left out, and
        that is logged.
        """
        _check_digest(request.fingerprint, "fingerprint")
        trusted: list[ArtifactInfo] = []
        for artifact in await self._repository.of(request.fingerprint):
            if self._is_trusted(artifact):
                trusted.append(artifact)
            else:
                log.error(
                    "artifact with a foreign signature",
                    action="artifact_untrusted",
                    fingerprint=artifact.fingerprint,
                )
        nearest = None
        if not trusted and request.model_digest is not None:
            nearest = await self._builds.nearest(request.model_digest)
        return ArtifactsFound(artifacts=tuple(trusted), nearest=nearest)

    async def publish(self, request: PublishArtifact) -> ArtifactPublished:
        """Check that the blob is what it says, sign it, list it.

        Raises:
            BadRequest: a digest or the kind is malformed.
            NotFound: the object store holds no such blob.
            CorruptChunk: the blob's bytes are not what the request says.
        """
        _check_digest(request.fingerprint, "fingerprint")
        _check_digest(request.blob_digest, "blob_digest")
        if request.kind not in KINDS:
            raise BadRequest(
                f"there is no artifact of kind {request.kind!r}; kinds are {', '.join(sorted(KINDS))}",
                param="kind",
            )
        blob = await self._store.get(artifact_key(request.blob_digest))
        found = await asyncio.to_thread(lambda: blake3(blob).hexdigest())
        if found != request.blob_digest or len(blob) != request.size_bytes:
            raise CorruptChunk(
                f"the blob {request.blob_digest} has {len(blob)} bytes with the digest {found}"
            )
        artifact = ArtifactInfo(
            fingerprint=request.fingerprint,
            kind=request.kind,
            blob_digest=request.blob_digest,
            size_bytes=request.size_bytes,
            signature=sign(
                self._cluster_key,
                fingerprint=request.fingerprint,
                kind=request.kind,
                blob_digest=request.blob_digest,
                size_bytes=request.size_bytes,
            ),
        )
        await self._repository.put(artifact)
        return ArtifactPublished(artifact=artifact)

    def _is_trusted(self, artifact: ArtifactInfo) -> bool:
        return is_signed(
            self._cluster_key,
            artifact.signature,
            fingerprint=artifact.fingerprint,
            kind=artifact.kind,
            blob_digest=artifact.blob_digest,
            size_bytes=artifact.size_bytes,
        )


def _check_digest(value: str, param: str) -> None:
    if len(value) != 64 or not HEX_DIGITS.issuperset(value):
        raise BadRequest(f"{param} must be 64 lower-case hex digits", param=param)
