"""From a manifest and the place of an image to the places of its tensors."""

from pilotlight.checkpoint.manifest import Part
from pilotlight.common.messages.pool import TensorPlace


def tensor_places(part: Part, file_offset: int) -> tuple[TensorPlace, ...]:
    """Where the tensors of a part lie in the pool's file, when its image starts at
    ``file_offset``.
    """
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
