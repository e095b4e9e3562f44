"""The state folder of an embedded system: where everything lies, which users may read it, and which
process runs it.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from pilotlight.common.credentials import BROUGHT_TO, NATS_USERS, SECRETS_OF, write_once
from pilotlight.common.db.tables import OWNERS
from pilotlight.common.errors import DiskFull, FolderUnusable, PilotlightError
from pilotlight.common.fitness import folder_error

SHARED_MEMORY = Path("/dev/shm")

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux; the longest name that we put into the run folder takes 40
of them."""


MARKER = "pilotlight-home"
MARKER_TEXT = "State of a Pilotlight system. `pilotlight down --purge` stops it and removes this."
"""What tells a state folder from any other: nothing is removed where it is missing."""


MAX_NAME_BYTES = 255
MAX_HOME_BYTES = 700
"""Longest path of a state folder: PostgreSQL takes 1023 bytes for the longest path below it."""


class HomeUnusable(FolderUnusable):
    """The state folder cannot be used."""

    code = "home_unusable"
    action = (
        "Set PILOTLIGHT_HOME to a folder that you may write to, with a path of ordinary characters."
    )


class HomeInUse(PilotlightError):
    """Another system runs on the state folder."""

    code = "home_in_use"
    status = 409
    action = "Stop it with `pilotlight down`, or choose another PILOTLIGHT_HOME."


class RunningSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What ``up.json`` says of the system that uses the folder."""

    pid: int
    started_ticks: int
    """When the process began, in clock ticks since boot: tells it from a later one that was given
    the same id."""
    url: str


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one state folder. Nothing of it is readable for other users."""

    root: Path

    @classmethod
    def from_environment(cls) -> "Home":
        """``$PILOTLIGHT_HOME``, or ``.pilotlight`` in the current folder."""
        return cls(Path(os.environ.get("PILOTLIGHT_HOME") or ".pilotlight").absolute())

    @property
    def admin_key(self) -> Path:
        return self.root / "admin.key"

    @property
    def api_key(self) -> Path:
        return self.root / "api.key"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    def secrets_of(self, service: str) -> Path:
        """The folder with the secrets of one service, and no others."""
        return self.secrets / service

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def run_dir(self) -> Path:
        """Folder for Unix sockets: below the home where their paths fit, else in the temporary
        folder under a name of its own.
        """
        inside = self.root / "run"
        if len(os.fsencode(inside)) + 40 <= MAX_SOCKET_PATH_BYTES:
            return inside
        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"pilotlight-{os.getuid()}-{name}"

    @property
    def pool_path(self) -> Path:
        """The host pool's file: by the folder, for a copy of the folder has the node's id too, and
        runs on a pool of its own.
        """
        name = hashlib.sha256(os.fsencode(os.path.realpath(self.root))).hexdigest()[:12]
        return SHARED_MEMORY / f"pilotlight-home-{name}.pool"

    def check_name(self) -> None:
        """See that the path is one that everything in the system takes.

        Spaces and letters of all languages are.

        Raises:
            HomeUnusable: it is too long, or has a character that a list of paths, a URL or a log
                could not carry.
        """
        size_bytes = len(os.fsencode(self.root))
        if size_bytes > MAX_HOME_BYTES:
            raise HomeUnusable(
                f"the state folder's path is {size_bytes} bytes long, and at most {MAX_HOME_BYTES} will do: {str(self.root)[:40]!r}…"
            )
        longest = max(len(os.fsencode(part)) for part in self.root.parts)
        if longest > MAX_NAME_BYTES:
            raise HomeUnusable(
                f"the state folder's path has a name of {longest} bytes in it, and file systems take {MAX_NAME_BYTES}"
            )
        wrong = sorted({one for one in str(self.root) if one == "," or not one.isprintable()})
        if wrong:
            named = ", ".join(repr(one) for one in wrong)
            raise HomeUnusable(
                f"the state folder's path {str(self.root)!a} has {named} in it, which will not do"
            )

    def _failed(self, error: OSError) -> PilotlightError:
        told = folder_error(self.root, "state folder", "PILOTLIGHT_HOME", error)
        return told if isinstance(told, DiskFull) else HomeUnusable(told.message)

    def prepare(self) -> None:
        """Make folders, keys and secrets that are missing; those that exist stay as they are.

        Raises:
            HomeUnusable: a folder or file cannot be made.
            DiskFull: there is no room for them.
        """
        self.check_name()
        try:
            for folder in (
                self.root,
                self.secrets,
                self.logs,
                self.models,
                self.objects,
                self.state,
                self.run_dir,
            ):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self.run_dir.is_relative_to(self.root):
                _check_own(self.run_dir)
            # PostgreSQL runs as another user when we are root, and must be able to pass through to
            # its own folder.
            if os.getuid() == 0:
                self.root.chmod(0o711)
            write_once(self.root / MARKER, MARKER_TEXT)
            write_once(self.admin_key, f"pl-admin-{secrets.token_urlsafe(32)}")
            write_once(self.api_key, f"pl-api-{secrets.token_urlsafe(32)}")
            names = [f"nats-{user}" for user in NATS_USERS] + [
                f"postgres-{service}" for service in OWNERS
            ]
            for name in (*names, "postgres-owner", "cluster-key", "key-pepper"):
                write_once(self.secrets / name, secrets.token_urlsafe(32))
            for service, own in SECRETS_OF.items():
                folder = self.secrets_of(service)
                folder.mkdir(exist_ok=True, mode=0o700)
                for name in (*own, *BROUGHT_TO.get(service, ())):
                    # A link, so that a secret that is replaced, or brought later, is so for all
                    # services.
                    with contextlib.suppress(FileExistsError):
                        (folder / name).symlink_to(Path("..") / name)
        except OSError as error:
            raise self._failed(error) from error

    def secret(self, name: str) -> str:
        """A secret that ``prepare`` made."""
        return (self.secrets / name).read_text().strip()

    def nats_passwords(self) -> dict[str, str]:
        """The password of each NATS user."""
        return {user: self.secret(f"nats-{user}") for user in NATS_USERS}

    def lock(self) -> IO[str]:
        """Claim the folder, made where it is missing, for this process; the claim ends with it.

        Raises:
            HomeInUse: another process runs a system on it, or restores one.
            HomeUnusable: the folder or the lock's file cannot be made.
            DiskFull: there is no room for it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = (self.root / "up.lock").open("a+")
        except OSError as error:
            raise self._failed(error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.close()
            running = self.running()
            who = f"process {running.pid} at {running.url}" if running else "another process"
            raise HomeInUse(f"{self.root} is in use by {who}") from error
        return handle

    def running(self) -> RunningSystem | None:
        """The system that runs on this folder, as it announced itself; None when its process is
        gone.
        """
        try:
            announced = msgspec.json.decode(
                (self.root / "up.json").read_bytes(), type=RunningSystem
            )
        except (OSError, msgspec.DecodeError):
            return None
        return announced if _started_ticks(announced.pid) == announced.started_ticks else None

    def announce(self, url: str) -> None:
        """Say that this process serves the folder."""
        started_ticks = _started_ticks(os.getpid())
        if started_ticks is None:
            raise HomeUnusable("/proc does not show this process")
        running = RunningSystem(pid=os.getpid(), started_ticks=started_ticks, url=url)
        unfinished = self.root / "up.json.new"
        try:
            unfinished.write_bytes(msgspec.json.encode(running))
            unfinished.rename(self.root / "up.json")
        except OSError as error:
            raise self._failed(error) from error

    def tidy(self) -> None:
        """Remove the run folder where it lies outside the state folder; files of others in it keep
        it.
        """
        if not self.run_dir.is_relative_to(self.root):
            with contextlib.suppress(OSError):
                for left in self.run_dir.glob("*.sock"):
                    left.unlink()
                self.run_dir.rmdir()

    def withdraw(self) -> None:
        """Take the announcement back."""
        (self.root / "up.json").unlink(missing_ok=True)


def _check_own(folder: Path) -> None:
    """Where all users can make folders, another user may have made this one before us: it is not
    for our sockets.
    """
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise HomeUnusable(f"{folder} belongs to somebody else; remove it")
    folder.chmod(0o700)


def _started_ticks(pid: int) -> int | None:
    """When a process began; None when there is none, or it has ended and waits to be reaped."""
    try:
        # The name of the program, in brackets, may hold anything, also brackets and spaces.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
