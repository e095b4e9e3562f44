"""Where a checkpoint's bytes come from. A folder today; an object store and a hub fit the same protocol.

Reads are synchronous: whoever has an event loop calls them in a thread.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from blake3 import blake3

from pilotlight.checkpoint.errors import BadCheckpoint, SourceChanged, SourceUnavailable

MAX_FILES = 10_000
"""Most files that a source may list."""


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint, pinned: whoever reads it later checks that it still is this version."""

    name: str
    size_bytes: int
    version: str
    """Changes whenever the content may have changed: a folder's mtime, an S3 ETag, a hub's SHA-256."""


class Source(Protocol):
    """A flat set of files. Every method may raise ``SourceUnavailable``."""

    def list_files(self) -> tuple[SourceFile, ...]:
        """All files, by name, without folders below."""
        ...

    def read(self, file: SourceFile, offset: int, size_bytes: int) -> bytes:
        """Exactly [offset, offset + size_bytes) of a listed file, which must lie within it.

        Raises:
            SourceChanged: the file is gone or is another version than the one that was listed.
        """
        ...


class FolderSource:
    """A folder of this machine.

    Links are followed, because a hub cache is made of them. Which folders may be registered is for the caller to decide.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def list_files(self) -> tuple[SourceFile, ...]:
        found: list[SourceFile] = []
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    # A name that cannot be printed cannot be written into a manifest either, and no checkpoint has one.
                    if not entry.is_file() or not entry.name.isprintable():
                        continue
                    if len(found) == MAX_FILES:
                        raise BadCheckpoint(f"the folder holds more than {MAX_FILES} files")
                    found.append(_pin(entry.name, entry.stat()))
        except OSError as error:
            raise SourceUnavailable(f"cannot list {self._root}: {error.strerror}") from error
        return tuple(sorted(found, key=lambda file: file.name))

    def read(self, file: SourceFile, offset: int, size_bytes: int) -> bytes:
        _check_range(file, offset, size_bytes)
        try:
            # Where a file was there may be a pipe now, whose opening would wait for a writer.
            descriptor = os.open(self._root / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise SourceChanged("the file is gone", file=file.name) from error
        except OSError as error:
            raise SourceUnavailable(f"cannot be opened: {error.strerror}", file=file.name) from error
        try:
            if _pin(file.name, os.fstat(descriptor)) != file:
                raise SourceChanged("the file has changed since it was listed", file=file.name)
            return _read_exactly(descriptor, file, offset, size_bytes)
        except OSError as error:
            raise SourceUnavailable(f"cannot be read: {error.strerror}", file=file.name) from error
        finally:
            os.close(descriptor)


class MemorySource:
    """Files in memory, for tests and for content that is already there. A version is the content's digest."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def list_files(self) -> tuple[SourceFile, ...]:
        return tuple(_pin_bytes(name, self._files[name]) for name in sorted(self._files))

    def read(self, file: SourceFile, offset: int, size_bytes: int) -> bytes:
        _check_range(file, offset, size_bytes)
        data = self._files.get(file.name)
        if data is None:
            raise SourceChanged("the file is gone", file=file.name)
        if _pin_bytes(file.name, data) != file:
            raise SourceChanged("the file has changed since it was listed", file=file.name)
        return data[offset : offset + size_bytes]


def read_small(source: Source, file: SourceFile, limit_bytes: int) -> bytes:
    """A whole file that is meant to be small.

    Raises:
        BadCheckpoint: the file is larger than ``limit_bytes``.
        SourceUnavailable, SourceChanged: it cannot be read, or is another version.
    """
    if file.size_bytes > limit_bytes:
        raise BadCheckpoint(f"{file.size_bytes} bytes; at most {limit_bytes} are read", file=file.name)
    return source.read(file, 0, file.size_bytes)


def source_version(files: Iterable[SourceFile]) -> str:
    """The pinned version of a set of files: BLAKE3, in hex, over their names, sizes and versions."""
    listed = sorted((file.name, file.size_bytes, file.version) for file in files)
    return blake3(msgspec.json.encode(listed)).hexdigest()


def _pin(name: str, stat: os.stat_result) -> SourceFile:
    return SourceFile(name=name, size_bytes=stat.st_size, version=f"mtime-ns-{stat.st_mtime_ns}")


def _pin_bytes(name: str, data: bytes) -> SourceFile:
    return SourceFile(name=name, size_bytes=len(data), version=f"blake3-{blake3(data).hexdigest()}")


def _check_range(file: SourceFile, offset: int, size_bytes: int) -> None:
    if offset < 0 or size_bytes < 0 or offset + size_bytes > file.size_bytes:
        raise ValueError(f"[{offset}, {offset + size_bytes}) is not within the {file.size_bytes} bytes of {file.name}")


def _read_exactly(descriptor: int, file: SourceFile, offset: int, size_bytes: int) -> bytes:
    pieces: list[bytes] = []
    # One pread returns at most 2 GiB, and a network file system may return less than was asked for.
    while size_bytes > 0:
        piece = os.pread(descriptor, size_bytes, offset)
        if not piece:
            raise SourceChanged("the file has become shorter while it was read", file=file.name)
        pieces.append(piece)
        offset += len(piece)
        size_bytes -= len(piece)
    return b"".join(pieces)
