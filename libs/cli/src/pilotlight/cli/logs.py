"""``pilotlight logs``: the files that the services write."""

import os
import time
from collections import deque
from pathlib import Path

from pilotlight.cli.home import Home
from pilotlight.cli.output import console, emit_json
from pilotlight.common.errors import NotFound

POLL_INTERVAL_S = 0.25


def show(home: Home, service: str | None, lines: int, *, follow: bool, as_json: bool) -> int:
    """Print the end of one log or of each.

    Raises:
        NotFound: there is no such log.
    """
    files = sorted(home.logs.glob("*.log"))
    if service is not None:
        files = [file for file in files if file.stem == service]
        if not files:
            known = ", ".join(sorted(file.stem for file in home.logs.glob("*.log"))) or "none yet"
            raise NotFound(f"there is no log of {service!r}; there is {known}")
    for file in files:
        for line in _last_lines(file, lines):
            _print(file, line, as_json=as_json, alone=len(files) == 1)
    if follow:
        _follow(files, as_json=as_json)
    return 0


def _follow(files: list[Path], *, as_json: bool) -> None:
    handles = [(file, file.open("rb")) for file in files]
    for _, handle in handles:
        handle.seek(0, os.SEEK_END)
    try:
        while True:
            quiet = True
            for file, handle in handles:
                while line := handle.readline():
                    quiet = False
                    _print(file, line.decode(errors="replace").rstrip("\n"), as_json=as_json, alone=len(files) == 1)
            if quiet:
                # A file has no event that Python's standard library can wait for.
                time.sleep(POLL_INTERVAL_S)  # noqa: TID251
    except KeyboardInterrupt:
        return


def _last_lines(file: Path, lines: int) -> list[str]:
    with file.open("rb") as handle:
        return [line.decode(errors="replace").rstrip("\n") for line in deque(handle, maxlen=max(0, lines))]


def _print(file: Path, line: str, *, as_json: bool, alone: bool) -> None:
    if as_json:
        emit_json({"service": file.stem, "line": line})
    elif alone:
        console.print(line, markup=False, soft_wrap=True)
    else:
        console.print(f"{file.stem:<14} {line}", markup=False, soft_wrap=True)
