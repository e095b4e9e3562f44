"""Signatures of artifacts.

An artifact is executable input: no worker restores one that this cluster did not sign.
"""

import hashlib
import hmac

from pilotlight.policy.ids import Digest


def sign(
    cluster_key: bytes, *, fingerprint: Digest, kind: str, blob_digest: Digest, size_bytes: int
) -> str:
    """HMAC-SHA256 over every field, each with its length, so that no two artifacts share a message.

    Args:
        cluster_key: the secret.
        fingerprint: of all that the artifact's validity depends on.
        kind: of artifact.
        blob_digest: of its bytes.
        size_bytes: how many they are.
    """
    fields = (fingerprint, kind, blob_digest, str(size_bytes))
    message = b"".join(len(field.encode()).to_bytes(4, "big") + field.encode() for field in fields)
    return hmac.new(cluster_key, message, hashlib.sha256).hexdigest()


def is_signed(
    cluster_key: bytes,
    signature: str,
    *,
    fingerprint: Digest,
    kind: str,
    blob_digest: Digest,
    size_bytes: int,
) -> bool:
    """Whether the signature is this cluster's for exactly these fields.

    Args:
        cluster_key: the secret.
        signature: what came with the artifact.
        fingerprint: as for ``sign``.
        kind: as for ``sign``.
        blob_digest: as for ``sign``.
        size_bytes: as for ``sign``.
    """
    expected = sign(
        cluster_key,
        fingerprint=fingerprint,
        kind=kind,
        blob_digest=blob_digest,
        size_bytes=size_bytes,
    )
    return hmac.compare_digest(
        expected.encode(), signature.encode()
    )  # of texts it takes ASCII alone
