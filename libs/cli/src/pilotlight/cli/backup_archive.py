"""The file of a backup: a tar archive, and last in it a list of all of it with digests, by which a
file that was cut off or changed is known.
"""

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, cast

import msgspec

from pilotlight.cli.home import Home
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.migrate import MigrateSettings, known_revisions
from pilotlight.common.errors import PilotlightError
from pilotlight.common.fitness import FULL

FORMAT = 1
MANIFEST = "manifest.json"
DUMP = "database.dump"
OBJECTS = "objects"
FOLDERS = (OBJECTS, "secrets")
FILES = ("admin.key", "api.key", "state/node-id", "state/highest-epoch")
COPY_BYTES = 1 << 20


class BackupInvalid(PilotlightError):
    """The file is not a whole backup."""

    code = "backup_invalid"
    status = 422
    action = "Take another copy of the backup; this file was cut off or changed, or is no backup of Pilotlight."


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


def write_archive(home: Home, dump: Path, revision: str, archive: Path) -> Manifest:
    """Make the archive of a home and of its database's dump; what it holds.

    Args:
        home: The installation's.
        dump: The file that the dump is in.
        revision: Of the database's schema.
        archive: The file to make; it must not exist.

    Raises:
        OSError: something cannot be read or written.
    """
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


def unpack_archive(file: Path, folder: Path) -> Manifest:
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
