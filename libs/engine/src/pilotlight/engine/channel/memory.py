"""A channel between two engines of one process, in one thread or two."""

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from pilotlight.engine.channel.channel import WINDOW_FRAMES, Frame, PolledChannel


class MemoryChannel(PolledChannel):
    """One end; ``memory_channel`` makes both. Frames pass as they are, without a copy, but for
    payloads on a device.
    """

    def __init__(self, monotonic_s: Callable[[], float], window: int, lock: threading.Lock) -> None:
        super().__init__(monotonic_s, window)
        self._lock = lock
        """Guards what the two ends write into each other."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when the other end has put something here."""
        self._free_bell = weakref.finalize(self, os.close, self._bell)
        """An end that is dropped open leaves no descriptor behind."""
        self._free_bell.atexit = False
        self._closed = False
        self._arrived: deque[Frame] = deque()
        self._granted = 0
        self.peer = self
        """The other end."""

    def interest(self) -> tuple[int, int]:
        return self._bell, select.POLLIN

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lost = "it was closed here"
            self.peer._hear("it was closed")
            self._free_bell()

    def _hear(self, lost: str | None = None, frame: Frame | None = None, granted: int = 0) -> None:
        """Takes what the other end tells; the lock is held."""
        if self._closed:
            return
        if frame is not None:
            self._arrived.append(frame)
        self._granted += granted
        self._lost = self._lost or lost
        os.eventfd_write(self._bell, 1)

    def _pump(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._credits += self._granted
            self._granted = 0
            self._inbox.extend(self._arrived)
            self._arrived.clear()
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)

    def _put(self, frame: Frame) -> None:
        frame = Frame(frame.header, frame.in_host)
        with self._lock:
            self.peer._hear(frame=frame)

    def _grant(self) -> None:
        with self._lock:
            self.peer._hear(granted=1)


def memory_channel(
    monotonic_s: Callable[[], float], window: int = WINDOW_FRAMES
) -> tuple[MemoryChannel, MemoryChannel]:
    """Both ends of a new channel."""
    lock = threading.Lock()
    one, other = MemoryChannel(monotonic_s, window, lock), MemoryChannel(monotonic_s, window, lock)
    one.peer, other.peer = other, one
    return one, other
