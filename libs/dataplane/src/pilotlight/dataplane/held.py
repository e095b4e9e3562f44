"""A chunk of the pool, whole or on its way, for a sender that passes it on."""

from dataclasses import dataclass

from pilotlight.dataplane.chunk_fill import ChunkFill
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.policy.ids import Digest


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """Where a chunk lies, and how much of it is there."""

    image: PartImage
    index: int
    image_offset: int
    size_bytes: int
    digest: Digest | None
    """Recorded or found; None: of a chunk on its way whose digest is not recorded."""
    fill: ChunkFill | None
    """None: it is whole, and entered."""


def held_chunk(pool: HostPool, image: PartImage, index: int) -> HeldChunk | None:
    """A chunk that was entered; None where the part has no such chunk."""
    if not 0 <= index < image.entered:
        return None
    entry = pool.chunk(image, index)
    return HeldChunk(image, index, entry.chunk_offset, entry.chunk_bytes, entry.chunk_digest, None)
