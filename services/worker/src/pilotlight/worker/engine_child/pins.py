"""Pins what of the host pool has been loaded from, in the loop's idle moments: the next load of it
goes straight to the device.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from pilotlight.engine.errors import EngineError

log = structlog.get_logger()

SLAB_BYTES = 64 * 1024 * 1024
"""Pinned at once. Some tens of milliseconds, in which a request that comes waits."""


class PinnedSlabs(Protocol):
    """``engine.cuda.stream.PinnedSlabs``."""

    def pin_next(self, wanted: Iterable[int] = ()) -> bool:
        """Pins the slab of the first of these offsets whose slab is not pinned yet."""
        ...

    def close(self) -> None:
        """Takes all of it back."""
        ...


class Pins:
    """Which slabs of the pool are to be pinned, what was wanted last first; the others cost their
    memory and bring nothing.
    """

    def __init__(
        self, slabs_of: Callable[[memoryview, int], PinnedSlabs], slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._slabs_of = slabs_of
        self._slab_bytes = slab_bytes
        self._slabs: PinnedSlabs | None = None
        self._pinned: set[int] = set()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._refused = False

    def moved(self, pool: memoryview) -> None:
        """The pool is another file from now on; what lies in the old one is read no more."""
        if self._slabs is not None:
            self._slabs.close()
        self._slabs = None if self._refused else self._slabs_of(pool, self._slab_bytes)
        self._pinned.clear()
        self._wanted.clear()

    def want(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the pool have been loaded from."""
        for slab in range(start // self._slab_bytes, -(-stop // self._slab_bytes)):
            if slab not in self._pinned:
                self._wanted[slab] = None
                self._wanted.move_to_end(slab, last=False)

    @property
    def waiting(self) -> bool:
        """Something is still to be pinned."""
        return bool(self._wanted) and self._slabs is not None and not self._refused

    def pin_one(self) -> None:
        """Pin the next slab.

        Where the driver refuses none is pinned any more: parts then go through the ring, which is
        slower.
        """
        if self._slabs is None or self._refused or not self._wanted:
            return
        slab, _ = self._wanted.popitem(last=False)
        try:
            self._slabs.pin_next((slab * self._slab_bytes,))
            self._pinned.add(slab)
            if not self._wanted:
                log.info(
                    "what was loaded of the host pool is pinned",
                    action="pool_pinned",
                    pinned_bytes=len(self._pinned) * self._slab_bytes,
                )
        except EngineError as error:
            # What is pinned stays so until the pool moves: it serves, and its pages may not go
            # before they are taken back.
            self._refused = True
            log.warning(
                "the host pool is not pinned any further", action="pin_refused", error=error.message
            )
