"""Whether a manifest is this cluster's, and of what is asked for."""

from blake3 import blake3

from pilotlight.common.artifact_signing import is_signed
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.artifacts import ArtifactInfo
from pilotlight.common.messages.codec import decode_json
from pilotlight.policy.materialized import FORMAT, Artifact, Fingerprint, first_difference

MAX_MANIFEST_BYTES = 1 << 20


class Refused(Exception):
    """An artifact is not used; ``field`` says what is wrong with it."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


def checked(info: ArtifactInfo, data: bytes, wanted: Fingerprint, cluster_key: bytes) -> Artifact:
    """The manifest, if it is this cluster's, whole, and of the fingerprint that is wanted.

    Args:
        info: what is listed of it.
        data: its bytes.
        wanted: what it must have been made for.
        cluster_key: what it must be signed with.

    Raises:
        Refused: by the name of what is wrong: ``signature``, ``size``, ``digest``, ``manifest``,
            ``format``, or a field of the fingerprint.
    """
    signed = is_signed(
        cluster_key,
        info.signature,
        fingerprint=info.fingerprint,
        kind=info.kind,
        blob_digest=info.blob_digest,
        size_bytes=info.size_bytes,
    )
    if not signed:
        raise Refused("signature")
    if len(data) != info.size_bytes or len(data) > MAX_MANIFEST_BYTES:
        raise Refused("size")
    if blake3(data).hexdigest() != info.blob_digest:
        raise Refused("digest")
    try:
        artifact = decode_json(data, Artifact)
    except PilotlightError as error:
        raise Refused("manifest") from error
    if artifact.format != FORMAT:
        raise Refused("format")
    if field := first_difference(wanted, artifact.fingerprint):
        raise Refused(field)
    if info.fingerprint != wanted.digest:
        raise Refused("fingerprint")
    return artifact
