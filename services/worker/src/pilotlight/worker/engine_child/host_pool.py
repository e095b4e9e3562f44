"""The host pool, as an engine's process sees it: mapped to be read, and known by its file."""

import mmap
import os

from pilotlight.worker.engine_child.pins import Identity, Pins


class HostPool:
    """The pool that was read last. It stays mapped from load to load, as long as it is the same
    file of the same size.
    """

    def __init__(self, pins: Pins | None = None) -> None:
        """Nothing is mapped yet.

        Args:
            pins: are told when it is another one, and may have it mapped already.
        """
        self._pins = pins
        self._view = memoryview(b"")
        self.path = ""
        """Where it was found last, ..."""
        self.identity: Identity = (0, 0, 0)
        """... and what was there; all zero: nothing is mapped."""

    def mapped(self, path: str) -> memoryview:
        """All of it, to be read.

        Raises:
            OSError: it cannot be mapped.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino, status.st_size)
            if self.identity != identity:
                found = None if self._pins is None else self._pins.begun(identity)
                whole = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if found is None else None
                view, pinned = found or (memoryview(whole or b""), ())
                self._view, self.identity = view, identity
                if self._pins is not None:
                    self._pins.moved(view, pinned)
        finally:
            os.close(descriptor)
        self.path = path
        return self._view
