"""``pilotlight down --purge``: what a system left behind is removed, and nothing else.

Only what we make goes, each by its name; whatever else lies in the folder stays, and so does the
folder then. Links are removed as links: what they point to is not ours.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from pilotlight.cli.embedded import postgres_sockets
from pilotlight.cli.home import MARKER, SHARED_MEMORY, Home
from pilotlight.cli.output import console, emit_json, say
from pilotlight.cli.running import stop_process
from pilotlight.common.errors import PilotlightError, UnprocessableInput

FOLDERS = ("secrets", "logs", "objects", "state", "run", "postgres", "nats")
FILES = ("admin.key", "api.key", "up.json", "up.json.new")
NODE_ID = "node-id"
"""Where a loader keeps its node's name, below ``state``."""
LOCK = "up.lock"
"""Goes last but for the marker: while it is held no system starts on what is being removed."""
DEMO = "demo"


class HomeNotOurs(PilotlightError):
    """The folder is not known to be a state folder of Pilotlight."""

    code = "home_not_ours"
    status = 409
    action = "Check PILOTLIGHT_HOME. If it is right, start the system once (`pilotlight up`), which marks the folder, or delete it by hand."


def purge(home: Home, *, yes: bool, as_json: bool) -> int:
    """Stop the system and remove its state.

    Raises:
        HomeNotOurs: the folder has no marker of ours.
        UnprocessableInput: there is no terminal to ask at, and ``--yes`` is not given.
        HomeInUse: a system was started meanwhile.
        DeadlineExceeded: the system did not stop.
    """
    if not home.root.exists():
        say({"purged": False}, f"there is no {home.root}", as_json=as_json)
        return 0
    if not _anything(home):
        say({"purged": False}, f"there is nothing to remove in {home.root}", as_json=as_json)
        return 0
    _check(home)
    if not yes and not _confirmed(home, as_json=as_json):
        console.print("nothing was removed")
        return 1
    stop_process(home)
    kept = remove(home)
    if as_json:
        emit_json({"purged": True, "home": str(home.root), "kept": kept})
    else:
        console.print(f"removed the state in {home.root}", markup=False, soft_wrap=True)
        if kept:
            console.print(
                f"kept, for it is not ours to delete: {', '.join(kept)}",
                markup=False,
                soft_wrap=True,
            )
    return 0


def remove(home: Home) -> list[str]:
    """Remove what we made; names of what was left.

    Raises:
        HomeNotOurs: the folder has no marker of ours.
        HomeInUse: a system runs on it.
    """
    _check(home)
    demo = Home(home.root / DEMO)
    if (demo.root / MARKER).is_file() and not demo.root.is_symlink():
        remove(demo)
    lock = home.lock()
    try:
        for path in outside(home):
            _remove(path)
        for path in pools(home):
            _remove_pool(path)
        for name in (*FOLDERS, *FILES):
            _remove(home.root / name)
        with contextlib.suppress(OSError):
            home.models.rmdir()
        _remove(home.root / LOCK)
        _remove(home.root / MARKER)
    finally:
        lock.close()
    with contextlib.suppress(OSError):
        home.root.rmdir()
    return sorted(path.name for path in home.root.iterdir()) if home.root.exists() else []


def remove_new(home: Home, before: Collection[str]) -> None:
    """Remove what we made in a folder since it held the names ``before``, under its lock, which
    stays.
    """
    for name in (*FOLDERS, *FILES, MARKER):
        if name not in before:
            _remove(home.root / name)
    if home.models.name not in before:
        with contextlib.suppress(OSError):
            home.models.rmdir()
    home.tidy()


def outside(home: Home) -> Iterator[Path]:
    """What lies elsewhere: sockets whose paths would be too long."""
    if not home.run_dir.is_relative_to(home.root):
        yield home.run_dir
    sockets = postgres_sockets(home.root / "postgres")
    if not sockets.is_relative_to(home.root):
        yield sockets


def pools(home: Home) -> Iterator[Path]:
    """Host pools that a killed loader may have left in shared memory: by the name of this release,
    and by that of the one before.
    """
    yield home.pool_path
    yield from home.pool_path.parent.glob(f"{home.pool_path.name}-[0-9]*")
    with contextlib.suppress(OSError):
        node_id = (home.state / NODE_ID).read_text().strip()
        # The name is ours; what a file that any user may have written says is not taken for a path.
        if node_id.replace("-", "").isalnum():
            yield SHARED_MEMORY / f"pilotlight-{node_id}.pool"


def _anything(home: Home) -> bool:
    """Whether there is something by a name of ours.

    Models are not: they stay where everything else was removed.
    """
    return any(os.path.lexists(home.root / name) for name in (*FOLDERS, *FILES, LOCK, MARKER, DEMO))


def _check(home: Home) -> None:
    if not (home.root / MARKER).is_file():
        raise HomeNotOurs(
            f"{home.root} has no file {MARKER}: it is not known to be a state folder, and nothing in it is removed"
        )


def _confirmed(home: Home, *, as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        raise UnprocessableInput(
            "nobody can be asked here: say --yes to remove the state without being asked"
        )
    console.print(
        f"This removes database, keys, secrets, objects and logs in {home.root}; models/ stays.",
        markup=False,
    )
    console.print("It cannot be undone; `pilotlight backup FILE` makes a copy.", markup=False)
    return console.input("Remove it? [y/N] ", markup=False).strip().lower() in ("y", "yes")


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with what is in it, if it is ours; links in it are
    removed, not followed.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        return
    if stat.S_ISDIR(found.st_mode):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_pool(path: Path) -> None:
    """Remove a host pool that is not locked: one that is is a running loader's, whatever its name
    says.
    """
    try:
        # What is no file of ours there, a link or another user's, is left.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        _remove(path)
    finally:
        os.close(descriptor)
