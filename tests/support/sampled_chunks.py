"""A small model, the bytes of one of its parts, and origins of them."""

from collections.abc import Sequence
from typing import Any

from pilotlight.checkpoint.checkpoint import read_checkpoint, read_chunk
from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.checkpoint.manifest import Manifest
from pilotlight.checkpoint.reader import MemorySource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model

ONE = InstanceId("inst-1")
FILES = tiny_files(tiny_config(hidden_size=384, intermediate_size=1600, vocab_size=512))
"""Layers of several units."""
PLAIN = read_checkpoint(MemorySource(FILES)).manifest
PART = 1
IMAGE = b"".join(
    read_chunk(MemorySource(FILES), PLAIN, chunk) for chunk in PLAIN.parts[PART].chunks
)
CHUNK = PLAIN.parts[PART].chunks[0]
BYTES = IMAGE[: CHUNK.size_bytes]
KNOWN = PLAIN.with_digests(
    {
        (p, c): chunk_digest(read_chunk(MemorySource(FILES), PLAIN, chunk))
        for p, part in enumerate(PLAIN.parts)
        for c, chunk in enumerate(part.chunks)
    }
)


class Near:
    """Origins of a test."""

    def __init__(self, *origins: Any) -> None:
        self.now = list(origins)

    def origins(self, model: Model, manifest: Manifest) -> Sequence[Any]:
        return self.now
