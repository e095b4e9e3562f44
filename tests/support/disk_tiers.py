"""A disk tier over a folder, with what it counted."""

import random
from collections import Counter
from pathlib import Path

from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.common.clock import ManualClock
from pilotlight.dataplane.chunk_fill import ChunkFill
from pilotlight.dataplane.disk_books import NOBODY
from pilotlight.dataplane.disk_tier import DiskEvent, DiskOrigin, DiskTier
from pilotlight.dataplane.readers import ReadProgress
from pilotlight.policy.ids import Digest

KIB = 1024


def content_of(seed: int, size_bytes: int = 3 * KIB) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


class Tier:
    """A tier over a folder, and what it counted."""

    def __init__(self, folder: Path, limit_bytes: int = 1024 * KIB) -> None:
        self.clock = ManualClock()
        self.events: Counter[DiskEvent] = Counter()
        self.tier = DiskTier(
            folder, limit_bytes, self.clock, lambda event: self.events.update([event])
        )
        self.tier.open()

    def store(self, content: bytes, model: Digest = NOBODY) -> Digest:
        digest = chunk_digest(content)
        self.tier.write(digest, len(content), [memoryview(content)], model)
        return digest

    def read(self, digest: Digest, size_bytes: int) -> bytes:
        return read_by(self.tier, digest, size_bytes)


def read_by(tier: DiskTier, digest: Digest, size_bytes: int, known: bytes = b"") -> bytes:
    """What a fetch that had ``known`` already has after asking the tier."""
    found = bytearray(size_bytes)

    def place(offset: int, data: memoryview) -> None:
        found[offset : offset + len(data)] = data

    fill = ChunkFill(digest, size_bytes, place)
    if known:
        fill.begin("peer", ReadProgress()).write(known)
    DiskOrigin(tier).read(0, None, fill.begin("disk", ReadProgress()))
    assert fill.is_whole
    return bytes(found)
