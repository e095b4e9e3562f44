"""The state folder of an embedded system: where everything lies, who may read it, and who runs it at the moment."""

import fcntl
import hashlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from pilotlight.common.db.tables import OWNERS
from pilotlight.common.errors import Conflict, PilotlightError
from pilotlight.common.natsconf import ADMIN, RIGHTS

NATS_USERS = (*RIGHTS, ADMIN)
MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux; the longest name that we put into the run folder takes 40 of them."""


class HomeUnusable(PilotlightError):
    """The state folder cannot be used."""

    code = "home_unusable"
    status = 500
    action = "Set PILOTLIGHT_HOME to a folder that you may write to."


class RunningSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What ``up.json`` says of the system that uses the folder."""

    pid: int
    url: str
    run_dir: str


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
        """Folder for Unix sockets: below the home where their paths fit, else in the temporary folder under a name of its own."""
        inside = self.root / "run"
        if len(os.fsencode(inside)) + 40 <= MAX_SOCKET_PATH_BYTES:
            return inside
        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"pilotlight-{os.getuid()}-{name}"

    def prepare(self) -> None:
        """Make folders, keys and secrets that are missing; those that exist stay as they are.

        Raises:
            HomeUnusable: a folder or file cannot be made.
        """
        try:
            for folder in (self.root, self.secrets, self.logs, self.models, self.objects, self.state, self.run_dir):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # PostgreSQL runs as another user when we are root, and must be able to pass through to its own folder.
            if os.getuid() == 0:
                self.root.chmod(0o711)
            _write_once(self.admin_key, f"pl-admin-{secrets.token_urlsafe(32)}")
            _write_once(self.api_key, f"pl-api-{secrets.token_urlsafe(32)}")
            names = [f"nats-{user}" for user in NATS_USERS] + [f"postgres-{service}" for service in OWNERS]
            for name in (*names, "postgres-owner", "cluster-key", "key-pepper"):
                _write_once(self.secrets / name, secrets.token_urlsafe(32))
        except OSError as error:
            raise HomeUnusable(f"cannot write to the state folder {self.root}: {error.strerror or error}") from error

    def secret(self, name: str) -> str:
        """A secret that ``prepare`` made."""
        return (self.secrets / name).read_text().strip()

    def nats_passwords(self) -> dict[str, str]:
        """The password of each NATS user."""
        return {user: self.secret(f"nats-{user}") for user in NATS_USERS}

    def lock(self) -> IO[str]:
        """Claim the folder for this process; the claim ends with it.

        Raises:
            Conflict: another process runs a system on it.
        """
        handle = (self.root / "up.lock").open("a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.close()
            running = self.running()
            who = f"process {running.pid} at {running.url}" if running else "another process"
            raise Conflict(
                f"{self.root} is in use by {who}; stop it with `pilotlight down` or choose another PILOTLIGHT_HOME"
            ) from error
        return handle

    def running(self) -> RunningSystem | None:
        """The system that runs on this folder, as it announced itself; None when its process is gone."""
        try:
            announced = msgspec.json.decode((self.root / "up.json").read_bytes(), type=RunningSystem)
            os.kill(announced.pid, 0)
        except (OSError, msgspec.DecodeError):
            return None
        return announced

    def announce(self, url: str) -> None:
        """Say that this process serves the folder."""
        running = RunningSystem(pid=os.getpid(), url=url, run_dir=str(self.run_dir))
        (self.root / "up.json").write_bytes(msgspec.json.encode(running))

    def withdraw(self) -> None:
        """Take the announcement back."""
        (self.root / "up.json").unlink(missing_ok=True)


def _write_once(path: Path, content: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as handle:
        handle.write(content + "\n")
