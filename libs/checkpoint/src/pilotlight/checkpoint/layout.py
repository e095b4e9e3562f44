"""Tensors to part images, part images to chunks: the arithmetic behind a manifest."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pilotlight.checkpoint.architectures import (
    Shape,
    expected_dtype,
    expected_parts,
    is_ignored,
)
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel, quote, quote_some
from pilotlight.checkpoint.manifest import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES,
    Chunk,
    Manifest,
    Part,
    Segment,
    Tensor,
)
from pilotlight.checkpoint.reader import SourceFile
from pilotlight.checkpoint.safetensors import StoredTensor
from pilotlight.policy.model import Dtype, ModelSpec, Quantization

_DTYPES = {"BF16": Dtype.BFLOAT16, "F16": Dtype.FLOAT16, "F32": Dtype.FLOAT32, "F64": Dtype.FLOAT64}
_QUANTIZED = {"F8_E4M3": Dtype.FLOAT8}
_SCALES = (".weight_scale", ".weight_scale_inv")


def image_bytes(tensors: Iterable[tuple[Shape, Dtype]]) -> int:
    """Bytes of the image of a part with these tensors.

    Their order does not matter: each takes a whole number of alignments.
    """
    return sum(_aligned(math.prod(shape) * dtype.size_bytes) for shape, dtype in tensors)


def quantized_bytes(quantization: Quantization, part: Mapping[str, Shape]) -> tuple[int, int]:
    """Bytes of a part's quantized weights and their scales in its image, and on a device."""
    stored: list[tuple[Shape, Dtype]] = []
    placed: list[tuple[Shape, Dtype]] = []
    for name, shape in part.items():
        if not quantization.covers(name):
            continue
        rows, width = shape
        scale = quantization.scale_of(name)
        stored += [(shape, Dtype.FLOAT8), (part[scale], quantization.scale_dtype)]
        placed_scale = quantization.placed_scale_shape(rows, width)
        placed += [
            (shape, Dtype.FLOAT8),
            (placed_scale, quantization.placed_dtype(scale, Dtype.FLOAT8)),
        ]
    return image_bytes(stored), image_bytes(placed)


def stored_dtype(tensors: Mapping[str, StoredTensor]) -> Dtype:
    """The element type of a checkpoint's weights, going by the tensor that has most bytes of those
    that are neither in fp8 nor scales.

    ``build_manifest`` checks the others.

    Raises:
        BadCheckpoint: there are no tensors.
        UnsupportedModel: the weights are integers or all in 8-bit floats.
    """
    if not tensors:
        raise BadCheckpoint("the checkpoint holds no tensors")
    plain = [
        tensor
        for tensor in tensors.values()
        if tensor.dtype not in _QUANTIZED and not tensor.name.endswith(_SCALES)
    ]
    largest = max(plain or tensors.values(), key=lambda tensor: (tensor.size_bytes, tensor.name))
    return _dtype_of(largest)


def stored_scale_dtype(tensors: Mapping[str, StoredTensor]) -> Dtype | None:
    """The element type of the scales of quantized weights; None: there are none.

    ``build_manifest`` checks that it is that of all.

    Raises:
        UnsupportedModel: it is none that scales are read in.
    """
    scale = next((one for one in tensors.values() if one.name.endswith(_SCALES)), None)
    return None if scale is None else _dtype_of(scale)


def build_manifest(
    spec: ModelSpec, files: Iterable[SourceFile], tensors: Mapping[str, StoredTensor]
) -> Manifest:
    """Lay out every tensor that the architecture expects.

    Args:
        spec: what the configuration says; its ``part_bytes`` follow from the same table as the
            layout.
        files: the files of the source; those that hold a tensor enter the manifest.
        tensors: what the headers say, by name.

    Raises:
        BadCheckpoint: tensors are missing, left over, or of another shape than the configuration
            gives them.
        UnsupportedModel: element types are mixed.
    """
    expected = expected_parts(spec)
    _check_tensors(spec, expected, tensors)
    used = {tensors[name].file for part in expected for name in part}
    kept = tuple(sorted((file for file in files if file.name in used), key=lambda file: file.name))
    index = {file.name: number for number, file in enumerate(kept)}
    parts = tuple(
        _lay_out([replace(tensors[name], shape=shape) for name, shape in part.items()], index)
        for part in expected
    )
    return Manifest(spec=spec, files=kept, parts=parts)


def _check_tensors(
    spec: ModelSpec, expected: tuple[dict[str, Shape], ...], tensors: Mapping[str, StoredTensor]
) -> None:
    shapes = {name: shape for part in expected for name, shape in part.items()}
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise BadCheckpoint(
            f"tensors that {spec.architecture} needs are missing: {quote_some(missing)}"
        )
    extra = sorted(name for name in tensors if name not in shapes and not is_ignored(spec, name))
    if extra:
        raise BadCheckpoint(
            f"{spec.architecture} has no tensors such as {quote_some(extra)}",
            file=tensors[extra[0]].file,
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        # A scale by tensor is stored as a number or as a list of one.
        if tensor.shape != shape and not (shape == (1,) and tensor.shape == ()):
            fault = f"{quote(name)} has shape {list(tensor.shape)}, the configuration says {list(shape)}"
            raise BadCheckpoint(fault, file=tensor.file)
        if (dtype := expected_dtype(spec, name)) is not (_DTYPES | _QUANTIZED).get(tensor.dtype):
            _dtype_of(tensor, _DTYPES | _QUANTIZED if spec.quantization else _DTYPES)
            fault = (
                f"{quote(name)} is {tensor.dtype} among {dtype}: mixed element types are not supported"
                if spec.quantization is None
                else f"{quote(name)} is {tensor.dtype}, by quantization_config it should be {dtype}"
            )
            raise UnsupportedModel(fault, file=tensor.file)


def _dtype_of(tensor: StoredTensor, known: Mapping[str, Dtype] = _DTYPES) -> Dtype:
    dtype = known.get(tensor.dtype)
    if dtype is None:
        fault = f"{quote(tensor.name)} is {tensor.dtype}: only {', '.join(_DTYPES)} weights are supported"
        raise UnsupportedModel(fault, file=tensor.file)
    return dtype


def _lay_out(tensors: list[StoredTensor], index: Mapping[str, int]) -> Part:
    placed: list[Tensor] = []
    segments: list[Segment] = []
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (index[tensor.file], tensor.offset)):
        place = Tensor(
            name=tensor.name,
            dtype=_dtype_of(tensor, _DTYPES | _QUANTIZED),
            shape=tensor.shape,
            image_offset=end,
            size_bytes=tensor.size_bytes,
        )
        placed.append(place)
        segment = Segment(
            file=index[tensor.file],
            file_offset=tensor.offset,
            image_offset=end,
            size_bytes=tensor.size_bytes,
        )
        if segments and _adjoins(segments[-1], segment):
            segment = _joined(segments.pop(), segment)
        segments.append(segment)
        end += _aligned(tensor.size_bytes)
    return Part(tensors=tuple(placed), image_bytes=end, chunks=tuple(_cut(segments, end)))


def _cut(segments: list[Segment], image_end: int) -> Iterator[Chunk]:
    """Cut an image at multiples of ``CHUNK_BYTES``, and with it the segments that lie across a
    cut.
    """
    first = 0
    for start in range(0, image_end, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, image_end)
        while (
            first < len(segments)
            and segments[first].image_offset + segments[first].size_bytes <= start
        ):
            first += 1
        inside: list[Segment] = []
        for segment in segments[first:]:
            if segment.image_offset >= stop:
                break
            inside.append(_clipped(segment, start, stop))
        yield Chunk(image_offset=start, size_bytes=stop - start, segments=tuple(inside))


def _clipped(segment: Segment, start: int, stop: int) -> Segment:
    low = max(segment.image_offset, start)
    high = min(segment.image_offset + segment.size_bytes, stop)
    file_offset = segment.file_offset + low - segment.image_offset
    return Segment(
        file=segment.file, file_offset=file_offset, image_offset=low, size_bytes=high - low
    )


def _adjoins(left: Segment, right: Segment) -> bool:
    """Whether ``right`` goes on where ``left`` ends, in the file as in the image (padding between
    them breaks that).
    """
    return (
        left.file == right.file
        and left.file_offset + left.size_bytes == right.file_offset
        and left.image_offset + left.size_bytes == right.image_offset
    )


def _joined(left: Segment, right: Segment) -> Segment:
    return Segment(
        file=left.file,
        file_offset=left.file_offset,
        image_offset=left.image_offset,
        size_bytes=left.size_bytes + right.size_bytes,
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
