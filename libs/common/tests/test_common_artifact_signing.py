"""Signatures of artifacts: bound to every field, and to the cluster."""

import pytest

from pilotlight.common.artifact_signing import is_signed, sign
from pilotlight.policy.ids import Digest

FIELDS = {
    "fingerprint": Digest("ab" * 32),
    "kind": "graphs",
    "blob_digest": Digest("cd" * 32),
    "size_bytes": 10,
}


def test_a_signature_is_of_these_fields_and_this_key() -> None:
    signature = sign(b"key", **FIELDS)
    assert is_signed(b"key", signature, **FIELDS)
    assert not is_signed(b"other key", signature, **FIELDS)
    for field, value in (
        ("fingerprint", "x"),
        ("kind", "profile"),
        ("blob_digest", "y"),
        ("size_bytes", 11),
    ):
        assert not is_signed(b"key", signature, **{**FIELDS, field: value})


def test_fields_do_not_run_into_each_other() -> None:
    assert sign(b"key", **{**FIELDS, "kind": "ab", "blob_digest": "c"}) != sign(
        b"key", **{**FIELDS, "kind": "a", "blob_digest": "bc"}
    )


@pytest.mark.parametrize("signature", ["", "x", "é", "0" * 64])
def test_what_is_no_signature(signature: str) -> None:
    assert not is_signed(b"key", signature, **FIELDS)
