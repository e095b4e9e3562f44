"""The file of a host pool: made whole, locked by one loader, known by the boot of the host that it
was made in.
"""

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

from pilotlight.common.errors import HostPoolFull, HostPoolTaken
from pilotlight.dataplane.table import Geometry, Header, write_header

SMALL_UNIT_BYTES = 64 * 1024
LARGE_UNIT_BYTES = 2 * 1024 * 1024
LARGE_POOL_BYTES = 16 * 1024 * 1024 * 1024
"""From this size on, extents are cut in huge pages."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names this boot of the host.

    What an earlier one left in a file was perhaps never written back whole.
    """
    return _BOOT_ID.read_text().strip()


def pool_full(folder: Path) -> HostPoolFull:
    """What is raised where the file system that a pool is in gives no more memory."""
    return HostPoolFull(f"{folder} is full: make it larger than PILOTLIGHT_POOL_BYTES")


def lock(descriptor: int, path: Path) -> None:
    """One loader a pool: the kernel frees the lock with the process.

    Raises:
        HostPoolTaken: another loader holds it; the descriptor is closed.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise HostPoolTaken(f"another loader holds the host pool {path}") from error


def make_file(path: Path, header: Header) -> int:
    """A new pool file in the place of whatever lies there; complete before it gets its name.

    Raises:
        HostPoolTaken: another loader makes one.
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f"{path.name}.new")
    descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    lock(descriptor, path)
    try:
        # What a loader that was killed here left behind is not ours to keep.
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, header.geometry.file_bytes)
        os.posix_fallocate(descriptor, 0, header.geometry.data_offset)
        with mmap.mmap(descriptor, header.geometry.data_offset) as mapped:
            write_header(mapped, header)
        making.rename(path)
    except OSError:
        os.close(descriptor)
        making.unlink(missing_ok=True)
        raise
    return descriptor


def map_file(descriptor: int, header: Header) -> mmap.mmap:
    """The whole file, writable."""
    mapped = mmap.mmap(descriptor, header.geometry.file_bytes)
    with suppress(OSError):
        # Where the file system gives them, which most do not unless they are told to.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def put(descriptor: int, view: memoryview, start: int, data: memoryview) -> None:
    """Write bytes to a pool.

    Args:
        descriptor: of its file.
        view: all of its mapping.
        start: in the file.
        data: the bytes.

    Raises:
        OSError: the file system does not take them.
    """
    done = 0
    try:
        while done < len(data):
            with data[done:] as left:
                done += os.pwrite(descriptor, left, start + done)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Files on hugetlbfs can be mapped, and not written to.
        os.posix_fallocate(descriptor, start, len(data))
        view[start : start + len(data)] = data


def geometry_of(pool_bytes: int) -> Geometry:
    """That of a pool of this size, or a little less: whole units."""
    unit_bytes = LARGE_UNIT_BYTES if pool_bytes >= LARGE_POOL_BYTES else SMALL_UNIT_BYTES
    return Geometry(data_bytes=pool_bytes // unit_bytes * unit_bytes, unit_bytes=unit_bytes)
