"""Files of this machine, read straight to where a chunk lies in the pool, by the library of
``pilotlight.native``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.checkpoint.manifest import Chunk
from pilotlight.dataplane.pool import HostPool
from pilotlight.dataplane.pool_file import pool_full
from pilotlight.dataplane.pool_images import PartImage
from pilotlight.native.library import Library, NativeUnavailable, library
from pilotlight.native.reads import Backing, FileRead, FileSpan, NoMemory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FileReads:
    """Reads files to where one chunk lies."""

    library: Library
    memory: Callable[[], memoryview]
    """The chunk's place in the pool's mapping."""
    backing: Backing
    """The pool's file, and where the chunk starts in it."""
    folder: Path
    """Where the file is."""

    def begin(self, bounds: tuple[int, int], spans: Sequence[FileSpan]) -> FileRead:
        """A read into [start, stop) of the chunk."""
        return FileRead(self.library, self.memory(), bounds, UNIT_BYTES, spans, self.backing)

    def run(self, read: FileRead, *, resident_only: bool) -> None:
        """As ``FileRead.run``.

        Raises:
            HostPoolFull: the host's shared memory is used up.
        """
        try:
            read.run(resident_only=resident_only)
        except NoMemory as error:
            raise pool_full(self.folder) from error


def reads_of(library: Library, pool: HostPool, image: PartImage, chunk: Chunk) -> FileReads:
    """Reads files to where a chunk of an image lies.

    Args:
        library: reads and hashes.
        pool: the memory.
        image: a part's, which has its place in the pool.
        chunk: of that image.
    """

    def memory() -> memoryview:
        return pool.view(image, chunk.image_offset, chunk.size_bytes)

    backing = Backing(pool.descriptor, pool.file_offset(image) + chunk.image_offset)
    return FileReads(library, memory, backing, pool.path.parent)


def native_reads() -> Library | None:
    """The library; None where it cannot be had: then files are read in Python. May compile it,
    which takes some ten seconds.
    """
    try:
        return library()
    except NativeUnavailable as error:
        log.warning(
            "files are read without the library", action="native_reads_off", error=str(error)
        )
        return None
