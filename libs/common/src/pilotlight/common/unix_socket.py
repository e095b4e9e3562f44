"""Unix sockets that only their own user may connect to."""

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path

import structlog

from pilotlight.common.errors import BadRequest

log = structlog.get_logger()

MAX_PATH_BYTES = 107
"""What Linux takes for the path of a Unix socket."""
DEFAULT_LIMIT_BYTES = 64 * 1024
NEW_S = 10.0
"""A socket that is younger may belong to a process that is about to listen."""
MAX_SWEPT = 256
"""Sockets that are looked at in one sweep."""
_OF_A_PROCESS = re.compile(r".+-\d+\.sock")

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen_unix(
    path: Path, accept: Accept, *, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> asyncio.Server:
    """Serve on a socket file, in the place of one that a killed process left there.

    Args:
        path: its folder is made where it does not exist.
        accept: called with each connection.
        limit_bytes: what a reader of ``readuntil`` buffers at most.

    Raises:
        BadRequest: the path is longer than the system takes.
        OSError: the socket cannot be made.
    """
    return await asyncio.start_unix_server(accept, sock=_bound(path), limit=limit_bytes)


def sweep(ours: Path) -> int:
    """Remove the sockets ``NAME-PID.sock`` that killed processes left beside ours, which was made
    just now; how many.

    A socket without a listener is dead, whatever process has its process id by now, and in
    whichever container it was: the system takes the connections of a process that lives, even while
    it is stopped. A new socket may be about to get its listener, and stays for the next time.
    """
    swept = 0
    others = (
        path
        for path in ours.parent.glob("*.sock")
        if _OF_A_PROCESS.fullmatch(path.name) and path != ours
    )
    for path in islice(others, MAX_SWEPT):
        try:
            is_old = ours.lstat().st_mtime - path.lstat().st_mtime > NEW_S
            if is_old and _is_left(path):
                path.unlink()
                swept += 1
        except OSError as error:
            log.debug("a socket stays", action="socket_kept", path=str(path), error=str(error))
    return swept


def _is_left(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        return False


def _bound(path: Path) -> socket.socket:
    if len(bytes(path.absolute())) > MAX_PATH_BYTES:
        raise BadRequest(f"{path} is too long for a Unix socket: give a shorter PILOTLIGHT_RUN_DIR")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Set before the file is there: with a later chmod any user could connect in between.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
