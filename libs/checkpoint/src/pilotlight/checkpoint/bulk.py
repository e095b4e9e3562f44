"""Large ranges of files, piece by piece: through the system's memory for files, or past it,
straight from the disk.

Through it is faster, and what is read again is there. A file that is larger than all that is free
there would push out what others need, and its own beginning: that is read past it, but for ranges
that lie there already.
"""

import ctypes
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager

from pilotlight.checkpoint.free_memory import memory_facts, reads_past

PIECE_BYTES = 1024 * 1024
"""What is read of a file at once where the reader hands it on: little enough to stay in a core's
cache until it is hashed."""
ALIGNMENT = 4096
"""Of places, sizes and memory in reads past the system's memory: what the disks of our day want, or
a multiple of it."""
LARGE_BYTES = 256 * 1024 * 1024
"""Smaller files are not worth the question how much memory is free."""
RESIDENT_SHARE = 0.5
"""From which on a range is taken from the system's memory, and what is missing comes there."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def pieces_of(
    descriptor: int, start: int, stop: int, *, past: bool | None = None
) -> Generator[memoryview]:
    """Bytes [start, stop) of an open file, ``PIECE_BYTES`` each but for the last; fewer where the
    file ends before. A piece is good until the next one is asked for.

    Args:
        descriptor: of the file.
        start: first byte.
        stop: the byte behind the last.
        past: whether the file is read past the system's memory; None: as ``reads_past`` says of its
            size and what is free now.

    Raises:
        OSError: the file cannot be read.
    """
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES + 2 * ALIGNMENT))
    position = start
    if past is None:
        past = is_read_past(os.fstat(descriptor).st_size)
    if past and resident_share(descriptor, start, stop) < RESIDENT_SHARE:
        with _direct(descriptor) as direct:
            while direct is not None and position < stop:
                wanted = min(PIECE_BYTES, stop - position)
                before = position % ALIGNMENT
                aligned_bytes = -(-(before + wanted) // ALIGNMENT) * ALIGNMENT
                try:
                    count = os.preadv(direct, [buffer[:aligned_bytes]], position - before)
                except OSError:
                    # A disk that wants another alignment; one that is broken says so again below.
                    break
                if count <= before:
                    return
                piece = buffer[before : min(count, before + wanted)]
                position += len(piece)
                yield piece
    while position < stop:
        count = os.preadv(descriptor, [buffer[: min(PIECE_BYTES, stop - position)]], position)
        if count == 0:
            return
        position += count
        yield buffer[:count]


def is_read_past(size_bytes: int) -> bool:
    """Whether a file of this size is read past the system's memory now."""
    return size_bytes >= LARGE_BYTES and reads_past(size_bytes, memory_facts())


def resident_share(descriptor: int, start: int, stop: int) -> float:
    """How much of [start, stop) of an open file the system has in memory; 1 where it does not tell:
    of others' files, for one.
    """
    start -= start % mmap.PAGESIZE
    size_bytes = stop - start
    if size_bytes <= 0:
        return 1.0
    address = _LIBC.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address == _MAP_FAILED:
        return 1.0
    try:
        pages = ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
        if _LIBC.mincore(address, size_bytes, pages) != 0:
            return 1.0
    finally:
        _LIBC.munmap(address, size_bytes)
    return pages.raw.count(1) / len(pages)


@contextmanager
def _direct(descriptor: int) -> Generator[int | None]:
    """The same open file, past the system's memory; None: where it lies that cannot be done."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        yield None
        return
    try:
        yield direct
    finally:
        os.close(direct)
