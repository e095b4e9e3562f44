"""Reading chunks from a source, one by one, in threads.

A chunk's bytes go straight to their place in the pool; their BLAKE3 digest comes back. A source that is not what the manifest
pinned is an error before any of its bytes count.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import Chunk, Manifest, Segment, bytes_digest
from pilotlight.checkpoint.reader import Progress, Source
from pilotlight.common.errors import SourceUnavailable, UriNotAllowed, error_of
from pilotlight.dataplane.layout import unfilled
from pilotlight.policy.types import Digest, Model

LOOKS = 4
"""How often within the stall timeout a read is looked at: it stalls when nothing has come between so many looks."""

T = TypeVar("T")


class ChunkSource(Protocol):
    """Where a model's bytes come from. Its methods block: they run in threads, several at a time."""

    def read_chunk(self, chunk: Chunk, into: memoryview, progress: Progress) -> Digest:
        """Fill ``into`` with the chunk's part of the image; the digest of what was read.

        Raises:
            SourceChanged: the source is not what the manifest pinned.
            SourceUnavailable: it cannot be read.
        """
        ...

    def read_range(self, file: int, start: int, stop: int, progress: Progress) -> bytes:
        """Bytes [start, stop) of a file, by its number in the manifest. Raises what ``read_chunk`` raises."""
        ...

    def close(self) -> None:
        """Let go of files and connections. Nothing is being read any more."""
        ...


OpenSource = Callable[[Model, Manifest], ChunkSource]
"""Opens the source of a model; blocks. Raises what ``ChunkSource.read_chunk`` raises, and ``UriNotAllowed``."""


class SourceChunks:
    """Chunks of a checkpoint, from whatever source it lies in."""

    def __init__(self, source: Source, manifest: Manifest) -> None:
        """Take a source over.

        Raises:
            UriNotAllowed: the manifest names a file that would lie outside of the source.
        """
        self._source = source
        self._files = manifest.files
        for file in manifest.files:
            if file.name in ("", ".", "..") or "/" in file.name or not file.name.isprintable():
                source.close()
                raise UriNotAllowed(f"{file.name!r} is not the name of a file")

    def read_chunk(self, chunk: Chunk, into: memoryview, progress: Progress) -> Digest:
        for start, stop in unfilled(chunk):
            # The pool's memory may hold what an earlier model left there.
            into[start:stop] = bytes(stop - start)
        try:
            for run in _runs(chunk.segments):
                starts = [segment.image_offset - chunk.image_offset for segment in run]
                buffers = [into[start : start + segment.size_bytes] for start, segment in zip(starts, run, strict=True)]
                self._source.read_into(self._files[run[0].file], run[0].file_offset, buffers, progress)
        except CheckpointError as error:
            raise error_of(error.code, str(error)) from error
        return bytes_digest(into)

    def read_range(self, file: int, start: int, stop: int, progress: Progress) -> bytes:
        data = bytearray(stop - start)
        try:
            self._source.read_into(self._files[file], start, [memoryview(data)], progress)
        except CheckpointError as error:
            raise error_of(error.code, str(error)) from error
        return bytes(data)

    def close(self) -> None:
        self._source.close()


class Abandoned(Exception):
    """Nobody waits for what is being read any more."""


class ReadProgress:
    """Counts the bytes of one read, across threads, and ends it once nobody waits for it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.abandoned = False

    def __call__(self, count: int) -> None:
        self.bytes += count
        if self.abandoned:
            raise Abandoned


class Readers:
    """The threads that read, apart from everybody else's, so that a disk that hangs holds up nothing but fetches."""

    def __init__(self, threads: int, stall_timeout_s: float) -> None:
        self.threads = threads
        self.stall_timeout_s = stall_timeout_s
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._idle = asyncio.Semaphore(threads)
        self._running: set[ReadProgress] = set()
        self._ended = 0

    async def submit(self, work: Callable[[ReadProgress], T], progress: ReadProgress) -> "asyncio.Future[T]":
        """Start blocking work as soon as a thread is idle.

        Raises:
            SourceUnavailable: none became idle, and no byte came to any of them, for the stall timeout.
        """
        waiting = asyncio.ensure_future(self._idle.acquire())
        try:
            if not await self.ended(waiting, self._moved):
                raise SourceUnavailable(f"the sources hang: no thread that reads got a byte for {self.stall_timeout_s:g} s")
        except BaseException:
            if not waiting.cancel() and not waiting.cancelled():
                self._idle.release()
            raise
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, progress)
        self._running.add(progress)
        future.add_done_callback(lambda done: self._on_done(done, progress))
        return future

    async def ended(self, future: "asyncio.Future[Any]", moved: Callable[[], object]) -> bool:
        """Wait for a future as long as something moves; False once nothing has for the stall timeout."""
        seen, still = moved(), 0
        while still < LOOKS:
            done, _ = await asyncio.wait({future}, timeout=self.stall_timeout_s / LOOKS)
            if done:
                return True
            now = moved()
            seen, still = now, still + 1 if now == seen else 0
        return False

    def stop(self) -> None:
        """Take no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _moved(self) -> tuple[int, int]:
        return self._ended, sum(progress.bytes for progress in self._running)

    def _on_done(self, future: "asyncio.Future[Any]", progress: ReadProgress) -> None:
        self._idle.release()
        self._running.discard(progress)
        self._ended += 1
        if not future.cancelled():
            # Its reader may have given it up as stalled; then nobody else asks.
            future.exception()


class Reading:
    """The blocking work of one fetch. Given up or cancelled, a piece of it ends as soon as its thread gets another byte."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._busy: set[asyncio.Future[Any]] = set()

    async def run(self, what: str, work: Callable[[ReadProgress], T]) -> T:
        """Run work in a thread.

        Raises:
            SourceUnavailable: it stalled: no byte came for the stall timeout.
        """
        progress = ReadProgress()
        future = await self._readers.submit(work, progress)
        self._busy.add(future)
        future.add_done_callback(self._busy.discard)
        try:
            if not await self._readers.ended(future, lambda: progress.bytes):
                raise SourceUnavailable(f"{what} stalled: no bytes for {self._readers.stall_timeout_s:g} s")
        finally:
            progress.abandoned = True
        return future.result()

    @property
    def busy(self) -> bool:
        """Whether a thread may still write to memory that this fetch gave it."""
        return bool(self._busy)

    async def settled(self) -> None:
        """Return when no thread works for this fetch any more: only then may its memory go to somebody else."""
        while self._busy:
            await asyncio.wait(self._busy)


def _runs(segments: tuple[Segment, ...]) -> list[list[Segment]]:
    """Cut segments where they do not follow one another in one file."""
    runs: list[list[Segment]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.file, last.file_offset + last.size_bytes) == (segment.file, segment.file_offset):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs
