"""Copying a checkpoint into the state folder: the files that are served, and no others.

::

    models/org/.name.f3a9c1.part/     files as they come; what is there already is not fetched again
    models/org/name/                  all of them, checked: it gets its name at the end
        .pilotlight-source            the URI that it is a copy of
"""

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.content import ContentHash, names_content
from pilotlight.checkpoint.errors import CheckpointError, SourceChanged
from pilotlight.checkpoint.reader import Source, SourceFile
from pilotlight.checkpoint.safetensors import INDEX_FILE
from pilotlight.common.errors import Conflict, DiskFull, FolderUnusable, error_of

FILES_AT_ONCE = 4
READ_BYTES = 4 * 1024 * 1024
SPARE_BYTES = 256 * 1024 * 1024
"""Stays free on the disk."""
SOURCE_FILE = ".pilotlight-source"

Progress = Callable[[int], None]
"""Told of bytes that are there."""


class _Stopped(Exception):
    """Another file failed, or the user stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a source has of a model."""

    uri: str
    """Of what the files are a copy; of a hub with its commit."""
    architecture: str
    files: tuple[SourceFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)


def contents_of(source: Source, uri: str) -> Contents:
    """Look at configuration and headers: what is needed of the source, if it can be served.

    Raises:
        PilotlightError: it cannot be served, or not be read.
    """
    with _told():
        checkpoint = read_checkpoint(source)
        wanted = {file.name: file for file in (*checkpoint.manifest.files, *checkpoint.text_files)}
        wanted |= {file.name: file for file in source.list_files() if file.name == INDEX_FILE}
    ordered = tuple(sorted(wanted.values(), key=lambda file: file.name))
    return Contents(uri=uri, architecture=checkpoint.spec.architecture, files=ordered)


def source_of(folder: Path) -> str | None:
    """The URI that a folder is a copy of; None: it is no copy of ours."""
    try:
        return (folder / SOURCE_FILE).read_text().strip()
    except OSError:
        return None


def is_copy(folder: Path, uri: str) -> bool:
    """Whether a folder is a whole copy of this.

    Raises:
        Conflict: it is something else.
    """
    if not folder.exists():
        return False
    copied = source_of(folder)
    if copied != uri:
        raise Conflict(
            f"{folder} is there, and holds {copied or 'something else'}: give the new one another name with --name, or remove the folder"
        )
    return True


def copy(source: Source, contents: Contents, folder: Path, progress: Progress) -> None:
    """Fetch all files, check them, and give the folder its name. What an earlier try has fetched of
    files whose content has a known digest is not fetched again.

    Args:
        source: Where the files are.
        contents: Which of them are wanted.
        folder: What the copy is to be.
        progress: Called from several threads.

    Raises:
        DiskFull: they do not fit.
        FolderUnusable: they cannot be written.
        PilotlightError: they cannot be read, or are not what was listed.
    """
    key = hashlib.sha256(contents.uri.encode()).hexdigest()[:12]
    unfinished = folder.with_name(f".{folder.name}.{key}.part")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        _check_room(unfinished, contents)
        with _told():
            _copy_all(source, contents, unfinished, progress)
        (unfinished / SOURCE_FILE).write_text(contents.uri + "\n")
        unfinished.rename(folder)
    except OSError as error:
        raise FolderUnusable(f"{unfinished} cannot be written: {error.strerror}") from error


def link(original: Path, contents: Contents, folder: Path) -> None:
    """As ``copy``, of a folder of this machine: by hard links where file systems allow it.

    Raises:
        DiskFull: they do not fit.
        FolderUnusable: they cannot be written.
    """
    unfinished = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file in contents.files:
            # Links in a hub's cache are followed: what they lead to is linked.
            real = (original / file.name).resolve()
            try:
                os.link(real, unfinished / file.name)
            except OSError:
                _check_room(unfinished, contents)
                shutil.copyfile(real, unfinished / file.name)
        (unfinished / SOURCE_FILE).write_text(contents.uri + "\n")
        unfinished.rename(folder)
    except OSError as error:
        raise FolderUnusable(f"{unfinished} cannot be written: {error.strerror}") from error


def _check_room(folder: Path, contents: Contents) -> None:
    there_bytes = sum(file.stat().st_size for file in folder.iterdir())
    free_bytes = shutil.disk_usage(folder).free
    needed_bytes = contents.size_bytes - there_bytes + SPARE_BYTES
    if free_bytes < needed_bytes:
        raise DiskFull(
            f"{needed_bytes:,} bytes are needed at {folder}, and {free_bytes:,} are free"
        )


def _copy_all(source: Source, contents: Contents, folder: Path, progress: Progress) -> None:
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise _Stopped

    def one(file: SourceFile) -> None:
        try:
            _copy_file(source, file, folder / file.name, progress, check)
        except _Stopped:
            return
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="pull") as pool:
        try:
            copies = [pool.submit(one, file) for file in contents.files]
            for each in copies:
                each.result()
        finally:
            stopped.set()


def _copy_file(
    source: Source, file: SourceFile, path: Path, progress: Progress, check: Callable[[], None]
) -> None:
    digest = ContentHash(file) if names_content(file) else None
    # Without a digest nothing would tell whether the beginning is of the same file.
    with path.open("ab+" if digest is not None else "wb+") as out:
        if out.tell() > file.size_bytes:
            out.truncate(0)
        size_bytes = out.tell() if digest is not None else 0
        out.seek(0)
        there_bytes = 0
        while digest is not None and (piece := out.read(READ_BYTES)):
            check()
            digest.update(piece)
            there_bytes += len(piece)
            progress(len(piece))
        assert there_bytes == size_bytes
        for piece in source.pieces(file, there_bytes, file.size_bytes - there_bytes, check):
            check()
            out.write(piece)
            if digest is not None:
                digest.update(piece)
            progress(len(piece))
        out.flush()
        os.fsync(out.fileno())
    if digest is not None and not digest.agrees:
        with contextlib.suppress(OSError):
            path.unlink()
        raise SourceChanged("its bytes do not have the digest that the hub names", file=file.name)


@contextmanager
def _told() -> Generator[None]:
    """Errors of sources as those of the taxonomy."""
    try:
        yield
    except CheckpointError as error:
        raise error_of(error.code, str(error)) from error
