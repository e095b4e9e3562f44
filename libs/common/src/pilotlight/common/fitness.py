"""What a machine must have: one check for each thing, used at start-up and by ``pilotlight
doctor``, which so say the same.

A check raises what is wrong, with what to do; else it returns a sentence about what there is. It
changes nothing but the process's own limits, and leaves nothing behind.
"""

import errno
import os
import resource
import socket
import tempfile
from pathlib import Path

from pilotlight.common.errors import (
    DiskFull,
    FileLimitTooLow,
    FolderUnusable,
    MachineUnfit,
    PortTaken,
    SharedMemoryTooSmall,
)

MIB = 1024 * 1024
MIN_FILES = 1024
"""A gateway needs one for each client, a database a few hundred."""
WANTED_FILES = 65536
MIN_SHARED_BYTES = 32 * MIB
"""Free shared memory without which PostgreSQL may not start, or no model fits."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def check_files() -> str:
    """Raise the process's limit of open files as far as the system lets it.

    Raises:
        FileLimitTooLow: that is not far enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        soft = reachable
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raise FileLimitTooLow(
            f"a process may open {soft} files here (RLIMIT_NOFILE), and at least {MIN_FILES} are needed"
        )
    return f"{soft} open files a process"


def check_folder(folder: Path, what: str, setting: str) -> str:
    """Try to write to a folder, or to where it is to be made.

    Raises:
        DiskFull: there is no room for a small file.
        FolderUnusable: it cannot be written to.
    """
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)) as probe:
            probe.write(bytes(4096))
            probe.flush()
    except OSError as error:
        raise folder_error(folder, what, setting, error) from error
    return str(folder)


def folder_error(folder: Path, what: str, setting: str, error: OSError) -> MachineUnfit:
    """What to tell of a folder in which a file could not be made.

    Args:
        folder: the folder.
        what: what it is for, in words ("folder for sockets").
        setting: the environment variable that names it.
        error: what the system said.
    """
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return DiskFull(f"the {what} {folder} has no room left: {reason}")
    return FolderUnusable(f"cannot write to the {what} {folder} ({setting}): {reason}")


def check_disk(folder: Path, needed_bytes: int, what_for: str) -> str:
    """Look for room on the disk of a folder, which need not be there yet.

    Raises:
        DiskFull: there is less than is needed.
    """
    found = os.statvfs(_existing(folder))
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes:
        raise DiskFull(
            f"{folder} has {free_bytes // MIB:,} MiB free, and {-(-needed_bytes // MIB):,} MiB are needed: {what_for}"
        )
    return f"{free_bytes // MIB:,} MiB free at {folder}"


def check_shared_memory(folder: Path, pool_bytes: int | None) -> str:
    """Look for room for a host pool: ``pool_bytes`` where a size is set, or as much as there is.

    Raises:
        SharedMemoryTooSmall: the pool can never fit, or nearly everything is taken.
    """
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise SharedMemoryTooSmall(
            f"there is no {folder}: {error.strerror}; mount a tmpfs there"
        ) from error
    size_bytes, free_bytes = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if size_bytes == 0:  # a tmpfs without a limit says so
        return f"{folder} is as large as memory"
    if pool_bytes is not None and pool_bytes > size_bytes:
        raise SharedMemoryTooSmall(
            f"PILOTLIGHT_POOL_BYTES asks for {pool_bytes // MIB:,} MiB, and {folder} is {size_bytes // MIB:,} MiB large"
        )
    if free_bytes < MIN_SHARED_BYTES:
        raise SharedMemoryTooSmall(
            f"{folder} has {free_bytes // MIB:,} of {size_bytes // MIB:,} MiB free, and at least {MIN_SHARED_BYTES // MIB} MiB are needed"
        )
    return f"{free_bytes // MIB:,} MiB free in {folder}"


def check_port(host: str, port: int) -> str:
    """Try to take an address.

    Raises:
        PortTaken: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise port_error(host, port, error) from error
    return f"{host}:{port} is free"


def port_error(host: str, port: int, error: OSError) -> PortTaken:
    """What to tell of an address that cannot be had."""
    return PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    for place in (folder.absolute(), *folder.absolute().parents):
        if os.path.lexists(place):
            return place
    return Path("/")
