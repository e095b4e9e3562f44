"""Which slabs of a host pool hold ready images, for a process that maps it beside the loader that
writes it.

::

    file    [ header )[ table ...... )[ image )[ image ...... )      [ image )
    slabs   [ 0            )[ 1            )[ 2            )[ 3            )[ 4 ...

Nothing is asked of the loader, and nothing is locked: an entry may change while it is read. What
was read torn names a range of the pool's data all the same, or nothing.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Self

from pilotlight.dataplane.table import (
    ENTRY_BYTES,
    HEADER_BYTES,
    VERSION,
    EntryState,
    Geometry,
    read_changes,
    read_header,
)

# Of an entry of ``table``, state byte included: index of the chunk, chunks of the part, extent,
# bytes of the image, its serial number, when it was used last.
_ENTRY = struct.Struct("<B4xIIQQ16xQ64x3xQ")


class PoolSlabs:
    """The slabs of one pool: ranges of its file, from its start on."""

    def __init__(self, mapped: memoryview, geometry: Geometry, slab_bytes: int) -> None:
        self._mapped = mapped
        self._geometry = geometry
        self._slab_bytes = slab_bytes

    @classmethod
    def of(cls, mapped: memoryview, slab_bytes: int) -> Self | None:
        """Those of a file that is mapped whole; None where it is no pool that we can read."""
        header = read_header(bytes(mapped[:HEADER_BYTES]))
        if (
            header is None
            or header.version != VERSION
            or header.geometry.file_bytes > mapped.nbytes
        ):
            return None
        return cls(mapped, header.geometry, slab_bytes)

    @property
    def changes(self) -> int:
        """Another number whenever an image has become ready or was given up; 0: the loader does not
        say so.
        """
        return read_changes(self._mapped)

    def occupied(self) -> list[int]:
        """The slabs that hold bytes of ready images, by number; those first whose images were used
        last, and of these the lowest.
        """
        used_ns: dict[int, int] = {}
        for start, stop, image_ns in self._images():
            for slab in range(start // self._slab_bytes, -(-stop // self._slab_bytes)):
                used_ns[slab] = max(image_ns, used_ns.get(slab, 0))
        return sorted(used_ns, key=lambda slab: (-used_ns[slab], slab))

    def _images(self) -> Iterator[tuple[int, int, int]]:
        """Of each ready image [start, stop) in the file, and when it was used last."""
        table = self._mapped[HEADER_BYTES : HEADER_BYTES + self._geometry.slots * ENTRY_BYTES]
        states = bytes(table[::ENTRY_BYTES])
        # The loader takes the lowest slots that are free, so that the rest is free, too.
        end = states.rfind(bytes((EntryState.READY,))) + 1
        entered, firsts = Counter[int](), list[tuple[int, int, int, int, int]]()
        for state, index, chunks, offset, image_bytes, serial, image_ns in _ENTRY.iter_unpack(
            table[: end * ENTRY_BYTES]
        ):
            if state == EntryState.READY:
                entered[serial] += 1
                if index == 0:
                    firsts.append((serial, chunks, offset, image_bytes, image_ns))
        for serial, chunks, offset, image_bytes, image_ns in firsts:
            if entered[serial] == chunks and offset + image_bytes <= self._geometry.data_bytes:
                start = self._geometry.data_offset + offset
                yield start, start + image_bytes, image_ns
