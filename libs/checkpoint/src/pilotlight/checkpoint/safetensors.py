"""Safetensors: where each tensor lies, from the headers alone.

::

    file     | length N | header: N bytes of JSON         | data: every byte belongs to exactly one tensor |
             0          8                                 8 + N                                    file size

A header is foreign input: each number in it is checked against the file before it is used, nothing
is read or reserved on its word alone, and it is taken apart tensor by tensor, so that a hostile one
takes little more memory than a true one. Nothing is accepted that the safetensors library refuses:
offsets tile the data without gap or overlap.

Refused here, although the library takes it: a name twice (which of the two counts depends on the
reader), keys that the format does not have, a list in the place of an object, element types that no
engine runs, and what is beyond the limits below.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel, quote, quote_some
from pilotlight.checkpoint.reader import Source, SourceFile, read_small, refuse_pointer
from pilotlight.checkpoint.strict_json import ObjectCursor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 16 * 1024 * 1024
"""The format allows 100 MiB; a thousand layers take 2 MiB."""
MAX_TENSORS = 1 << 18
"""Tensors of a checkpoint: twice what the largest mixtures of experts have. Each takes a third of a
KiB here."""
MAX_ENTRY_BYTES = 2048
"""What a header may say of one tensor: eight dimensions and two offsets in full take an eighth of
it."""
MAX_METADATA_BYTES = 1024 * 1024
"""One string of the metadata."""
MAX_INDEX_BYTES = 16 * 1024 * 1024
MAX_INDEX_MEMBER_BYTES = 64 * 1024
"""Anything in an index beside the map of tensors, such as their total size."""
MAX_SHARDS = 1000
FIRST_READ_BYTES = 64 * 1024
"""What is read of a file at first: the header of a shard with some hundred tensors fits, and a far
source is asked once."""
MAX_CONCURRENT = 8
"""Headers that are read at once, which is what makes a far source with a hundred shards a matter of
seconds."""
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 48
MAX_TENSOR_BYTES = 1 << 62
"""No product of the dimensions may go beyond, also where one of them is zero: readers that multiply
in 64 bits refuse it."""

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file; ``offset`` is from the file's start."""

    name: str
    file: str
    dtype: str
    """As the format names it: ``BF16``."""
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def read_tensors(source: Source, files: dict[str, SourceFile]) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, by name, from the headers of the single file or of the shards
    that the index names.

    Raises:
        BadCheckpoint: there are no weights, a header lies, a tensor is in two files, or the index
            disagrees with the headers.
        UnsupportedModel: an element type is not known, or there are only pickled weights.
    """
    weights, weight_map = _find_weights(source, files)
    found: dict[str, StoredTensor] = {}
    budget = _Budget(MAX_TENSORS)
    with ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="header") as executor:
        headers = [executor.submit(_read_within, budget, source, file) for file in weights]
        try:
            for file, header in zip(weights, headers, strict=True):
                for tensor in header.result():
                    other = found.setdefault(tensor.name, tensor)
                    if other is not tensor:
                        raise BadCheckpoint(
                            f"{quote(tensor.name)} is also in {quote(other.file)}", file=file.name
                        )
        finally:
            # After the first fault the headers that have not been asked for yet are not needed.
            executor.shutdown(wait=False, cancel_futures=True)
    for name, shard in weight_map.items():
        if name not in found or found[name].file != shard:
            raise BadCheckpoint(
                f"says that {quote(name)} is in {quote(shard)}, which is not so", file=INDEX_FILE
            )
    return found


class _Budget:
    """How many tensors the headers that are read at the same time may still add."""

    def __init__(self, tensors: int) -> None:
        self.tensors = tensors
        self.lock = Lock()


def read_header(source: Source, file: SourceFile) -> tuple[StoredTensor, ...]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        BadCheckpoint: the file is truncated or its header lies; the message says how.
        UnsupportedModel: an element type is not known.
    """
    return parse_header(_read_head(source, file), file)


def _read_within(budget: _Budget, source: Source, file: SourceFile) -> tuple[StoredTensor, ...]:
    head = _read_head(source, file)
    # Reading is what goes on at the same time: parsing could not, and one header's objects are less
    # than those of eight.
    with budget.lock:
        tensors = parse_header(head, file, budget.tensors)
        budget.tensors -= len(tensors)
    return tensors


def _read_head(source: Source, file: SourceFile) -> bytes:
    first = source.read(file, 0, min(file.size_bytes, FIRST_READ_BYTES))
    refuse_pointer(first, file)
    size_bytes = header_bytes(first, file)
    if len(first) < size_bytes:
        first += source.read(file, len(first), size_bytes - len(first))
    return first[:size_bytes]


def header_bytes(first: bytes | bytearray, file: SourceFile) -> int:
    """Where the data starts, from a file's first bytes, of which there are at least eight where the
    file has as many.

    Raises:
        BadCheckpoint: the file is truncated or its header too long.
    """
    if len(first) < _LENGTH_BYTES:
        raise BadCheckpoint(f"{len(first)} bytes are too few for a header", file=file.name)
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if length > file.size_bytes - _LENGTH_BYTES:
        raise BadCheckpoint(
            f"the header claims {length} bytes, the file has {file.size_bytes}", file=file.name
        )
    if length > MAX_HEADER_BYTES:
        raise BadCheckpoint(
            f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are read", file=file.name
        )
    return _LENGTH_BYTES + length


def parse_header(
    data: bytes, file: SourceFile, max_tensors: int = MAX_TENSORS
) -> tuple[StoredTensor, ...]:
    """As ``read_header``, from the bytes before the file's data: as many as ``header_bytes``
    says.
    """
    if data[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise BadCheckpoint("the header does not begin with a brace", file=file.name)
    cursor = ObjectCursor(data, file.name, _LENGTH_BYTES)
    tensors: list[StoredTensor] = []
    for name in cursor.members():
        if name == _METADATA:
            _skip_metadata(cursor, file.name)
            continue
        if len(tensors) == max_tensors:
            raise BadCheckpoint(f"there are more than {MAX_TENSORS} tensors", file=file.name)
        tensors.append(_parse_tensor(name, cursor.value(MAX_ENTRY_BYTES), file.name, len(data)))
    cursor.end()
    # By both ends: an empty tensor lies before the one that starts where it does.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    _check_tiling(tensors, file, len(data))
    return tuple(tensors)


def _parse_tensor(name: str, entry: Any, file: str, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise BadCheckpoint(f"{quote(name)} is not described by an object", file=file)
    fields = cast("dict[str, Any]", entry)
    dtype, shape, offsets = (
        fields.get("dtype"),
        _integers(fields.get("shape")),
        _integers(fields.get("data_offsets")),
    )
    if (
        len(fields) != 3
        or not isinstance(dtype, str)
        or shape is None
        or offsets is None
        or len(offsets) != 2
    ):
        raise BadCheckpoint(
            f"{quote(name)} needs a dtype, a shape and two data_offsets, and nothing else",
            file=file,
        )
    if dtype not in _ELEMENT_BYTES:
        raise UnsupportedModel(
            f"{quote(name)} has the unknown element type {quote(dtype)}", file=file
        )
    if len(shape) > MAX_DIMENSIONS or any(size > MAX_DIMENSION for size in shape):
        raise BadCheckpoint(f"{quote(name)} has an impossible shape", file=file)
    if math.prod(size or 1 for size in shape) * _ELEMENT_BYTES[dtype] > MAX_TENSOR_BYTES:
        raise BadCheckpoint(f"{quote(name)} has an impossible shape", file=file)
    start, stop = offsets
    size_bytes = math.prod(shape) * _ELEMENT_BYTES[dtype]
    if stop - start != size_bytes:
        fault = f"{quote(name)} of {dtype}{list(shape)} takes {size_bytes} bytes, its offsets say {stop - start}"
        raise BadCheckpoint(fault, file=file)
    return StoredTensor(
        name=name,
        file=file,
        dtype=dtype,
        shape=shape,
        offset=data_start + start,
        size_bytes=size_bytes,
    )


def _integers(value: Any) -> tuple[int, ...] | None:
    """A list of integers within [0, 2^63); None for anything else (true is no integer)."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    return (
        tuple(items) if all(type(item) is int and 0 <= item < 1 << 63 for item in items) else None
    )


def _skip_metadata(cursor: ObjectCursor, file: str) -> None:
    """What it says is not used; but it must be strings by strings, or null."""
    if cursor.peek() != b"{":
        if cursor.value(MAX_ENTRY_BYTES) is not None:
            raise BadCheckpoint(f"{_METADATA} is not an object", file=file)
        return
    for _ in cursor.members():
        if cursor.peek() != b'"':
            raise BadCheckpoint(f"{_METADATA} holds more than strings", file=file)
        cursor.text(MAX_METADATA_BYTES)


def _check_tiling(tensors: list[StoredTensor], file: SourceFile, data_start: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.offset < end:
            raise BadCheckpoint(
                f"{quote(tensor.name)} overlaps the tensor before it", file=file.name
            )
        if tensor.offset > end:
            raise BadCheckpoint(
                f"{tensor.offset - end} bytes before {quote(tensor.name)} belong to no tensor",
                file=file.name,
            )
        end += tensor.size_bytes
        if end > file.size_bytes:
            fault = (
                f"truncated: {quote(tensor.name)} ends at byte {end}, the file at {file.size_bytes}"
            )
            raise BadCheckpoint(fault, file=file.name)
    if end != file.size_bytes:
        raise BadCheckpoint(
            f"{file.size_bytes - end} bytes at the end belong to no tensor", file=file.name
        )


def _find_weights(
    source: Source, files: dict[str, SourceFile]
) -> tuple[tuple[SourceFile, ...], dict[str, str]]:
    """The files that hold the weights, by name, and the index's map of tensors to shards (empty for
    a single file).
    """
    if SINGLE_FILE in files:
        return (files[SINGLE_FILE],), {}
    if INDEX_FILE not in files:
        pickled = [name for name in files if name.endswith(_PICKLED)]
        if pickled:
            raise UnsupportedModel(
                "pickled weights are never loaded: convert them to safetensors", file=pickled[0]
            )
        raise BadCheckpoint(f"there is neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = _parse_index(read_small(source, files[INDEX_FILE], MAX_INDEX_BYTES))
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise BadCheckpoint(
            f"names {len(shards)} shards; at most {MAX_SHARDS} are read", file=INDEX_FILE
        )
    # Only listed files are ever opened, so a shard's name cannot lead out of the folder.
    missing = [name for name in shards if name not in files]
    if missing:
        raise BadCheckpoint(
            f"names shards that are missing: {quote_some(missing)}", file=INDEX_FILE
        )
    return tuple(files[name] for name in shards), weight_map


def _parse_index(data: bytes) -> dict[str, str]:
    """The shard of each tensor, as an index has it."""
    cursor = ObjectCursor(data, INDEX_FILE)
    weight_map: dict[str, str] | None = None
    for key in cursor.members():
        if key != "weight_map" or cursor.peek() == b"n":
            cursor.value(MAX_INDEX_MEMBER_BYTES)
            continue
        if cursor.peek() != b"{":
            raise BadCheckpoint("weight_map is not an object", file=INDEX_FILE)
        weight_map, shards = {}, dict[str, str]()
        for name in cursor.members():
            if cursor.peek() != b'"':
                raise BadCheckpoint(f"weight_map.{quote(name)} is not a string", file=INDEX_FILE)
            if len(weight_map) == MAX_TENSORS:
                raise BadCheckpoint(f"there are more than {MAX_TENSORS} tensors", file=INDEX_FILE)
            shard = cursor.text(MAX_ENTRY_BYTES)
            weight_map[name] = shards.setdefault(shard, shard)
    cursor.end()
    if weight_map is None:
        raise BadCheckpoint("there is no weight_map", file=INDEX_FILE)
    return weight_map
