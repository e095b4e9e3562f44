"""How a loader starts a process that goes on when it ends. Imports nothing that takes time."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from pilotlight.common.machine import STANDARD_ERROR, STANDARD_ERROR_DESCRIPTOR


def spawn(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path, stdin: int | None = None
) -> int:
    """Start a process that is no part of our session; its id. Its output goes to a file, never to a
    pipe of ours, or to where our standard error goes; nowhere, where the file cannot be written to,
    as on a full disk.

    Args:
        command: its program and arguments.
        environment: all of its variables.
        log_path: the file.
        stdin: a descriptor that becomes its standard input; None: it has none.

    Raises:
        OSError: it cannot be started.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    if log_path != STANDARD_ERROR:
        log_path = _writable(log_path, flags)
    opened = [
        (os.POSIX_SPAWN_OPEN, 1, str(log_path), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, STANDARD_ERROR_DESCRIPTOR),
    ]
    inherited = [(os.POSIX_SPAWN_DUP2, STANDARD_ERROR_DESCRIPTOR, 1)]
    return os.posix_spawn(
        command[0],
        list(command),
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            if stdin is None
            else (os.POSIX_SPAWN_DUP2, stdin, 0),
            *(inherited if log_path == STANDARD_ERROR else opened),
        ],
        setsid=True,
        # Python ignores it; the child must not.
        setsigdef=[signal.SIGPIPE],
    )


def _writable(log_path: Path, flags: int) -> Path:
    """The file, if it can be opened for writing; else the one that takes everything and keeps
    nothing.
    """
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(log_path, flags | os.O_CLOEXEC, 0o600))
    except OSError as error:
        import structlog

        structlog.get_logger().error(
            "a worker has no log", action="worker_log_failed", path=str(log_path), error=str(error)
        )
        return Path(os.devnull)
    return log_path
