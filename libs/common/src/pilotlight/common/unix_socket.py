"""Unix sockets that only their own user may connect to."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from pilotlight.common.errors import BadRequest

MAX_PATH_BYTES = 107
"""What Linux takes for the path of a Unix socket."""
DEFAULT_LIMIT_BYTES = 64 * 1024

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen_unix(path: Path, accept: Accept, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> asyncio.Server:
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


def _bound(path: Path) -> socket.socket:
    if len(bytes(path.absolute())) > MAX_PATH_BYTES:
        raise BadRequest(f"{path} is too long for a Unix socket: give a shorter PILOTLIGHT_RUN_DIR")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Set before the file is there: with a later chmod anybody could connect in between.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
