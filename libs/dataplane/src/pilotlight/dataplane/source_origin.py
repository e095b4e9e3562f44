"""The model's own source as an origin: chunks out of the files of a checkpoint.

::

    file        | header | norm | q       | k  |            a run: segments that follow one another in one file are one read
    chunk       | norm |0| q       | k  |0|                 what no segment fills is zero
"""

import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from pilotlight.checkpoint.bulk import is_read_past
from pilotlight.checkpoint.errors import CheckpointError, SourceChanged, SourceUnavailable
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.reader import FolderSource, Source, SourceFile
from pilotlight.common.errors import UriNotAllowed, error_of
from pilotlight.dataplane.bandwidth import link_of
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.origin import Origin
from pilotlight.dataplane.readers import Abandoned
from pilotlight.native.reads import FileSpan, FileTooShort, NotResident
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.model import Model


class ModelSource(Origin, Protocol):
    """What a model was registered from. Its methods block: they run in threads, several at a
    time.
    """

    def read_range(
        self, file: int, start: int, stop: int, check: Callable[[], None]
    ) -> Generator[memoryview]:
        """Bytes [start, stop) of a file, as they come.

        A piece is good until the next is asked for.

        Args:
            file: Its number in the manifest.
            start: First byte, from the file's start.
            stop: The byte after the last.
            check: Called where the next piece is waited for; it may raise, which ends the read.

        Raises:
            SourceChanged: the source is not what the manifest pinned.
            SourceUnavailable: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections. Nothing is being read any more."""
        ...


KEPT_FILES = 64
"""Most files of a model that stay open, or one more for each thread."""

OpenSource = Callable[[Model, Manifest], ModelSource]
"""Opens the source of a model, each time one of its own: who asked closes it. Blocks. Raises what
``ModelSource.read_range`` raises, and ``UriNotAllowed``."""


class OpenedLate:
    """A model's source, opened when it is first needed: what lies nearer may make it
    unnecessary.
    """

    kind = OriginKind.SOURCE
    trusted = True

    def __init__(self, model: Model, manifest: Manifest, open_source: OpenSource) -> None:
        self.name = model.uri
        self.link = link_of(model.uri)
        self._model = model
        self._manifest = manifest
        self._open_source = open_source
        self._lock = threading.Lock()
        self._source: ModelSource | None = None
        self._closed = False

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        """As ``Origin.read``; also raises what opening raises."""
        self._opened().read(part, chunk, work)

    def read_range(
        self, file: int, start: int, stop: int, check: Callable[[], None]
    ) -> Generator[memoryview]:
        """As ``ModelSource.read_range``; also raises what opening raises."""
        return self._opened().read_range(file, start, stop, check)

    def close(self) -> None:
        """As ``ModelSource.close``."""
        with self._lock:
            self._closed, source = True, self._source
        if source is not None:
            source.close()

    def _opened(self) -> ModelSource:
        with self._lock:
            if self._closed:
                raise Abandoned
            if self._source is None:
                self._source = self._open_source(self._model, self._manifest)
            return self._source


class OpenFiles:
    """Files of a folder that stay open as long as chunks are read from it.

    To open one for each chunk would be most of what Python does for the chunk. Whether the name
    still leads to the version that was listed is asked after each chunk all the same.
    """

    def __init__(self, source: FolderSource, files: tuple[SourceFile, ...]) -> None:
        self._source = source
        self._files = files
        self._kept: dict[int, int] = {}

    @contextmanager
    def file(self, number: int) -> Generator[int]:
        """A descriptor of a file, by its number in the manifest. Raises what ``FolderSource.open``
        raises.
        """
        kept = self._kept.get(number)
        if kept is not None:
            yield kept
            return
        opened = self._source.open(self._files[number])
        if len(self._kept) < KEPT_FILES and self._kept.setdefault(number, opened) == opened:
            yield opened
            return
        try:
            yield opened
        finally:
            os.close(opened)

    def check_still(self, number: int) -> None:
        """As ``FolderSource.check_still``."""
        self._source.check_still(self._files[number])

    def close(self) -> None:
        """Close them. Nothing is being read any more."""
        while self._kept:
            os.close(self._kept.popitem()[1])


@dataclass(frozen=True, slots=True)
class Run:
    """A range of a chunk that comes from one range of one file, but for gaps that are zero."""

    file: int
    file_offset: int
    pieces: tuple[tuple[int, int], ...]
    """The ranges [start, stop) of the chunk, in order, that the file's bytes go to."""

    @property
    def size_bytes(self) -> int:
        """Of the file's range."""
        return sum(stop - start for start, stop in self.pieces)


class SourceOrigin:
    """Chunks of a checkpoint, from whatever source it lies in."""

    kind = OriginKind.SOURCE
    trusted = True

    def __init__(self, source: Source, manifest: Manifest, name: str) -> None:
        """Take a source over; ``name`` is the model's URI.

        Raises:
            UriNotAllowed: the manifest names a file that would lie outside of the source.
        """
        self.name = name
        self.link = link_of(name)
        self._source = source
        self._files = manifest.files
        self._open = OpenFiles(source, manifest.files) if isinstance(source, FolderSource) else None
        for file in manifest.files:
            if file.name in ("", ".", "..") or "/" in file.name or not file.name.isprintable():
                source.close()
                raise UriNotAllowed(f"{file.name!r} is not the name of a file")

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        """As ``Origin.read``.

        Raises:
            SourceChanged: the source is not what the manifest pinned.
            SourceUnavailable: it cannot be read.
        """
        if self._open is not None and work.takes_files:
            try:
                if self._read_files(self._open, chunk, work):
                    return
            except CheckpointError as error:
                raise error_of(error.code, str(error)) from error
        for run in runs_from(chunk, work.position):
            gaps = iter(run.pieces)
            start, stop = next(gaps)
            work.write(bytes(start - work.position))
            with closing(
                self.read_range(
                    run.file, run.file_offset, run.file_offset + run.size_bytes, work.check
                )
            ) as pieces:
                for piece in pieces:
                    done = 0
                    while done < len(piece):
                        if work.position == stop:
                            start, stop = next(gaps)
                            work.write(bytes(start - work.position))
                        with piece[done : done + stop - work.position] as fitting:
                            work.write(fitting)
                            done += len(fitting)
        work.write(bytes(work.left_bytes))

    def _read_files(self, files: OpenFiles, chunk: Chunk, work: ChunkWork) -> bool:
        """Read the chunk straight into the pool; False: what is missing is better read past the
        system's memory.
        """
        numbers = {segment.file for segment in chunk.segments}
        with ExitStack() as opened:
            spans = _spans_of(
                chunk, {number: opened.enter_context(files.file(number)) for number in numbers}
            )

            def check() -> None:
                for number in numbers:
                    files.check_still(number)

            try:
                try:
                    work.read_files(spans, check, resident_only=True)
                except NotResident:
                    if any(is_read_past(self._files[number].size_bytes) for number in numbers):
                        return False
                    work.read_files(spans, check)
            except FileTooShort as error:
                raise SourceChanged("a file has become shorter while it was read") from error
            except OSError as error:
                raise SourceUnavailable(f"cannot be read: {error.strerror}") from error
        return True

    def read_range(
        self, file: int, start: int, stop: int, check: Callable[[], None]
    ) -> Generator[memoryview]:
        """As ``ModelSource.read_range``."""
        try:
            with closing(
                self._source.pieces(self._files[file], start, stop - start, check)
            ) as pieces:
                yield from pieces
        except CheckpointError as error:
            raise error_of(error.code, str(error)) from error

    def close(self) -> None:
        """As ``ModelSource.close``."""
        if self._open is not None:
            self._open.close()
        self._source.close()


def _spans_of(chunk: Chunk, descriptors: Mapping[int, int]) -> list[FileSpan]:
    """What fills a chunk, by open files."""
    spans: list[FileSpan] = []
    for run in runs_from(chunk, 0):
        offset = run.file_offset
        for start, stop in run.pieces:
            last = spans[-1] if spans else None
            if last is not None and (last.stop, last.file_offset + last.stop - last.start) == (
                start,
                offset,
            ):
                spans[-1] = last._replace(stop=stop)
            else:
                spans.append(FileSpan(descriptors[run.file], offset, start, stop))
            offset += stop - start
    return spans


def runs_from(chunk: Chunk, position: int) -> list[Run]:
    """What fills a chunk from a position on, counted from its own start: what follows one another
    in one file is one run.
    """
    runs: list[Run] = []
    for segment in sorted(chunk.segments, key=lambda segment: segment.image_offset):
        start = segment.image_offset - chunk.image_offset
        stop = start + segment.size_bytes
        if stop <= position:
            continue
        skipped = max(0, position - start)
        file_offset, piece = segment.file_offset + skipped, (start + skipped, stop)
        last = runs[-1] if runs else None
        if last is not None and (last.file, last.file_offset + last.size_bytes) == (
            segment.file,
            file_offset,
        ):
            runs[-1] = Run(last.file, last.file_offset, (*last.pieces, piece))
        else:
            runs.append(Run(segment.file, file_offset, (piece,)))
    return runs
