"""``pilotlight logs``: the files that the services write."""

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pilotlight.cli.home import Home
from pilotlight.cli.log_lines import told
from pilotlight.cli.output import console, emit_json
from pilotlight.common.errors import NotFound

POLL_INTERVAL_S = 0.25


class LogNotFound(NotFound):
    """There is no such log, or none at all."""

    code = "log_not_found"
    action = (
        "Name one that is there, or none to see them all. Logs are where the system was started: "
        "run this in the same folder, or set PILOTLIGHT_HOME."
    )


def show(home: Home, service: str | None, lines: int, *, follow: bool, as_json: bool) -> int:
    """Print the end of each log, or of one service's.

    Args:
        home: The installation's.
        service: ``scheduler`` names the log of ``scheduler-2`` too; None: all of them.
        lines: How many of each log, from its end.
        follow: Go on with what is added, until interrupted.
        as_json: Print JSON in place of text.

    Raises:
        LogNotFound: there is no such log, or none at all.
    """
    files = sorted(home.logs.glob("*.log"))
    if not files:
        raise LogNotFound(f"there are no logs in {home.logs}: no system was started there yet")
    if service is not None:
        known = ", ".join(file.stem for file in files)
        files = [
            file
            for file in files
            if file.stem == service or re.fullmatch(rf"{re.escape(service)}-\d+", file.stem)
        ]
        if not files:
            raise LogNotFound(f"there is no log of {service!r}; there is {known}")
    with contextlib.ExitStack() as stack:
        handles = [(file, stack.enter_context(file.open("rb"))) for file in files]
        for file, handle in handles:
            for line in deque(handle, maxlen=max(0, lines)):
                _print(file, line, as_json=as_json, alone=len(files) == 1)
        if follow:
            _follow(handles, as_json=as_json)
    return 0


def _follow(handles: Sequence[tuple[Path, BinaryIO]], *, as_json: bool) -> None:
    """Go on where each file was read to, until Ctrl-C."""
    try:
        while True:
            quiet = True
            for file, handle in handles:
                for line in _whole_lines(handle):
                    quiet = False
                    _print(file, line, as_json=as_json, alone=len(handles) == 1)
            if quiet:
                # A file has no event that Python's standard library can wait for.
                time.sleep(POLL_INTERVAL_S)  # noqa: TID251 - a command of its own, without an event loop
    except KeyboardInterrupt:
        return


def _whole_lines(handle: BinaryIO) -> Iterator[bytes]:
    while line := handle.readline():
        if not line.endswith(b"\n"):
            # Its writer is in the middle of it.
            handle.seek(-len(line), os.SEEK_CUR)
            return
        yield line


def _print(file: Path, raw: bytes, *, as_json: bool, alone: bool) -> None:
    line = raw.decode(errors="replace").rstrip("\n")
    if as_json:
        emit_json({"service": file.stem, "line": line})
    else:
        console.print(told(line, "" if alone else file.stem), soft_wrap=True)
