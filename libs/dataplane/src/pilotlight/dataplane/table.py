"""The header and the chunk table of a host pool: what of it lies in the file, and in which order it
is written.

::

    0        header: magic, version, boot id, highest epoch, sizes, count of changes
    4096     chunk table: one fixed-size entry for each chunk, free or ready
    data     part images, each contiguous, chunk by chunk

One process writes. An entry's state byte is set last and cleared first, so a crash between any two
steps leaves entries that are free, or that describe bytes which were complete and verified. Who
reads beside the writer (``pool_slabs``) may find an entry half written.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush

from pilotlight.policy.ids import Digest, Epoch

MAGIC = b"PLPOOL\r\n"
VERSION = 2
"""2: digests of chunks are those of ``checkpoint.digests``."""
HEADER_BYTES = 4096
ENTRY_BYTES = 128
DATA_ALIGNMENT_BYTES = 2 * 1024 * 1024
"""Where the data starts: a huge page's boundary."""
NS = 1_000_000_000
"""A second's nanoseconds."""

_HEADER = struct.Struct("<8sIIQQ36s")
_EPOCH = struct.Struct("<Q")
_EPOCH_OFFSET = 128
_CHANGES = struct.Struct("<Q")
_CHANGES_OFFSET = 192
# Part, index of the chunk, chunks of the part, extent, bytes of the image, the chunk's range in it,
# the image's serial number, model and chunk digest; nothing; when the image was used last, unless
# this is not its first chunk.
_ENTRY = struct.Struct("<IIIQQQQQ32s32s3xQ")
_ENTRY_OFFSET = 1
_USED = struct.Struct("<Q")
_USED_OFFSET = ENTRY_BYTES - _USED.size
"""Eight aligned bytes: nanoseconds of CLOCK_MONOTONIC. 0: never known, as in files of loaders that
did not write it."""


class EntryState(IntEnum):
    """The first byte of an entry."""

    FREE = 0
    READY = 1
    """The chunk's bytes are complete, and their digest is the entry's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a pool's file is divided."""

    data_bytes: int
    """What models can take."""
    unit_bytes: int
    """What extents are cut in."""

    @property
    def slots(self) -> int:
        """Entries of the table: one a unit, so that extents run out first."""
        return self.data_bytes // self.unit_bytes

    @property
    def data_offset(self) -> int:
        """Where part images start."""
        table_end = HEADER_BYTES + self.slots * ENTRY_BYTES
        return -(-table_end // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of the file: what a worker maps."""
        return self.data_offset + self.data_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEntry:
    """One chunk that is ready."""

    digest: Digest
    """Of the model."""
    part: int
    index: int
    chunks_in_part: int
    extent_offset: int
    """Where the part's image starts, from the start of the data."""
    image_bytes: int
    chunk_offset: int
    """Where the chunk starts, from the start of the image."""
    chunk_bytes: int
    serial: int
    """Of the image: another one that is made later has another, also in the same place."""
    chunk_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first page."""

    geometry: Geometry
    boot_id: str
    highest_epoch: Epoch
    version: int = VERSION
    """Of another one only the epoch means anything to us."""


def read_header(page: bytes) -> Header | None:
    """The header of a file's first page; None when it is not that of a pool of this version or an
    earlier one.
    """
    if len(page) < HEADER_BYTES:
        return None
    magic, version, unit_bytes, data_bytes, _reserved, boot_id = _HEADER.unpack_from(page)
    if magic != MAGIC or not 0 < version <= VERSION or not 0 < unit_bytes <= data_bytes:
        return None
    (epoch,) = _EPOCH.unpack_from(page, _EPOCH_OFFSET)
    geometry = Geometry(data_bytes=data_bytes, unit_bytes=unit_bytes)
    return Header(
        geometry=geometry,
        boot_id=boot_id.decode("ascii", "replace"),
        highest_epoch=Epoch(epoch),
        version=version,
    )


def write_header(mapped: mmap.mmap, header: Header) -> None:
    """Write the first page of a new file; the magic last."""
    geometry = header.geometry
    packed = _HEADER.pack(
        MAGIC, VERSION, geometry.unit_bytes, geometry.data_bytes, 0, header.boot_id.encode()
    )
    write_epoch(mapped, header.highest_epoch)
    mapped[len(MAGIC) : len(packed)] = packed[len(MAGIC) :]
    mapped[: len(MAGIC)] = MAGIC


def write_epoch(mapped: mmap.mmap, epoch: Epoch) -> None:
    """Persist the highest epoch: eight aligned bytes, one store.

    ``pack_into`` would fill them with zeros first, which others see, and a kill leaves.
    """
    mapped[_EPOCH_OFFSET : _EPOCH_OFFSET + _EPOCH.size] = _EPOCH.pack(epoch)


def read_changes(mapped: mmap.mmap | memoryview) -> int:
    """How often images became ready or were given up, by whichever loader; 0: it does not count."""
    (changes,) = _CHANGES.unpack(mapped[_CHANGES_OFFSET : _CHANGES_OFFSET + _CHANGES.size])
    return changes


class ChunkTable:
    """The table, and which of its slots are free."""

    def __init__(self, mapped: mmap.mmap, slots: int) -> None:
        self._mapped = mapped
        states = mapped[HEADER_BYTES : HEADER_BYTES + slots * ENTRY_BYTES : ENTRY_BYTES]
        self._free = [slot for slot, state in enumerate(states) if state != EntryState.READY]
        heapify(self._free)
        self._used = [slot for slot, state in enumerate(states) if state == EntryState.READY]

    def take(self, count: int) -> list[int] | None:
        """Slots for this number of chunks; None when there are too few.

        They stay free in the file until something is entered.
        """
        return [heappop(self._free) for _ in range(count)] if count <= len(self._free) else None

    def found(self) -> Iterator[tuple[int, ChunkEntry]]:
        """Entries that were ready when the file was opened, by slot."""
        for slot in self._used:
            yield slot, self.read(slot)

    def enter(self, slot: int, entry: ChunkEntry) -> None:
        """Write an entry whose bytes are complete and verified."""
        start = self._start(slot)
        place = (
            entry.extent_offset,
            entry.image_bytes,
            entry.chunk_offset,
            entry.chunk_bytes,
            entry.serial,
        )
        digests = (bytes.fromhex(entry.digest), bytes.fromhex(entry.chunk_digest))
        numbers = (entry.part, entry.index, entry.chunks_in_part)
        body = _ENTRY.pack(*numbers, *place, *digests, 0)
        self._mapped[start + _ENTRY_OFFSET : start + _ENTRY_OFFSET + len(body)] = body
        self._mapped[start] = EntryState.READY

    def clear(self, slot: int) -> None:
        """Give a slot back. The bytes of its chunk may be overwritten only after this."""
        self._mapped[self._start(slot)] = EntryState.FREE
        heappush(self._free, slot)

    def read(self, slot: int) -> ChunkEntry:
        """The entry of a slot, which must be ready."""
        part, index, chunks, extent, image_bytes, offset, size, serial, digest, chunk_digest, _ = (
            _ENTRY.unpack_from(self._mapped, self._start(slot) + _ENTRY_OFFSET)
        )
        return ChunkEntry(
            digest=Digest(digest.hex()),
            part=part,
            index=index,
            chunks_in_part=chunks,
            extent_offset=extent,
            image_bytes=image_bytes,
            chunk_offset=offset,
            chunk_bytes=size,
            serial=serial,
            chunk_digest=Digest(chunk_digest.hex()),
        )

    def touch(self, slot: int, used_s: float) -> None:
        """Record when an image was used last.

        Args:
            slot: of its first chunk.
            used_s: on the host's monotonic clock.
        """
        start = self._start(slot) + _USED_OFFSET
        self._mapped[start : start + _USED.size] = _USED.pack(int(used_s * NS))

    def used_s(self, slot: int) -> float | None:
        """When the image of a first chunk was used last; None: that is not known."""
        (used_ns,) = _USED.unpack_from(self._mapped, self._start(slot) + _USED_OFFSET)
        return used_ns / NS if used_ns else None

    def count_change(self) -> None:
        """Images have become ready, or were given up: who reads beside us looks again."""
        count = _CHANGES.pack(read_changes(self._mapped) + 1)
        self._mapped[_CHANGES_OFFSET : _CHANGES_OFFSET + len(count)] = count

    def _start(self, slot: int) -> int:
        return HEADER_BYTES + slot * ENTRY_BYTES
