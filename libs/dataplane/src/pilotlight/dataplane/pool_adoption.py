"""What of an earlier loader's pool is whole, and may be read on."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import structlog

from pilotlight.dataplane.extents import Extents
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.dataplane.table import ChunkEntry, ChunkTable
from pilotlight.policy.ids import Digest

log = structlog.get_logger()

MOST_THREADS = 16
"""That compute digests: a loader that comes again, and every start on its node, waits for all of
the pool. One thread takes a quarter of a second for a gigabyte, or more."""


def whole_images(
    table: ChunkTable, extents: Extents, digest_of: Callable[[ChunkEntry], Digest]
) -> Iterator[PartImage]:
    """The parts of which every chunk is entered and still has its digest; their extents are taken,
    and all other entries are freed. ``digest_of``: that of a chunk's bytes as they are now; for any
    thread.
    """
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "digests") as executor:
        yield from _whole_images(table, extents, digest_of, executor)


def _whole_images(
    table: ChunkTable,
    extents: Extents,
    digest_of: Callable[[ChunkEntry], Digest],
    executor: Executor,
) -> Iterator[PartImage]:
    entered: dict[tuple[Digest, int, int], list[tuple[int, ChunkEntry]]] = defaultdict(list)
    for slot, entry in table.found():
        entered[entry.digest, entry.part, entry.extent_offset].append((slot, entry))
    taken: set[tuple[Digest, int]] = set()
    for (digest, part, offset), entries in sorted(entered.items()):
        chunks = [entry for _, entry in entries]
        sound = (
            (digest, part) not in taken
            and _fit(chunks, extents.size_bytes)
            and all(
                found == entry.chunk_digest
                for found, entry in zip(executor.map(digest_of, chunks), chunks, strict=True)
            )
        )
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


def _fit(entries: list[ChunkEntry], data_bytes: int) -> bool:
    """Whether the entries are all the chunks of one image, which lies in the pool."""
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
        for entry in entries
    )
