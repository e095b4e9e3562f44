"""What ``pilotlight up`` needs of this machine: looked at before anything is made, and by ``pilotlight doctor``."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pilotlight.cli.home import Home, HomeUnusable
from pilotlight.cli.own_servers import server_looks
from pilotlight.common.errors import FolderUnusable
from pilotlight.common.fitness import check_disk, check_files, check_folder, check_shared_memory
from pilotlight.common.natsconf import EVENTS_BYTES

MIB = 1024 * 1024
SHARED_MEMORY = Path("/dev/shm")
FIRST_START_BYTES = 128 * MIB
"""A new database with its log, and some for logs and objects."""
RUN_BYTES = 32 * MIB
"""To start again on what is there."""
NATS_SHARE = 0.75
"""Of the room on its disk that nats-server promises to streams at most."""

Look = Callable[[], str]
"""Raises what will not do; else says what there is."""


def looks(home: Home, pool_bytes: int | None, environment: Mapping[str, str]) -> dict[str, Look]:
    """The checks by name, in the order in which they are made."""
    if pool_bytes is None:
        pool_bytes = _number(environment.get("PILOTLIGHT_POOL_BYTES"))
    needed_bytes, what_for = needed_room(home, environment)
    pool = environment.get("PILOTLIGHT_POOL_PATH")
    folder = Path(pool).absolute().parent if pool else SHARED_MEMORY
    return {
        "file limit": check_files,
        "state folder": lambda: look_at_home(home),
        "disk": lambda: check_disk(home.root, needed_bytes, what_for),
        "shared memory": lambda: check_shared_memory(folder, pool_bytes),
        **server_looks(home, environment),
    }


def look_at_home(home: Home) -> str:
    """Whether the state folder can be used.

    Raises:
        HomeUnusable: its name will not do, or it cannot be written to.
        DiskFull: there is no room for a small file.
    """
    home.check_name()
    try:
        return check_folder(home.root, "state folder", "PILOTLIGHT_HOME")
    except FolderUnusable as error:
        raise HomeUnusable(error.message) from error


def needed_room(home: Home, environment: Mapping[str, str]) -> tuple[int, str]:
    """Bytes that must be free on the disk of the state folder, and what for."""
    needed_bytes, what_for = RUN_BYTES, "for the database's log and the services' logs"
    if not environment.get("PILOTLIGHT_DATABASE_URL") and not os.path.exists(home.root / "postgres" / "data"):
        needed_bytes, what_for = FIRST_START_BYTES, "for a new database and logs"
    if not environment.get("PILOTLIGHT_NATS_URL") and not os.path.exists(home.root / "nats"):
        events_bytes = _number(environment.get("PILOTLIGHT_EVENTS_BYTES")) or EVENTS_BYTES
        needed_bytes += int(events_bytes / NATS_SHARE)
        what_for += f", and for up to {events_bytes // MIB:,} MiB of events (PILOTLIGHT_EVENTS_BYTES)"
    return needed_bytes, what_for


def _number(text: str | None) -> int | None:
    """A setting that the services check themselves; None where it is none."""
    return int(text) if text and text.isascii() and text.isdigit() else None
