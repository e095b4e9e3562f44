"""Reading chunks from a source, one by one, in threads.

A chunk's bytes go straight to their place in the pool; their BLAKE3 digest comes back. A source that is not what the manifest
pinned is an error before any of its bytes count.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import Chunk, Manifest, Segment, bytes_digest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.errors import DeadlineExceeded, SourceChanged, SourceUnavailable, UriNotAllowed, error_of
from pilotlight.common.waiting import within
from pilotlight.dataplane.layout import unfilled
from pilotlight.policy.types import Digest, Model

MAX_BUFFERS = 1024
"""Buffers of one ``preadv``: what Linux takes."""

T = TypeVar("T")


class ChunkSource(Protocol):
    """Where a model's bytes come from. Its methods block: they run in threads, several at a time."""

    def read_chunk(self, chunk: Chunk, into: memoryview) -> Digest:
        """Fill ``into`` with the chunk's part of the image; the digest of what was read.

        Raises:
            SourceChanged: the source is not what the manifest pinned.
            SourceUnavailable: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections. Nothing is being read any more."""
        ...


OpenSource = Callable[[Model, Manifest], ChunkSource]
"""Opens the source of a model; blocks. Raises what ``ChunkSource.read_chunk`` raises, and ``UriNotAllowed``."""


class FileChunks:
    """Chunks of a checkpoint in a local folder."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Open every file that the manifest lists.

        Raises:
            SourceUnavailable: a file cannot be opened.
            SourceChanged: a file is gone, or is not the version that the manifest pinned.
            UriNotAllowed: the manifest names a file outside the folder.
        """
        self._files = manifest.files
        self._folder = FolderSource(folder)
        self._descriptors: list[int] = []
        try:
            for index, file in enumerate(manifest.files):
                if Path(file.name).name != file.name:
                    raise UriNotAllowed(f"{file.name!r} is not the name of a file")
                self._descriptors.append(_open(folder / file.name))
                self._check_version(index)
        except BaseException:
            self.close()
            raise

    def read_chunk(self, chunk: Chunk, into: memoryview) -> Digest:
        for start, stop in unfilled(chunk):
            # The pool's memory may hold what an earlier model left there.
            into[start:stop] = bytes(stop - start)
        for run in _runs(chunk.segments):
            self._read_run(run, chunk, into)
        for index in {segment.file for segment in chunk.segments}:
            # After reading: a file that was written to meanwhile has another time of modification now.
            self._check_version(index)
        return bytes_digest(into)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _read_run(self, run: list[Segment], chunk: Chunk, into: memoryview) -> None:
        """Read segments that follow one another in a file: one call, several buffers."""
        starts = [segment.image_offset - chunk.image_offset for segment in run]
        buffers = [into[start : start + segment.size_bytes] for start, segment in zip(starts, run, strict=True)]
        file, offset = run[0].file, run[0].file_offset
        name = self._files[file].name
        while buffers:
            try:
                count = os.preadv(self._descriptors[file], buffers, offset)
            except OSError as error:
                raise SourceUnavailable(f"{name} cannot be read: {error.strerror}") from error
            if count == 0:
                raise SourceChanged(f"{name} ends at byte {offset}: it has become shorter")
            offset += count
            buffers = _rest(buffers, count)

    def _check_version(self, index: int) -> None:
        try:
            self._folder.read(self._files[index], 0, 0)
        except CheckpointError as error:
            raise error_of(error.code, str(error)) from error


class Readers:
    """The threads that read, apart from everybody else's, so that a disk that hangs holds up nothing but fetches."""

    def __init__(self, threads: int, stall_timeout_s: float) -> None:
        self.threads = threads
        self.stall_timeout_s = stall_timeout_s
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._idle = asyncio.Semaphore(threads)

    async def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Start blocking work as soon as a thread is idle.

        Raises:
            SourceUnavailable: none became idle in time.
        """
        try:
            await within(self.stall_timeout_s, self._idle.acquire(), "waiting for a thread that reads")
        except DeadlineExceeded as error:
            raise SourceUnavailable(f"the sources hang: {error.message}") from error
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(self._on_done)
        return future

    def stop(self) -> None:
        """Take no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, future: "asyncio.Future[T]") -> None:
        self._idle.release()
        if not future.cancelled():
            # Its reader may have given it up as stalled; then nobody else asks.
            future.exception()


class Reading:
    """The blocking work of one fetch. Given up or cancelled, a piece of it goes on in its thread to its end."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._busy: set[asyncio.Future[Any]] = set()

    async def run(self, what: str, work: Callable[[], T]) -> T:
        """Run work in a thread.

        Raises:
            SourceUnavailable: it stalled: it took longer than the stall timeout.
        """
        future = await self._readers.submit(work)
        self._busy.add(future)
        future.add_done_callback(self._busy.discard)
        done, _ = await asyncio.wait({future}, timeout=self._readers.stall_timeout_s)
        if not done:
            raise SourceUnavailable(f"{what} stalled: no bytes for {self._readers.stall_timeout_s:g} s")
        return future.result()

    @property
    def busy(self) -> bool:
        """Whether a thread may still write to memory that this fetch gave it."""
        return bool(self._busy)

    async def settled(self) -> None:
        """Return when no thread works for this fetch any more: only then may its memory go to somebody else."""
        while self._busy:
            await asyncio.wait(self._busy)


def _open(path: Path) -> int:
    try:
        # Where a file was there may be a pipe now, whose opening would wait for a writer.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise SourceChanged(f"{path.name} is gone") from error
    except OSError as error:
        raise SourceUnavailable(f"{path.name} cannot be opened: {error.strerror}") from error


def _runs(segments: tuple[Segment, ...]) -> list[list[Segment]]:
    """Cut segments where they do not follow one another in one file."""
    runs: list[list[Segment]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        follows = last is not None and (last.file, last.file_offset + last.size_bytes) == (segment.file, segment.file_offset)
        if follows and len(runs[-1]) < MAX_BUFFERS:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What a short read has left to fill."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
