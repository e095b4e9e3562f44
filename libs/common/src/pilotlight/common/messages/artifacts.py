"""Workers and schedulers to materializer: materialized state."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import Digest

FIND_ARTIFACTS_SUBJECT = "v1.materializer.find"
"""Request/reply: ``FindArtifacts`` → ``ArtifactsFound``."""
PUBLISH_ARTIFACT_SUBJECT = "v1.materializer.publish"
"""Request/reply: ``PublishArtifact`` → ``ArtifactPublished``."""


class ArtifactInfo(Message, frozen=True, kw_only=True):
    """One artifact: what it is, where its blob lies, and the cluster's signature over both."""

    fingerprint: Digest
    kind: str
    blob_digest: Digest
    size_bytes: int
    signature: str


class FindArtifacts(Message, frozen=True, kw_only=True):
    """Every valid artifact of a fingerprint."""

    fingerprint: Digest


class ArtifactsFound(Message, frozen=True, kw_only=True):
    """Empty when nothing is materialized: the normal path it is."""

    artifacts: tuple[ArtifactInfo, ...]


class PublishArtifact(Message, frozen=True, kw_only=True):
    """A blob that lies in the object store under its digest: check, sign and list it."""

    fingerprint: Digest
    kind: str
    blob_digest: Digest
    size_bytes: int


class ArtifactPublished(Message, frozen=True, kw_only=True):
    """The artifact as listed."""

    artifact: ArtifactInfo
