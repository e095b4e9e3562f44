"""Where a checkpoint's bytes come from: one protocol.

Folders and memory are here; buckets and hubs need a network, so they lie above.

Reads are synchronous: a caller with an event loop makes them in threads, several at a time.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
from blake3 import blake3

from pilotlight.checkpoint.bulk import PIECE_BYTES, pieces_of
from pilotlight.checkpoint.errors import (
    BadCheckpoint,
    SourceChanged,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
    UriNotAllowed,
)
from pilotlight.checkpoint.folders import stats_below

MAX_FILES = 10_000
"""Most files that a source may list."""
MAX_BUFFERS = 1024
"""Buffers of one ``preadv``: what Linux takes."""

Progress = Callable[[int], None]
"""Told of bytes as they arrive. May raise, which ends the read: its caller has gone."""


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint, pinned: a later read checks that it still is this version."""

    name: str
    size_bytes: int
    version: str
    """Changes whenever the content may have changed: a folder's mtime, an S3 ETag, a hub's SHA-256.
    """


def unobserved(_: int) -> None:
    """Progress that is not followed."""


def unhurried() -> None:
    """The check of a read that is never ended early: see ``Source.pieces``."""


class Source(Protocol):
    """A flat set of files. Every method may raise ``SourceUnavailable``, or what is below it."""

    def list_files(self) -> tuple[SourceFile, ...]:
        """All files, by name; of folders below, ``FILES_BELOW`` alone."""
        ...

    def read(self, file: SourceFile, offset: int, size_bytes: int) -> bytes:
        """Exactly [offset, offset + size_bytes) of a listed file, which must lie within it.

        Raises:
            SourceChanged: the file is gone or is another version than the one that was listed.
        """
        ...

    def read_into(
        self,
        file: SourceFile,
        offset: int,
        buffers: Sequence[memoryview],
        progress: Progress = unobserved,
    ) -> None:
        """Fill buffers, one after the other, with what a listed file holds from ``offset`` on.

        Args:
            file: As it was listed.
            offset: Its first byte that is wanted.
            buffers: Filled to their ends, in order.
            progress: Called with the number of bytes that have come.

        Raises:
            SourceChanged: as ``read``; what the buffers hold then is of no use.
        """
        ...

    def pieces(
        self, file: SourceFile, offset: int, size_bytes: int, check: Callable[[], None] = unhurried
    ) -> Generator[memoryview]:
        """Exactly [offset, offset + size_bytes) of a listed file, as it comes.

        A piece is good until the next one is asked for.

        Args:
            file: As it was listed.
            offset: Its first byte that is wanted.
            size_bytes: How many are wanted.
            check: Called where the next piece is waited for; it may raise, which ends the read.

        Raises:
            SourceChanged: as ``read``; pieces that came before are of the version that was listed.
        """
        ...

    def close(self) -> None:
        """Let go of connections. Nothing is being read any more."""
        ...


class BufferedSource(ABC):
    """What all sources share: ``read`` in terms of ``read_into``."""

    @abstractmethod
    def list_files(self) -> tuple[SourceFile, ...]:
        """As ``Source.list_files``."""

    @abstractmethod
    def read_into(
        self,
        file: SourceFile,
        offset: int,
        buffers: Sequence[memoryview],
        progress: Progress = unobserved,
    ) -> None:
        """As ``Source.read_into``."""

    def pieces(
        self, file: SourceFile, offset: int, size_bytes: int, check: Callable[[], None] = unhurried
    ) -> Generator[memoryview]:
        """As ``Source.pieces``."""
        check_range(file, offset, size_bytes)
        buffer = memoryview(bytearray(min(size_bytes, PIECE_BYTES)))
        for start in range(offset, offset + size_bytes, PIECE_BYTES):
            check()
            piece = buffer[: min(PIECE_BYTES, offset + size_bytes - start)]
            self.read_into(file, start, [piece])
            yield piece

    def read(self, file: SourceFile, offset: int, size_bytes: int) -> bytes:
        """As ``Source.read``."""
        check_range(file, offset, size_bytes)
        data = bytearray(size_bytes)
        self.read_into(file, offset, [memoryview(data)])
        return bytes(data)

    def close(self) -> None:  # noqa: B027 - most sources keep nothing open
        """As ``Source.close``."""


class FolderSource(BufferedSource):
    """A folder of this machine.

    Links are followed, because a hub cache is made of them: to where ``allowed`` says of the file's
    real path that it may be read.
    """

    def __init__(self, root: Path, allowed: Callable[[Path], bool] | None = None) -> None:
        self._root = root
        self._allowed = allowed

    def list_files(self) -> tuple[SourceFile, ...]:
        found: list[SourceFile] = []
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    # A name that cannot be printed cannot be written into a manifest either, and no
                    # checkpoint has one.
                    if not entry.is_file() or not entry.name.isprintable():
                        continue
                    if len(found) == MAX_FILES:
                        raise BadCheckpoint(f"the folder holds more than {MAX_FILES} files")
                    found.append(_pin(entry.name, entry.stat()))
            found.extend(_pin(name, stat) for name, stat in stats_below(self._root))
        except OSError as error:
            raise _unreadable(error, f"cannot list {self._root}") from error
        return tuple(sorted(found, key=lambda file: file.name))

    def read_into(
        self,
        file: SourceFile,
        offset: int,
        buffers: Sequence[memoryview],
        progress: Progress = unobserved,
    ) -> None:
        check_range(file, offset, sum(map(len, buffers)))
        with self._opened(file) as descriptor:
            _fill(descriptor, file, offset, buffers, progress)
            self.check_still(file)

    def pieces(
        self, file: SourceFile, offset: int, size_bytes: int, check: Callable[[], None] = unhurried
    ) -> Generator[memoryview]:
        """As ``Source.pieces``."""
        check_range(file, offset, size_bytes)
        left_bytes = size_bytes
        check()
        with (
            self._opened(file) as descriptor,
            closing(pieces_of(descriptor, offset, offset + size_bytes)) as pieces,
        ):
            for piece in pieces:
                self.check_still(file)
                left_bytes -= len(piece)
                yield piece
                check()
        if left_bytes:
            raise SourceChanged("the file has become shorter while it was read", file=file.name)

    def open(self, file: SourceFile) -> int:
        """A descriptor of the version that was listed, for a reader of its own to close. Raises
        what ``pieces`` raises.
        """
        with _named_errors(file, "cannot be opened"):
            # Where a file was there may be a pipe now, whose opening would wait for a writer.
            descriptor = os.open(self._path_of(file), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with _named_errors(file):
                self._check_place(descriptor, file)
                _check_version(os.fstat(descriptor), file)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def _opened(self, file: SourceFile) -> Generator[int]:
        descriptor = self.open(file)
        try:
            with _named_errors(file):
                yield descriptor
        finally:
            os.close(descriptor)

    def _path_of(self, file: SourceFile) -> str:
        """As text: each chunk of a model asks."""
        return f"{self._root}/{file.name}"

    def check_still(self, file: SourceFile) -> None:
        """After reading: a file that was written to meanwhile has another time of modification now,
        and one that was replaced is gone. Raises what ``open`` raises.
        """
        with _named_errors(file):
            _check_version(os.stat(self._path_of(file)), file)

    def _check_place(self, descriptor: int, file: SourceFile) -> None:
        """Of the open file, not of its name: a link may lead elsewhere a moment later."""
        if self._allowed is not None:
            place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not self._allowed(place):
                raise UriNotAllowed(
                    f"is a link to {place}, which is not below an allowed root", file=file.name
                )


class MemorySource(BufferedSource):
    """Files in memory, for tests and for content that is already there.

    A version is the content's digest.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def list_files(self) -> tuple[SourceFile, ...]:
        return tuple(_pin_bytes(name, self._files[name]) for name in sorted(self._files))

    def read_into(
        self,
        file: SourceFile,
        offset: int,
        buffers: Sequence[memoryview],
        progress: Progress = unobserved,
    ) -> None:
        check_range(file, offset, sum(map(len, buffers)))
        data = self._files.get(file.name)
        if data is None:
            raise SourceChanged("the file is gone", file=file.name)
        if _pin_bytes(file.name, data) != file:
            raise SourceChanged("the file has changed since it was listed", file=file.name)
        for buffer in buffers:
            buffer[:] = data[offset : offset + len(buffer)]
            offset += len(buffer)
            progress(len(buffer))


def read_small(source: Source, file: SourceFile, limit_bytes: int) -> bytes:
    """A whole file that is meant to be small.

    Raises:
        BadCheckpoint: the file is larger than ``limit_bytes``, or a git-lfs pointer.
        SourceUnavailable, SourceChanged: it cannot be read, or is another version.
    """
    if file.size_bytes > limit_bytes:
        raise BadCheckpoint(
            f"{file.size_bytes} bytes; at most {limit_bytes} are read", file=file.name
        )
    data = source.read(file, 0, file.size_bytes)
    refuse_pointer(data, file)
    return data


def refuse_pointer(first: bytes, file: SourceFile) -> None:
    """What git leaves in the place of a large file, where git-lfs is not installed or has not
    fetched it.

    Raises:
        BadCheckpoint: the file, of which these are the first bytes, is such a pointer.
    """
    if first.startswith(b"version https://git-lfs.github.com/spec/"):
        raise BadCheckpoint(
            "is a git-lfs pointer and not the file itself: run `git lfs pull` in the repository",
            file=file.name,
        )


def source_version(files: Iterable[SourceFile]) -> str:
    """The pinned version of a set of files: BLAKE3, in hex, over their names, sizes and
    versions.
    """
    listed = sorted((file.name, file.size_bytes, file.version) for file in files)
    return blake3(msgspec.json.encode(listed)).hexdigest()


def _pin(name: str, stat: os.stat_result) -> SourceFile:
    return SourceFile(name=name, size_bytes=stat.st_size, version=f"mtime-ns-{stat.st_mtime_ns}")


@contextmanager
def _named_errors(file: SourceFile, what: str = "cannot be read") -> Generator[None]:
    """What goes wrong with a file is raised as ``Source`` says."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceChanged("the file is gone", file=file.name) from error
    except OSError as error:
        raise _unreadable(error, what, file.name) from error


def _pin_bytes(name: str, data: bytes) -> SourceFile:
    return SourceFile(name=name, size_bytes=len(data), version=f"blake3-{blake3(data).hexdigest()}")


def check_range(file: SourceFile, offset: int, size_bytes: int) -> None:
    """A read outside of a file is a mistake of its caller.

    Raises:
        ValueError: the range does not lie within the file.
    """
    if offset < 0 or size_bytes < 0 or offset + size_bytes > file.size_bytes:
        raise ValueError(
            f"[{offset}, {offset + size_bytes}) is not within the {file.size_bytes} bytes of {file.name}"
        )


def rest(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left to fill when ``count`` bytes have come."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _check_version(stat: os.stat_result, file: SourceFile) -> None:
    if _pin(file.name, stat) != file:
        raise SourceChanged("the file has changed since it was listed", file=file.name)


def _fill(
    descriptor: int,
    file: SourceFile,
    offset: int,
    buffers: Sequence[memoryview],
    progress: Progress,
) -> None:
    # One preadv returns at most 2 GiB, and a network file system may return less than was asked
    # for.
    left = rest(buffers, 0)
    while left:
        count = os.preadv(descriptor, left[:MAX_BUFFERS], offset)
        if count == 0:
            raise SourceChanged("the file has become shorter while it was read", file=file.name)
        offset += count
        left = rest(left, count)
        progress(count)


def _unreadable(error: OSError, what: str, file: str | None = None) -> SourceUnavailable:
    message = f"{what}: {error.strerror}"
    if isinstance(error, PermissionError):
        return SourceDenied(message, file=file)
    return (
        SourceMissing(message)
        if isinstance(error, FileNotFoundError)
        else SourceUnavailable(message, file=file)
    )
