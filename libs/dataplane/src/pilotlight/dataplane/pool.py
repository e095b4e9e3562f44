"""The host pool: one file of shared memory, written by the loader alone, mapped read-only by its
workers.

A model's part is one contiguous *image* in it. An image is reserved, filled and verified chunk by
chunk, and then ready; a loader that starts again adopts the images that were ready. Everything here
runs on one thread, but for the bytes of an image that is not ready yet: those belong to the fetch
that reserved it.
"""

import errno
import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import structlog

from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.common.clock import Clock
from pilotlight.common.errors import Conflict, HostPoolFull, StaleCommand
from pilotlight.dataplane.extents import Extents
from pilotlight.dataplane.pool_adoption import whole_images
from pilotlight.dataplane.pool_file import (
    boot_id,
    geometry_of,
    lock,
    make_file,
    map_file,
    pool_full,
    put,
)
from pilotlight.dataplane.pool_images import HeldCopy, PartImage
from pilotlight.dataplane.table import (
    HEADER_BYTES,
    VERSION,
    ChunkEntry,
    ChunkTable,
    Header,
    read_header,
    write_epoch,
)
from pilotlight.policy.ids import Digest, Epoch

log = structlog.get_logger()

SERIAL_BITS = 63
"""Half of a 64-bit number: every language's integers hold it."""


class HostPool:
    """The pool of one node, held by its loader."""

    def __init__(self, path: Path, descriptor: int, header: Header, clock: Clock) -> None:
        self.path = path
        self.geometry = header.geometry
        self._descriptor = descriptor
        self._clock = clock
        self._mapped = map_file(descriptor, header)
        self._view = memoryview(self._mapped)
        self._highest_epoch = header.highest_epoch
        self._table = ChunkTable(self._mapped, header.geometry.slots)
        self._extents = Extents(header.geometry.data_bytes, header.geometry.unit_bytes)
        self._images: dict[Digest, dict[int, PartImage]] = defaultdict(dict)
        self._last_used_s: dict[Digest, float] = {}
        self._adopt()

    @classmethod
    def open(cls, path: Path, size_bytes: int, clock: Clock) -> Self:
        """Adopt the pool that lies at a path, or make a new one where there is none of this size
        and boot.

        A pool of another size is replaced by a new file: workers that still map the old one keep
        it. The highest epoch carries over. Takes a while for a large pool, because what is adopted
        is verified.

        Raises:
            HostPoolTaken: another loader holds the pool.
            OSError: the file cannot be made.
        """
        geometry = geometry_of(size_bytes)
        found: Header | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass
        else:
            lock(descriptor, path)
            found = read_header(os.pread(descriptor, HEADER_BYTES, 0))
            intact = (
                found is not None
                and os.fstat(descriptor).st_size == found.geometry.file_bytes
                and found.version == VERSION
            )
            if (
                found is not None
                and intact
                and found.geometry == geometry
                and found.boot_id == boot_id()
            ):
                return cls(path, descriptor, found, clock)
            os.close(descriptor)
        header = Header(
            geometry=geometry,
            boot_id=boot_id(),
            highest_epoch=found.highest_epoch if found else Epoch(0),
        )
        return cls(path, make_file(path, header), header, clock)

    def close(self, *, remove: bool) -> None:
        """Unmap, and let another loader have the file; ``remove`` deletes it.

        No view may be written after this.
        """
        if self._mapped.closed:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        self._view.release()
        try:
            self._mapped.close()
        except BufferError:
            log.warning(
                "pool is still being written; it is unmapped when the process ends",
                action="pool_unmap_late",
            )
        os.close(self._descriptor)

    def memory(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes [offset, offset + size_bytes) of the data, of any image; release it when done."""
        start = self.geometry.data_offset + offset
        return self._view[start : start + size_bytes]

    @property
    def highest_epoch(self) -> Epoch:
        """The highest epoch that any command carried, also before a restart."""
        return self._highest_epoch

    def raise_epoch(self, epoch: Epoch) -> None:
        """Remember a command's epoch.

        Raises:
            StaleCommand: a higher one has been seen.
        """
        if epoch < self._highest_epoch:
            raise StaleCommand(f"epoch {epoch} is older than {self._highest_epoch}")
        if epoch > self._highest_epoch:
            write_epoch(self._mapped, epoch)
            self._highest_epoch = epoch

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing takes."""
        return self._extents.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest range that nothing takes."""
        return self._extents.largest_free_bytes

    @property
    def fragmentation(self) -> float:
        """See ``Extents.fragmentation``."""
        return self._extents.fragmentation

    def reserve(self, digest: Digest, part: int, image_bytes: int, chunks: int) -> PartImage:
        """Room for one part's image; it is not given to another until it is ready or discarded.

        Args:
            digest: The model's.
            part: Number of the part, from 0.
            image_bytes: The image's length.
            chunks: How many chunks it has.

        Raises:
            HostPoolFull: there is no contiguous room.
            Conflict: the part is there already.
        """
        if part in self._images.get(digest, {}):
            raise Conflict(f"part {part} of {digest[:12]} is in the pool already")
        slots = self._table.take(chunks)
        if slots is None:
            raise HostPoolFull(
                f"a part of {chunks} chunks; the host pool has no entries left for them"
            )
        extent = self._extents.take(image_bytes, self._behind(digest, part))
        if extent is None:
            self._free_slots(slots)
            largest, free = self._extents.largest_free_bytes, self._extents.free_bytes
            raise HostPoolFull(
                f"a part of {image_bytes} bytes; the host pool has {free} bytes free, {largest} of them in a row"
            )
        serial = secrets.randbits(SERIAL_BITS)
        image = PartImage(
            digest=digest,
            part=part,
            image_bytes=image_bytes,
            extent=extent,
            slots=slots,
            serial=serial,
        )
        self._images[digest][part] = image
        return image

    def fits(self, digest: Digest, part_bytes: Mapping[int, int]) -> bool:
        """Whether those of a model's parts that are not here could be reserved now, in their order;
        ``part_bytes``: of each image.
        """
        missing = sorted(part for part in part_bytes if part not in self._images.get(digest, {}))
        return not missing or self._extents.fits(
            (part_bytes[part] for part in missing), self._behind(digest, missing[0])
        )

    def view(self, image: PartImage, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes [offset, offset + size_bytes) of an image; release it when done."""
        _check_within(image, offset, offset + size_bytes)
        return self.memory(image.extent.offset + offset, size_bytes)

    def write(self, image: PartImage, offset: int, data: memoryview) -> None:
        """Put bytes at an offset of an image that is not ready yet; any thread.

        Through the file rather than through the mapping: the system makes no page that is
        overwritten at once, nor maps one here, and says so where it has no memory, which a mapping
        answers by ending the process.

        Raises:
            HostPoolFull: the host's shared memory is used up.
            ValueError: the range does not lie within the image.
        """
        _check_within(image, offset, offset + len(data))
        try:
            put(self._descriptor, self._view, self.file_offset(image) + offset, data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise pool_full(self.path.parent) from error

    def file_offset(self, image: PartImage) -> int:
        """Where an image starts, from the start of the file."""
        return self.geometry.data_offset + image.extent.offset

    def enter_chunk(
        self,
        image: PartImage,
        chunk_range: tuple[int, int],
        digest: Digest,
        units: tuple[bytes, ...] | None = None,
    ) -> None:
        """Record the next chunk of an image, whose bytes are complete.

        Args:
            image: The one that they are in.
            chunk_range: [start, stop) in the image, in bytes.
            digest: The chunk's.
            units: Digests of the chunk's units; None: not known.
        """
        start, stop = chunk_range
        entry = ChunkEntry(
            digest=image.digest,
            part=image.part,
            index=image.entered,
            chunks_in_part=len(image.slots),
            extent_offset=image.extent.offset,
            image_bytes=image.image_bytes,
            chunk_offset=start,
            chunk_bytes=stop - start,
            serial=image.serial,
            chunk_digest=digest,
        )
        self._table.enter(image.slots[image.entered], entry)
        if units is not None:
            image.units[image.entered] = units
        image.entered += 1
        if image.ready:
            self.touch(image.digest)
            self._table.count_change()

    def chunk_digests(self, image: PartImage) -> tuple[Digest, ...]:
        """The digests of the chunks that were entered, in order."""
        return tuple(self._table.read(slot).chunk_digest for slot in image.slots[: image.entered])

    def discard(self, image: PartImage) -> None:
        """Give an image up, ready or not.

        It may not be read or written any more, but by sends that have begun.
        """
        self._free_slots(image.slots)
        self._table.count_change()
        image.given_up = True
        if not image.pins:
            self._extents.give_back(image.extent)
        parts = self._images[image.digest]
        del parts[image.part]
        if not parts:
            del self._images[image.digest]
            self._last_used_s.pop(image.digest, None)

    def chunk(self, image: PartImage, index: int) -> ChunkEntry:
        """What is recorded of a chunk that was entered."""
        return self._table.read(image.slots[index])

    def pin(self, image: PartImage) -> None:
        """Keep its bytes in place until ``unpin``: the system reads them after they were sent."""
        image.pins += 1

    def unpin(self, image: PartImage) -> None:
        """A send is over."""
        image.pins -= 1
        if image.given_up and not image.pins:
            self._extents.give_back(image.extent)

    def is_pinned(self, digest: Digest) -> bool:
        """Whether something of a model is being sent."""
        return any(image.pins for image in self._images.get(digest, {}).values())

    @property
    def descriptor(self) -> int:
        """Of the file, for a sender that sends from it."""
        return self._descriptor

    def find(self, digest: Digest, part: int) -> PartImage | None:
        """A part that is ready, or None."""
        image = self._images.get(digest, {}).get(part)
        return image if image is not None and image.ready else None

    def drop(self, digest: Digest) -> int:
        """Give up every ready part of a model; the bytes that were freed.

        They may not be read any more.
        """
        ready = [image for image in self._images.get(digest, {}).values() if image.ready]
        for image in ready:
            self.discard(image)
        return sum(image.extent.size_bytes for image in ready)

    def touch(self, digest: Digest) -> None:
        """The model is used now; the file says so to its readers, and to the loader after us."""
        now_s = self._last_used_s[digest] = self._clock.monotonic_s()
        for image in self._images.get(digest, {}).values():
            if image.slots and image.ready:
                self._table.touch(image.slots[0], now_s)

    def copies(self) -> tuple[HeldCopy, ...]:
        """The models that have ready parts, the least recently used first."""
        held = [self._copy_of(digest) for digest in self._images]
        return tuple(
            sorted(
                (copy for copy in held if copy.parts),
                key=lambda copy: (copy.last_used_s, copy.digest),
            )
        )

    def _behind(self, digest: Digest, part: int) -> int | None:
        """Where the part goes that follows what is here of its model."""
        below = [number for number in self._images.get(digest, {}) if number < part]
        return self._images[digest][max(below)].extent.stop if below else None

    def _free_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._table.clear(slot)

    def _copy_of(self, digest: Digest) -> HeldCopy:
        ready = [image for image in self._images[digest].values() if image.ready]
        return HeldCopy(
            digest=digest,
            parts=tuple(sorted(image.part for image in ready)),
            size_bytes=sum(image.extent.size_bytes for image in ready),
            last_used_s=self._last_used_s.get(digest, 0.0),
        )

    def _adopt(self) -> None:
        """Take over the images that are whole, and when they were used last: now, where nobody has
        said.
        """
        now_s = self._clock.monotonic_s()
        for image in whole_images(self._table, self._extents, self._digest_of):
            self._images[image.digest][image.part] = image
            used_s = min(now_s, self._table.used_s(image.slots[0]) or now_s)
            self._last_used_s[image.digest] = max(used_s, self._last_used_s.get(image.digest, 0.0))
        self._table.count_change()
        if self._images:
            log.info(
                "pool adopted",
                action="pool_adopted",
                models=len(self._images),
                free_bytes=self.free_bytes,
            )

    def _digest_of(self, entry: ChunkEntry) -> Digest:
        with self.memory(entry.extent_offset + entry.chunk_offset, entry.chunk_bytes) as chunk:
            return chunk_digest(chunk)


def _check_within(image: PartImage, start: int, stop: int) -> None:
    if start < 0 or stop > image.image_bytes:
        raise ValueError(f"[{start}, {stop}) is not within an image of {image.image_bytes} bytes")
