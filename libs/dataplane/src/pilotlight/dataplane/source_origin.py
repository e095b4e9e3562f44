"""The model's own source as an origin: chunks out of the files of a checkpoint.

::

    file        | header | norm | q       | k  |            a run: segments that follow one another in one file are one read
    chunk       | norm |0| q       | k  |0|                 what no segment fills is zero
"""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

from pilotlight.checkpoint.bulk import is_read_past
from pilotlight.checkpoint.errors import CheckpointError, SourceChanged
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.reader import FolderSource, Source
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
        """Bytes [start, stop) of a file, by its number in the manifest, as they come.

        A piece is good until the next is asked for.

        Raises:
            SourceChanged: the source is not what the manifest pinned.
            SourceUnavailable: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections. Nothing is being read any more."""
        ...


OpenSource = Callable[[Model, Manifest], ModelSource]
"""Opens the source of a model; blocks. Raises what ``ModelSource.read_range`` raises, and
``UriNotAllowed``."""


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
        if isinstance(self._source, FolderSource) and work.takes_files:
            try:
                if self._read_files(self._source, chunk, work):
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

    def _read_files(self, source: FolderSource, chunk: Chunk, work: ChunkWork) -> bool:
        """Read the chunk straight into the pool; False: what is missing is better read past the
        system's memory.
        """
        with ExitStack() as opened:
            files = {segment.file: self._files[segment.file] for segment in chunk.segments}
            found = {
                number: opened.enter_context(source.opened(file)) for number, file in files.items()
            }
            spans = _spans_of(
                chunk, {number: descriptor for number, (descriptor, _) in found.items()}
            )

            def check() -> None:
                for _, still_is in found.values():
                    still_is()

            try:
                try:
                    work.read_files(spans, check, resident_only=True)
                except NotResident:
                    if any(is_read_past(file.size_bytes) for file in files.values()):
                        return False
                    work.read_files(spans, check)
            except FileTooShort as error:
                raise SourceChanged("a file has become shorter while it was read") from error
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
