"""The manifest: which bytes of which files make up each part of a model, in chunks that can be
fetched and verified one by one.

A part has an *image*, which is how it lies in memory: its tensors back to back in the order of the
files, each aligned. A chunk is a piece of one image and lists the file ranges that fill it; what no
segment fills is zero.

::

    file 0     | header | norm | q       | k  | v  | layer 1: norm | q ...
                        '----------- layer 0 ------'
    image 1             | norm 00| q       | k  | v  |      every tensor begins at a multiple of ALIGNMENT_BYTES
    chunks              | chunk 0        | chunk 1   |      every chunk but the last is of CHUNK_BYTES
    segments            |s0 |  |s1       |s2         |      a segment ends at padding and at a chunk's end

``digest`` names a checkpoint: it covers files, layout and spec, but no chunk digests, since those
are learned later.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from blake3 import blake3

from pilotlight.checkpoint.errors import BadCheckpoint
from pilotlight.checkpoint.reader import SourceFile
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Dtype, ModelSpec

ALIGNMENT_BYTES = 64
"""A cache line, and what vectorised copies and kernels want of a tensor's first byte."""
CHUNK_BYTES = 8 * 1024 * 1024


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor lies in its part's image."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    image_offset: int
    size_bytes: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a file that goes to a range of an image."""

    file: int
    """Index into ``Manifest.files``."""
    file_offset: int
    image_offset: int
    """From the start of the part's image, not of the chunk."""
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """[image_offset, image_offset + size_bytes) of a part's image: what is fetched, verified and
    forwarded as one.
    """

    image_offset: int
    size_bytes: int
    segments: tuple[Segment, ...]
    digest: Digest | None = None
    """BLAKE3 of the image's bytes; None until a node has read them."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding, one layer, or the head."""

    tensors: tuple[Tensor, ...]
    image_bytes: int
    """A multiple of ``ALIGNMENT_BYTES``, so that images can lie back to back."""
    chunks: tuple[Chunk, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The layer index of a checkpoint. ``parts`` are in execution order."""

    spec: ModelSpec
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]

    def digest(self) -> Digest:
        """What ``Model.digest`` is: BLAKE3 over the canonical encoding without chunk digests.

        Fields of the spec that hold their default are left out. So a checkpoint that an earlier
        release could describe keeps its digest, and an earlier release, which drops the fields that
        it does not know, refuses a checkpoint that needs them.
        """
        bare = _map_chunks(self, lambda _, chunk: msgspec.structs.replace(chunk, digest=None))
        return bytes_digest(
            msgspec.json.encode(
                _Digested(spec=_stated(self.spec), files=bare.files, parts=bare.parts)
            )
        )

    def with_digests(self, digests: Mapping[tuple[int, int], Digest]) -> "Manifest":
        """The manifest with more chunk digests, by (part, chunk within the part).

        Raises:
            BadCheckpoint: a chunk already has another digest: the source's bytes are no longer what
                they were.
            KeyError: there is no such chunk.
        """
        unknown = digests.keys() - {
            (p, c) for p, part in enumerate(self.parts) for c in range(len(part.chunks))
        }
        if unknown:
            raise KeyError(min(unknown))

        def add(place: tuple[int, int], chunk: Chunk) -> Chunk:
            digest = digests.get(place, chunk.digest)
            if chunk.digest not in (None, digest):
                part, index = place
                raise BadCheckpoint(
                    f"chunk {index} of part {part} has digest {digest}, recorded is {chunk.digest}"
                )
            return msgspec.structs.replace(chunk, digest=digest)

        return _map_chunks(self, add)


class _Digested(msgspec.Struct, frozen=True, kw_only=True):
    """What a digest covers, in the order of ``Manifest``."""

    spec: dict[str, Any]
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]


def _stated(value: Any) -> Any:
    """A dataclass as a dictionary in the order of its fields, without those that hold their
    default; other values as they are.
    """
    if not dataclasses.is_dataclass(value):
        return value
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: _stated(content) for field, content in fields if content != field.default}


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """Canonical JSON: the same manifest gives the same bytes, in every process and release."""
    return _encoder.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Decode and check: every segment lies within its file and its chunk, chunks tile their image,
    tensors lie within it.

    Code that writes a chunk into memory where a manifest says may rely on that.

    Raises:
        BadCheckpoint: the bytes are no manifest, or one that contradicts itself.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadCheckpoint(f"not a manifest: {error}") from error
    if manifest.spec.part_bytes != tuple(part.image_bytes for part in manifest.parts):
        raise BadCheckpoint("the manifest's parts are not those of its spec")
    for number, part in enumerate(manifest.parts):
        if not _is_sound(part, manifest.files):
            raise BadCheckpoint(f"part {number} of the manifest contradicts itself")
    return manifest


def bytes_digest(data: bytes | bytearray | memoryview) -> Digest:
    """BLAKE3 in hex: of a chunk's image bytes, or of an encoded manifest."""
    return Digest(blake3(data).hexdigest())


def _map_chunks(manifest: Manifest, change: Callable[[tuple[int, int], Chunk], Chunk]) -> Manifest:
    parts = tuple(
        msgspec.structs.replace(
            part, chunks=tuple(change((p, c), chunk) for c, chunk in enumerate(part.chunks))
        )
        for p, part in enumerate(manifest.parts)
    )
    return msgspec.structs.replace(manifest, parts=parts)


def _is_sound(part: Part, files: tuple[SourceFile, ...]) -> bool:
    end = 0
    for chunk in part.chunks:
        if chunk.image_offset != end or not 0 < chunk.size_bytes <= CHUNK_BYTES:
            return False
        filled = end
        end += chunk.size_bytes
        for segment in chunk.segments:
            if (
                segment.image_offset < filled
                or segment.size_bytes <= 0
                or not 0 <= segment.file < len(files)
            ):
                return False
            filled = segment.image_offset + segment.size_bytes
            last = segment.file_offset + segment.size_bytes
            if filled > end or segment.file_offset < 0 or last > files[segment.file].size_bytes:
                return False
    within = all(t.image_offset >= 0 <= t.size_bytes <= end - t.image_offset for t in part.tensors)
    return within and end == part.image_bytes
