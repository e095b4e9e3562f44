"""From a manifest and the place of an image to the places of its tensors."""

from pilotlight.checkpoint.manifest import Chunk, Part
from pilotlight.common.messages.pool import TensorPlace


def tensor_places(part: Part, file_offset: int) -> tuple[TensorPlace, ...]:
    """Where the tensors of a part lie in the pool's file, when its image starts at ``file_offset``."""
    return tuple(
        TensorPlace(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            offset=file_offset + tensor.image_offset,
            size_bytes=tensor.size_bytes,
        )
        for tensor in part.tensors
    )


def unfilled(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """Ranges [start, stop) of a chunk, from its own start, that no segment fills: they are zero in the image.

    ::

        chunk     |segment ......|0|segment ...|0|
    """
    ranges: list[tuple[int, int]] = []
    filled = 0
    for segment in sorted(chunk.segments, key=lambda segment: segment.image_offset):
        start = segment.image_offset - chunk.image_offset
        if start > filled:
            ranges.append((filled, start))
        filled = max(filled, start + segment.size_bytes)
    if filled < chunk.size_bytes:
        ranges.append((filled, chunk.size_bytes))
    return tuple(ranges)
