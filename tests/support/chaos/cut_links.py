"""Cuts established connections between processes of this host, as a broken link does: both ends
find them ended.
"""

import ctypes
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
"""Its number is the same on all architectures."""
_ESTABLISHED = "01"
_LIBC = ctypes.CDLL(None, use_errno=True)


def cut_links(victims: Iterable[int], others: Iterable[int]) -> int:
    """Shut every TCP connection down that joins one of some processes to one of others.

    Args:
        victims: processes on one side.
        others: processes on the other side; a victim among them is joined to other victims too.

    Returns:
        How many there were.
    """
    ends = _connections()
    owned = {pid: _sockets(pid) for pid in {*victims, *others}}
    far = {inode for pid in others for inode in owned[pid]}
    inode_at = {local: inode for inode, (local, _) in ends.items()}
    cut = 0
    for pid in victims:
        for inode, descriptor in owned[pid].items():
            _, remote = ends.get(inode, ("", ""))
            if inode_at.get(remote) in far:
                cut += _shut_down(pid, descriptor)
    return cut


def _connections() -> dict[int, tuple[str, str]]:
    """Local and remote address of each established connection over IPv4, by its socket's inode."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(words[9]): (words[1], words[2]) for words in lines if words[3] == _ESTABLISHED}


def _sockets(pid: int) -> dict[int, int]:
    """Descriptors of a process's sockets, by inode; none of one that has ended."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(entry.name)
    return found


def _shut_down(pid: int, descriptor: int) -> bool:
    """A descriptor of another process is the same socket as its own."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        ours = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if ours < 0:
            # It has closed it meanwhile, or has ended.
            return False
        with socket.socket(fileno=ours) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            return True
        return False
    finally:
        os.close(process)
