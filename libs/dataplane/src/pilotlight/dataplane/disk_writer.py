"""Brings verified chunks from the host pool to the disk tier, in the background, behind everything
else.

::

    fetch       chunk verified, chunk verified, ...        keep(): a note of where it lies, nothing is copied
    queue       [note][note] ... at most QUEUE_CHUNKS      full: the chunk is not kept
    thread      pool's file ──1 MiB──> hash ──> file       nice 19; one part of work in WAY of waiting while a fetch goes on

The bytes stay in the pool while they wait, or they are gone when their turn comes: then the digest
tells.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue

import structlog

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest_of, unit_digests
from pilotlight.common.clock import Clock
from pilotlight.dataplane.disk_tier import Count, DiskEvent, DiskTier, Outranked, Unwritten
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest

log = structlog.get_logger()

QUEUE_CHUNKS = 4096
"""Notes that may wait: of 32 GiB."""
BUSY_S = 0.5
"""A fetch goes on while a chunk was verified this lately."""
WAY = 4
"""While a fetch goes on, for how many times as long as each piece took the thread waits before the
next one."""
LONGEST_WAY_S = 1.0
NICE = 19
"""The least that the system knows; a thread's place in the queue of a disk goes by it, too."""
STOP_S = 10.0

_Note = tuple[Digest, int, int, Digest]
"""Digest, offset in the pool's file, bytes, digest of the model."""


class DiskWriter:
    """A keeper (``origin.Keeper``) with one thread."""

    def __init__(
        self,
        tier: DiskTier,
        pool_path: Path,
        clock: Clock,
        count: Count,
        *,
        queue_chunks: int = QUEUE_CHUNKS,
    ) -> None:
        self._tier = tier
        self._pool_path = pool_path
        self._clock = clock
        self._count = count
        self._notes: Queue[_Note | None] = Queue(queue_chunks)
        self._stopping = threading.Event()
        self._heard_s = float("-inf")
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Chunks that have not been dealt with."""
        return self._notes.unfinished_tasks

    def start(self) -> None:
        """Write from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="disk tier", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write no more; what waits is not kept. Blocks until the piece that is being written
        is.
        """
        self._stopping.set()
        with suppress(Full):
            self._notes.put_nowait(None)
        if self._thread is not None:
            self._thread.join(STOP_S)

    def keep(
        self, digest: Digest, file_offset: int, size_bytes: int, kind: OriginKind, model: Digest
    ) -> None:
        """As ``Keeper.keep``."""
        self._heard_s = self._clock.monotonic_s()
        if digest in self._tier:
            self._tier.use(digest, model)
            return
        if kind is OriginKind.DISK:
            return
        try:
            self._notes.put_nowait((digest, file_offset, size_bytes, model))
        except Full:
            self._count(DiskEvent.DROPPED)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        descriptor = os.open(self._pool_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while not self._stopping.is_set():
                note = self._notes.get()
                if note is not None:
                    self._keep(descriptor, note)
                self._notes.task_done()
        finally:
            os.close(descriptor)

    def _keep(self, descriptor: int, note: _Note) -> None:
        digest, _, size_bytes, model = note
        try:
            self._tier.write(digest, size_bytes, self._pieces(descriptor, note), model)
        except Outranked:
            self._count(DiskEvent.OUTRANKED)
        except Overtaken:
            self._count(DiskEvent.OVERTAKEN)
        except Unwritten:
            if digest not in self._tier:
                self._count(DiskEvent.DROPPED)

    def _pieces(self, descriptor: int, note: _Note) -> Iterator[memoryview]:
        """A chunk's bytes from the pool, unit by unit."""
        digest, offset, size_bytes, _ = note
        buffer, units = memoryview(bytearray(min(UNIT_BYTES, size_bytes))), list[bytes]()
        for start in range(0, size_bytes, UNIT_BYTES):
            began_s = self._clock.monotonic_s()
            piece = buffer[: min(UNIT_BYTES, size_bytes - start)]
            if os.preadv(descriptor, [piece], offset + start) != len(piece):
                raise Overtaken
            units += unit_digests(piece)
            yield piece
            self._give_way(self._clock.monotonic_s() - began_s)
            if self._stopping.is_set():
                raise Unwritten
        if chunk_digest_of(units) != digest:
            raise Overtaken

    def _give_way(self, seconds: float) -> None:
        if self._clock.monotonic_s() - self._heard_s < BUSY_S:
            self._stopping.wait(min(WAY * seconds, LONGEST_WAY_S))


class Overtaken(Unwritten):
    """The pool had other bytes there by now."""
