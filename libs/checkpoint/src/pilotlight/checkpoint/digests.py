"""The digest of a chunk: a small Merkle tree, so that a chunk's bytes can be verified and passed on
before all of it is there.

::

    chunk      | unit 0 | unit 1 | ... | unit 7 |       UNIT_BYTES each, the last one what is left
    BLAKE3         d0       d1            d7            32 bytes each: the chunk's *list*
    BLAKE3        (d0 d1 ... d7)                        its digest

The sender of a chunk may send its list ahead. A receiver that knows the digest can check the list,
and then every unit as soon as it is there.
"""

from collections.abc import Sequence

from blake3 import blake3

from pilotlight.policy.ids import Digest

UNIT_BYTES = 1024 * 1024
"""What is verified, forwarded and read again as one."""
UNIT_DIGEST_BYTES = 32


def units_of(size_bytes: int) -> int:
    """Units of a chunk of this size."""
    return -(-size_bytes // UNIT_BYTES)


def unit_digests(data: bytes | bytearray | memoryview) -> tuple[bytes, ...]:
    """The list of a chunk: the digest of each of its units."""
    with memoryview(data) as view:
        return tuple(_unit_digest(view, start) for start in range(0, len(view), UNIT_BYTES))


def chunk_digest_of(units: Sequence[bytes]) -> Digest:
    """A chunk's digest, of its list."""
    return Digest(blake3(b"".join(units)).hexdigest())


def chunk_digest(data: bytes | bytearray | memoryview) -> Digest:
    """A chunk's digest, of its bytes."""
    return chunk_digest_of(unit_digests(data))


def _unit_digest(view: memoryview, start: int) -> bytes:
    with view[start : start + UNIT_BYTES] as unit:
        return blake3(unit).digest()
