"""Files of this machine, read straight to where a chunk lies in the pool, by the library of
``pilotlight.native``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.dataplane.pool_file import pool_full
from pilotlight.native.library import Library, NativeUnavailable, library
from pilotlight.native.reads import FileRead, FileSpan, NoMemory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FileReads:
    """Reads files to where one chunk lies."""

    library: Library
    memory: Callable[[], memoryview]
    """The chunk's place in the pool's mapping."""
    folder: Path
    """Where the pool's file is."""

    def begin(self, bounds: tuple[int, int], spans: Sequence[FileSpan]) -> FileRead:
        """A read into [start, stop) of the chunk."""
        return FileRead(self.library, self.memory(), bounds, UNIT_BYTES, spans)

    def run(self, read: FileRead, *, resident_only: bool) -> None:
        """As ``FileRead.run``.

        Raises:
            HostPoolFull: the host's shared memory is used up.
        """
        try:
            read.run(resident_only=resident_only)
        except NoMemory as error:
            raise pool_full(self.folder) from error


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
