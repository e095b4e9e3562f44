"""The cluster's key: what nodes prove to each other, and what artifacts are signed with.

It is the secret ``cluster-key``, made once for an installation, the same for every node. Nothing
that is sent gives it away: from it a key for each purpose is derived, and of that only keyed
digests of fresh nonces are shown.
"""

import hmac
from pathlib import Path

from blake3 import blake3

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.secret_files import read_secret

SECRET = "cluster-key"
MIN_CHARS = 16
"""A shorter one could be guessed from what is seen of a handshake."""


class ClusterKey:
    """The key, for one purpose."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self._key = blake3(
            secret, derive_key_context=f"pilotlight cluster key 2026: {purpose}"
        ).digest()

    def __repr__(self) -> str:
        return "ClusterKey()"

    def proof(self, *fields: bytes) -> bytes:
        """The keyed hash of these fields, which proves the key: 32 bytes."""
        mac = blake3(key=self._key)
        for field in fields:
            # With their lengths, so that no two lists of fields are the same bytes.
            mac.update(len(field).to_bytes(4, "big"))
            mac.update(field)
        return mac.digest()

    def is_proved(self, proof: bytes, *fields: bytes) -> bool:
        """Whether this is their proof, found in a time that says nothing about it."""
        return hmac.compare_digest(proof, self.proof(*fields))


def find_cluster_key(secrets_dir: Path | None, purpose: str) -> ClusterKey | None:
    """The key from the folder of secrets; None where there is none.

    Raises:
        SettingsInvalid: it is too short to be one.
    """
    secret = read_secret(secrets_dir, SECRET)
    if secret is None:
        return None
    if len(secret) < MIN_CHARS:
        raise SettingsInvalid(
            f"the secret {SECRET} has {len(secret)} characters: it needs {MIN_CHARS}, the same on every node"
        )
    return ClusterKey(secret.encode(), purpose)
