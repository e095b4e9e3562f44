"""Finds out what a disk tier's disk gives, once, before a start has to be predicted that reads it.

::

    chunks of the tier       read, those that are there: nothing is written
    else                     a file without a name is written, and read

About a second of reading, in the background; none while a fetch goes on. It goes past the system's
memory (``O_DIRECT``) where the file system can, else what is in memory of a file is let go of
first. One read at a time: a disk that gives more to several has that measured when it is used.
"""

import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from pilotlight.common.clock import Clock
from pilotlight.dataplane.disk_tier import DiskTier

log = structlog.get_logger()

BLOCK_BYTES = 4 * 1024 * 1024
"""What is read at once, and what a fetch waits for at the most."""
MOST_BYTES = 256 * 1024 * 1024
MOST_S = 1.0
"""Of reading, and of writing before that."""
LEAST_BYTES = 8 * 1024 * 1024
"""Less says nothing of a disk, unless it took all the time."""
SCRATCH_BYTES = 64 * 1024 * 1024
CHUNKS = 64
"""At the most, as many as are looked at."""
TRIES = 8
"""Each fetch that comes ends one."""
BUSY_S = 0.05
"""How long a fetch that goes on is waited for, before it is looked at again."""
NICE = 19
STOP_S = 10.0


class _Interrupted(Exception):
    """A fetch goes on, or the loader stops."""


@dataclass(slots=True)
class _Read:
    """What was read, and in which time."""

    bytes: int = 0
    seconds: float = 0.0

    @property
    def is_enough(self) -> bool:
        return self.bytes >= MOST_BYTES or self.seconds >= MOST_S


class DiskProbe:
    """One thread, which ends when it has measured the disk, or cannot."""

    def __init__(
        self,
        tier: DiskTier,
        clock: Clock,
        is_busy: Callable[[], bool],
        on_rate: Callable[[float], object],
    ) -> None:
        """Prepare it.

        Args:
            tier: Whose disk is measured.
            clock: For the time that reads take.
            is_busy: Whether a fetch goes on, or a chunk is written; called in the thread.
            on_rate: Told the bytes a second, once; called in the thread.
        """
        self._tier = tier
        self._clock = clock
        self._is_busy = is_busy
        self._on_rate = on_rate
        self._stopping = threading.Event()
        self._buffer = mmap.mmap(-1, BLOCK_BYTES)
        """Of whole pages, as direct reads want it."""
        self._read = _Read()
        self._thread = threading.Thread(target=self._run, name="disk probe", daemon=True)

    def start(self) -> None:
        """Begin; it goes on behind everything else."""
        self._thread.start()

    def stop(self) -> None:
        """End after the block that is under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for _ in range(TRIES):
            while self._is_busy() and not self._stopping.wait(BUSY_S):
                pass
            try:
                self._measure()
            except _Interrupted:
                continue
            except OSError as error:
                log.info("the disk was not measured", action="disk_not_probed", error=str(error))
                return
            break
        says = self._read.is_enough or self._read.bytes >= LEAST_BYTES
        if not says or self._read.seconds <= 0 or self._stopping.is_set():
            return
        bytes_per_s = self._read.bytes / self._read.seconds
        log.info(
            "disk measured",
            action="disk_probed",
            bytes_per_s=round(bytes_per_s),
            read_bytes=self._read.bytes,
        )
        self._on_rate(bytes_per_s)

    def _measure(self) -> None:
        """Read until that is enough, or there is no more.

        Raises:
            _Interrupted: a fetch goes on, or the loader stops.
            OSError: the disk cannot be read or written to.
        """
        for path in self._tier.paths(CHUNKS):
            if self._read.is_enough:
                return
            # It may have been evicted.
            with suppress(FileNotFoundError), _opened(str(path)) as descriptor:
                self._read_all(descriptor)
        room_bytes = min(SCRATCH_BYTES, self._tier.limit_bytes - self._tier.used_bytes)
        if self._read.bytes >= LEAST_BYTES or room_bytes < LEAST_BYTES:
            return
        self._read = _Read()
        with tempfile.TemporaryFile(dir=self._tier.folder, buffering=0) as scratch:
            self._write(scratch.fileno(), room_bytes)
            self._read_all(scratch.fileno())

    def _write(self, descriptor: int, size_bytes: int) -> None:
        direct, began_s = _past_memory(descriptor), self._clock.monotonic_s()
        for start in range(0, size_bytes - BLOCK_BYTES + 1, BLOCK_BYTES):
            self._go_on()
            # No two alike, nor zeros: some file systems would keep less than all of them.
            self._buffer[:] = os.urandom(BLOCK_BYTES)
            if os.pwrite(descriptor, self._buffer, start) != BLOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not direct:
                # Else the system writes it at some time, perhaps while a fetch goes on.
                os.fdatasync(descriptor)
            if self._clock.monotonic_s() - began_s >= MOST_S:
                return

    def _read_all(self, descriptor: int) -> None:
        direct, at = _past_memory(descriptor), 0
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while not self._read.is_enough:
            self._go_on()
            began_s = self._clock.monotonic_s()
            try:
                got = os.preadv(descriptor, [self._buffer], at)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # A file system that takes the flag, and then does not read so.
                direct = _past_memory(descriptor, wanted=False)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                continue
            self._read.seconds += self._clock.monotonic_s() - began_s
            self._read.bytes += got
            at += got
            if got < BLOCK_BYTES:
                break
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _go_on(self) -> None:
        if self._stopping.is_set() or self._is_busy():
            raise _Interrupted


@contextmanager
def _opened(path: str) -> Generator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _past_memory(descriptor: int, *, wanted: bool = True) -> bool:
    """Have a file read and written past the system's memory, or not; whether it is now."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(
            descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        )
    except OSError:
        return False
    return wanted
