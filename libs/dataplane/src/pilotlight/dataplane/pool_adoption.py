"""What of an earlier loader's pool is whole, and may be read on."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import structlog

from pilotlight.dataplane.extents import Extents
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.table import ChunkEntry, ChunkTable
from pilotlight.policy.ids import Digest

log = structlog.get_logger()


def whole_images(
    table: ChunkTable, extents: Extents, digest_of: Callable[[ChunkEntry], Digest]
) -> Iterator[PartImage]:
    """The parts of which every chunk is entered and still has its digest; their extents are taken,
    and all other entries are freed. ``digest_of``: that of a chunk's bytes as they are now.
    """
    entered: dict[tuple[Digest, int, int], list[tuple[int, ChunkEntry]]] = defaultdict(list)
    for slot, entry in table.found():
        entered[entry.digest, entry.part, entry.extent_offset].append((slot, entry))
    taken: set[tuple[Digest, int]] = set()
    for (digest, part, offset), entries in sorted(entered.items()):
        chunks = [entry for _, entry in entries]
        sound = (digest, part) not in taken and _are_sound(chunks, extents.size_bytes, digest_of)
        extent = extents.take_at(offset, chunks[0].image_bytes) if sound else None
        if extent is None:
            log.warning(
                "part in the pool is not whole; dropped",
                action="pool_part_dropped",
                digest=digest,
                part=part,
            )
            for slot, _ in entries:
                table.clear(slot)
            continue
        taken.add((digest, part))
        slots = [slot for slot, _ in sorted(entries, key=lambda found: found[1].index)]
        yield PartImage(
            digest=digest,
            part=part,
            image_bytes=chunks[0].image_bytes,
            extent=extent,
            slots=slots,
            serial=chunks[0].serial,
            entered=len(slots),
        )


def _are_sound(
    entries: list[ChunkEntry], data_bytes: int, digest_of: Callable[[ChunkEntry], Digest]
) -> bool:
    """Whether the entries are all the chunks of one image, and their bytes have the digests."""
    first = entries[0]
    if len(entries) != first.chunks_in_part or {entry.index for entry in entries} != set(
        range(len(entries))
    ):
        return False
    if sum(entry.chunk_bytes for entry in entries) != first.image_bytes:
        return False
    return all(
        (entry.chunks_in_part, entry.image_bytes, entry.serial)
        == (first.chunks_in_part, first.image_bytes, first.serial)
        and entry.chunk_offset + entry.chunk_bytes <= entry.image_bytes
        and entry.extent_offset + entry.image_bytes <= data_bytes
        and digest_of(entry) == entry.chunk_digest
        for entry in entries
    )
