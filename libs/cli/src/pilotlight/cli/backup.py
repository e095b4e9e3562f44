"""``pilotlight backup`` and ``pilotlight restore``: what an embedded system cannot make again, in
one file, and back.

The file is a tar archive: a dump of the database, the object store, secrets, keys, the node's id,
and last a list of all of it with digests, by which a file that was cut off or changed is known.
Logs and sockets are not in it, nor is what NATS holds: buckets are written anew by their owners,
events are notifications. Checkpoints are not in it either: they stay where models were registered
from.
"""

import asyncio
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, cast

import msgspec
import structlog
from sqlalchemy.engine import make_url

from pilotlight.cli.binaries import postgres_binary
from pilotlight.cli.embedded import OWNER, PostgresServer
from pilotlight.cli.home import Home, HomeUnusable
from pilotlight.cli.output import console, emit_json
from pilotlight.cli.output import errors as told
from pilotlight.cli.purge import remove_new
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.migrate import MigrateSettings, known_revisions, migrate
from pilotlight.common.errors import DeadlineExceeded, PilotlightError
from pilotlight.common.fitness import FULL
from pilotlight.common.waiting import within

log = structlog.get_logger()

FORMAT = 1
MANIFEST = "manifest.json"
DUMP = "database.dump"
OBJECTS = "objects"
FOLDERS = (OBJECTS, "secrets")
FILES = ("admin.key", "api.key", "state/node-id", "state/highest-epoch")
STATE = ("postgres", "nats", "secrets", "objects", "state", "admin.key", "api.key")
"""Where one of these is there is a system already."""
DEADLINE_S = 3600.0
"""For the database: a large one takes minutes."""
COPY_BYTES = 1 << 20


class BackupFailed(PilotlightError):
    """The backup could not be made, or not be read back."""

    code = "backup_failed"
    action = "The message names what failed; the state folder is as it was."


class BackupInvalid(PilotlightError):
    """The file is not a whole backup."""

    code = "backup_invalid"
    status = 422
    action = "Take another copy of the backup; this file was cut off or changed, or is no backup of Pilotlight."


class HomeNotEmpty(PilotlightError):
    """There is state already where a backup is to be restored."""

    code = "home_not_empty"
    status = 409
    action = (
        "Choose an empty PILOTLIGHT_HOME, or remove what is there with `pilotlight down --purge`."
    )


class Entry(msgspec.Struct, frozen=True):
    """One file of a backup."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds."""

    format: int
    release: str
    made_at: str
    schema_revision: str
    object_store: str = ""
    """Where the objects are, when they are not in the backup."""
    files: dict[str, Entry]


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
            manifest = await asyncio.to_thread(_write, home, dump, revision, archive)
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
                manifest = await asyncio.to_thread(_read, file, Path(folder))
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


def _write(home: Home, dump: Path, revision: str, archive: Path) -> Manifest:
    entries: dict[str, Entry] = {}
    with os.fdopen(os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, path in _sources(home, dump):
                try:
                    entries[name] = _add(tar, name, path)
                except FileNotFoundError:
                    # An object that nothing needs any more may go at any moment.
                    if not name.startswith(f"{OBJECTS}/"):
                        raise
            manifest = Manifest(
                format=FORMAT,
                release=version("pilotlight-cli"),
                made_at=SystemClock().wall().isoformat(timespec="seconds"),
                schema_revision=revision,
                object_store=_own_store(home),
                files=entries,
            )
            described = archive.with_name(MANIFEST)
            described.write_bytes(msgspec.json.encode(manifest))
            _add(tar, MANIFEST, described)
        sink.flush()
        os.fsync(sink.fileno())
    return manifest


def _sources(home: Home, dump: Path) -> Iterator[tuple[str, Path]]:
    yield DUMP, dump
    for name in FILES:
        if (home.root / name).is_file():
            yield name, home.root / name
    for folder in FOLDERS:
        for path in sorted((home.root / folder).rglob("*")):
            # Links (each service's own view of its secrets) are made anew.
            if path.is_file() and not path.is_symlink() and not _unfinished(folder, path.name):
                yield path.relative_to(home.root).as_posix(), path


def _unfinished(folder: str, name: str) -> bool:
    """Whether a file is still being written: beside its place, an object as ``key#1``, a secret
    with a dot before its name.
    """
    return "#" in name if folder == OBJECTS else name.startswith(".")


def _own_store(home: Home) -> str:
    """The operator's own object store; empty when it is the folder in the home."""
    url = os.environ.get("PILOTLIGHT_OBJECT_STORE_URL", "")
    return "" if url == home.objects.as_uri() else url


def _add(tar: tarfile.TarFile, name: str, path: Path) -> Entry:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        size_bytes = os.fstat(source.fileno()).st_size
        info = tarfile.TarInfo(name)
        info.size, info.mode = size_bytes, 0o600
        tar.addfile(info, cast("IO[bytes]", _Told(source, digest.update)))
    return Entry(size_bytes=size_bytes, sha256=digest.hexdigest())


class _Told:
    """A file that tells what is read from it."""

    def __init__(self, source: IO[bytes], tell: Callable[[bytes], None]) -> None:
        self._source = source
        self._tell = tell

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._tell(data)
        return data


def _read(file: Path, folder: Path) -> Manifest:
    """Unpack a backup into a folder, checked.

    Raises:
        BackupInvalid: it is not a whole one, or cannot be read.
        OSError: there is no room for it.
    """
    found: dict[str, Entry] = {}
    manifest: Manifest | None = None
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                source = tar.extractfile(member)
                if source is None or not _expected(member.name):
                    raise BackupInvalid(f"{file} holds {member.name[:200]!r}, which no backup does")
                if member.name == MANIFEST:
                    manifest = msgspec.json.decode(source.read(), type=Manifest)
                else:
                    found[member.name] = _extract(source, folder / member.name)
    except (OSError, EOFError, tarfile.TarError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        raise BackupInvalid(f"{file} cannot be read: {error}") from error
    if manifest is None:
        raise BackupInvalid(f"{file} has no list of its files at its end: it was cut off")
    _compare(file, manifest, found)
    return manifest


def _compare(file: Path, manifest: Manifest, found: Mapping[str, Entry]) -> None:
    if manifest.format != FORMAT:
        raise BackupInvalid(f"{file} has format {manifest.format}, and this release reads {FORMAT}")
    for name in sorted(manifest.files.keys() | found.keys()):
        if manifest.files.get(name) != found.get(name):
            raise BackupInvalid(f"{file}: {name} is not what was backed up")
    if DUMP not in found:
        raise BackupInvalid(f"{file} has no database in it")
    if manifest.schema_revision not in known_revisions(MigrateSettings().migrations_dir):
        raise BackupInvalid(
            f"{file} was made by release {manifest.release}, which is newer than this one: restore it with that release"
        )


def _expected(name: str) -> bool:
    parts = Path(name).parts
    if name in (DUMP, MANIFEST, *FILES):
        return True
    return (
        len(parts) > 1
        and parts[0] in FOLDERS
        and ".." not in parts
        and not Path(name).is_absolute()
    )


def _extract(source: IO[bytes], target: Path) -> Entry:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest, size_bytes = hashlib.sha256(), 0
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        while data := source.read(COPY_BYTES):
            digest.update(data)
            size_bytes += len(data)
            sink.write(data)
    return Entry(size_bytes=size_bytes, sha256=digest.hexdigest())
