"""``pilotlight backup`` and ``pilotlight restore``: what an embedded system cannot make again, in
one file, and back.

The file (``backup_archive``) holds a dump of the database, the object store, secrets, keys and the
node's id.
Logs and sockets are not in it, nor is what NATS holds: buckets are written anew by their owners,
events are notifications. Checkpoints are not in it either: they stay where models were registered
from.
"""

import asyncio
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import structlog
from sqlalchemy.engine import make_url

from pilotlight.cli.backup_archive import (
    DUMP,
    FILES,
    FOLDERS,
    unpack_archive,
    write_archive,
)
from pilotlight.cli.binaries import postgres_binary
from pilotlight.cli.embedded import OWNER, PostgresServer
from pilotlight.cli.home import Home, HomeUnusable
from pilotlight.cli.output import console, emit_json
from pilotlight.cli.output import errors as told
from pilotlight.cli.purge import remove_new
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.errors import DeadlineExceeded, PilotlightError
from pilotlight.common.waiting import within

log = structlog.get_logger()

STATE = ("postgres", "nats", "secrets", "objects", "state", "admin.key", "api.key")
"""Where one of these is there is a system already."""
DEADLINE_S = 3600.0
"""For the database: a large one takes minutes."""


class BackupFailed(PilotlightError):
    """The backup could not be made, or not be read back."""

    code = "backup_failed"
    action = "The message names what failed; the state folder is as it was."


class HomeNotEmpty(PilotlightError):
    """There is state already where a backup is to be restored."""

    code = "home_not_empty"
    status = 409
    action = (
        "Choose an empty PILOTLIGHT_HOME, or remove what is there with `pilotlight down --purge`."
    )


async def back_up(home: Home, file: Path, *, as_json: bool) -> int:
    """Write a backup of a system that runs or is stopped.

    Raises:
        BackupFailed: the database is not the embedded one, the file exists, or something cannot be
            read or written.
        HomeInUse: a system is just being started.
    """
    file = _target(home, file)
    try:
        postgres = _server(home)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".pilotlight-backup-") as folder:
            dump = Path(folder) / DUMP
            if home.running() is not None:
                revision = await _dump(postgres, home, dump)
            else:
                with home.lock():
                    await postgres.start()
                    try:
                        revision = await _dump(postgres, home, dump)
                    finally:
                        await postgres.stop()
            # After the dump: objects are written before the rows that name them, so every row's
            # object is there.
            archive = Path(folder) / "backup.tar"
            manifest = await asyncio.to_thread(write_archive, home, dump, revision, archive)
            archive.rename(file)
    except OSError as error:
        raise BackupFailed(f"the backup {file} cannot be written: {error}") from error
    size_bytes = sum(entry.size_bytes for entry in manifest.files.values())
    if manifest.object_store:
        message = f"The objects are not in it, for they are in {manifest.object_store}: copy that too, now, with its server's tools."
        told.print(message, markup=False, soft_wrap=True)
    if as_json:
        made = {
            "file": str(file),
            "bytes": size_bytes,
            "files": len(manifest.files),
            "made_at": manifest.made_at,
        }
        emit_json({**made, "object_store": manifest.object_store})
    else:
        console.print(
            f"wrote {file}: {len(manifest.files)} files, {size_bytes:,} bytes",
            markup=False,
            soft_wrap=True,
        )
        console.print("It holds keys and secrets: keep it where nobody else can read it.")
    return 0


async def restore(home: Home, file: Path, *, as_json: bool) -> int:
    """Make a state folder from a backup; the next ``pilotlight up`` runs on it.

    Raises:
        BackupInvalid: the file is cut off, changed, no backup, or of a newer release.
        HomeNotEmpty: there is state already.
        HomeInUse: a system is being started there, or restored.
        BackupFailed: the database could not be read back, or a file not be written. What was made
            has been removed.
        HomeUnusable: the folder cannot be written to.
    """
    _check_empty(home)
    with home.lock():
        # Again: the process that had the lock a moment ago may have made a system.
        before = _check_empty(home)
        try:
            with tempfile.TemporaryDirectory(dir=home.root, prefix=".restoring-") as folder:
                manifest = await asyncio.to_thread(unpack_archive, file, Path(folder))
                await _place(home, Path(folder), before)
        except OSError as error:
            raise BackupFailed(f"{file} cannot be restored into {home.root}: {error}") from error
    if manifest.object_store:
        message = f"Its objects were not in the backup, but in {manifest.object_store}: start it with PILOTLIGHT_OBJECT_STORE_URL set."
        told.print(message, markup=False, soft_wrap=True)
    if as_json:
        emit_json(
            {
                "restored": True,
                "home": str(home.root),
                "made_at": manifest.made_at,
                "release": manifest.release,
            }
        )
    else:
        console.print(
            f"restored the state of {manifest.made_at} into {home.root}; start it with `pilotlight up`",
            markup=False,
            soft_wrap=True,
        )
    return 0


def _check_empty(home: Home) -> Collection[str]:
    """See that there is no system; the names of what else is there."""
    try:
        before = {path.name for path in home.root.iterdir()} if home.root.is_dir() else set[str]()
    except OSError as error:
        raise HomeUnusable(
            f"cannot read the state folder {home.root}: {error.strerror or error}"
        ) from error
    taken = [name for name in STATE if name in before]
    if taken:
        raise HomeNotEmpty(f"{home.root} has {', '.join(taken)} already")
    return before


async def _place(home: Home, staged: Path, before: Collection[str]) -> None:
    """Move what was unpacked to its place, and fill the database; when that fails the folder is as
    it was ``before``.
    """
    try:
        for name in (*FOLDERS, *FILES):
            if (staged / name).exists():
                (home.root / name).parent.mkdir(exist_ok=True, mode=0o700)
                (staged / name).rename(home.root / name)
        home.prepare()
        await _fill_database(home, staged / DUMP)
    except BaseException:
        remove_new(home, before)
        raise


def _target(home: Home, file: Path) -> Path:
    if os.environ.get("PILOTLIGHT_DATABASE_URL"):
        raise BackupFailed(
            "PILOTLIGHT_DATABASE_URL is set: that database is yours to back up, with pg_dump, as docs/operations/run.md says. "
            f"If the system in {home.root} runs on its own database, unset it"
        )
    if not (home.root / "postgres" / "data" / "PG_VERSION").is_file():
        raise BackupFailed(
            f"{home.root} has no database of its own. Where the system runs on yours, back it up with pg_dump: "
            "docs/operations/run.md says how"
        )
    if file.exists():
        raise BackupFailed(f"{file} exists already")
    if not file.absolute().parent.is_dir():
        raise BackupFailed(f"there is no folder {file.absolute().parent}: make it first")
    return file.absolute()


def _server(home: Home) -> PostgresServer:
    return PostgresServer(
        home.root / "postgres", home.secret("postgres-owner"), log_file=home.logs / "postgres.log"
    )


async def _dump(postgres: PostgresServer, home: Home, target: Path) -> str:
    """Dump the database at one moment; the revision of its schema."""
    await _run(
        postgres,
        home,
        "pg_dump",
        "--format=custom",
        "--no-owner",
        "--no-privileges",
        f"--file={target}",
    )
    revision = await _run(
        postgres, home, "psql", "-XAtc", "SELECT version_num FROM public.alembic_version"
    )
    return revision.strip()


async def _fill_database(home: Home, dump: Path) -> None:
    postgres = _server(home)
    await postgres.start()
    try:
        await _run(
            postgres,
            home,
            "pg_restore",
            "--exit-on-error",
            "--single-transaction",
            "--no-owner",
            "--no-privileges",
            str(dump),
        )
        # Roles with their passwords, grants, and what this release has beyond the one that made the
        # backup.
        settings = MigrateSettings(database_url=postgres.owner_url, secrets_dir=home.secrets)
        await asyncio.to_thread(migrate, settings)
    finally:
        await postgres.stop()


async def _run(postgres: PostgresServer, home: Home, program: str, *arguments: str) -> str:
    """Run a program of PostgreSQL on the database; what it prints."""
    url = make_url(postgres.owner_url)
    # The operator's own PG* variables are for other databases.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    environment |= {
        "PGHOST": str(url.query["host"]),
        "PGPORT": str(url.query["port"]),
        "PGDATABASE": str(url.database),
    }
    environment |= {"PGUSER": OWNER, "PGPASSWORD": home.secret("postgres-owner"), "LC_ALL": "C"}
    database = () if program != "pg_restore" else (f"--dbname={url.database}",)
    process = await asyncio.create_subprocess_exec(
        str(postgres_binary(program)),
        *database,
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await within(DEADLINE_S, process.communicate(), program)
    except DeadlineExceeded as error:
        raise BackupFailed(error.message) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise BackupFailed(f"{program} failed: {errors.decode(errors='replace').strip()[-500:]}")
    return output.decode()
