"""Pins the host pool in the loop's idle moments: what is loaded from pinned memory goes straight to
the device.

::

    loaded from     [ last )[ ... )[ first )             as soon as there is nothing to do
    others' models                          [ hottest )[ ... )[ coldest )    when that lasts

Nothing is pinned by an engine that has not loaded anything: a first start waits for nothing.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from pilotlight.engine.errors import EngineError

log = structlog.get_logger()

SLAB_BYTES = 64 * 1024 * 1024
"""Pinned at once. Some tens of milliseconds, in which a request that comes waits."""
LOOK_S = 5.0
"""How often an engine that has nothing to do, and has pinned all, looks whether something has come
into the pool: eight bytes are read. What has just been fetched for another engine is seldom asked
for here sooner, and is loaded through the ring then."""
MOST_AHEAD_BYTES = 512 << 30
"""Others' models are pinned up to so much in all. The device maps pinned memory in pages of 4 KiB
at worst, by 8 bytes each: a gigabyte of tables for so much, and an engine keeps five at least of
its device's memory for itself."""


class PinnedSlabs(Protocol):
    """``engine.cuda.stream.PinnedSlabs``."""

    def pin_next(self, wanted: Iterable[int] = ()) -> bool:
        """Pins the slab of the first of these offsets whose slab is not pinned yet."""
        ...

    def close(self) -> None:
        """Takes all of it back."""
        ...


class HeldSlabs(Protocol):
    """``dataplane.pool_slabs.PoolSlabs``."""

    @property
    def changes(self) -> int:
        """Another number whenever something has come or gone; 0: nobody counts."""
        ...

    def occupied(self) -> Iterable[int]:
        """Numbers of the slabs that hold models, what was used last first."""
        ...


class Pins:
    """Which slabs of the pool are to be pinned: what was wanted last first, then what else of it
    holds models. The others cost memory that nobody has asked for yet, and bring nothing.
    """

    def __init__(
        self,
        slabs_of: Callable[[memoryview, int], PinnedSlabs],
        slab_bytes: int = SLAB_BYTES,
        held_of: Callable[[memoryview, int], HeldSlabs | None] | None = None,
        most_ahead_bytes: int = MOST_AHEAD_BYTES,
    ) -> None:
        """Nothing is pinned yet.

        Args:
            slabs_of: those of a pool, cut to this size, by the driver.
            slab_bytes: whole pages.
            held_of: which of them hold models; None where that is not known, as of a pool that
                cannot be read. Then nothing is pinned but what was loaded from.
            most_ahead_bytes: as ``MOST_AHEAD_BYTES``.
        """
        self._slabs_of = slabs_of
        self._held_of = held_of
        self._slab_bytes = slab_bytes
        self._most_ahead = most_ahead_bytes // slab_bytes
        self._slabs: PinnedSlabs | None = None
        self._pool = memoryview(b"")
        self._held: HeldSlabs | None = None
        self._blind = held_of is None
        """Nobody can tell which slabs hold models."""
        self._pinned: set[int] = set()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._has_loaded = False
        self._ahead: deque[int] = deque()
        self._changes: int | None = None
        """Of the pool, when it was looked at; None: it was not."""
        self._told = False  # That all that is occupied is pinned.
        self._refused = False

    def moved(self, pool: memoryview) -> None:
        """The pool is another file from now on; what lies in the old one is read no more."""
        if self._slabs is not None:
            self._slabs.close()
        self._slabs = None if self._refused else self._slabs_of(pool, self._slab_bytes)
        self._pool, self._held, self._blind = pool, None, self._held_of is None
        self._pinned.clear()
        self._wanted.clear()
        self._ahead.clear()
        self._changes, self._told = None, False

    def want(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the pool have been loaded from."""
        self._has_loaded = True
        for slab in range(start // self._slab_bytes, -(-stop // self._slab_bytes)):
            if slab not in self._pinned:
                self._wanted[slab] = None
                self._wanted.move_to_end(slab, last=False)

    @property
    def waiting(self) -> bool:
        """Something that was loaded from is still to be pinned."""
        return bool(self._wanted) and self._slabs is not None and not self._refused

    @property
    def looks_ahead(self) -> bool:
        """What was loaded from is pinned, and others' models are next."""
        able = self._slabs is not None and not self._blind and not self._refused
        return able and self._has_loaded and not self._wanted

    def pin_one(self) -> None:
        """Pin the next slab that was loaded from.

        Where the driver refuses none is pinned any more: parts then go through the ring, which is
        slower.
        """
        if not self.waiting:
            return
        slab, _ = self._wanted.popitem(last=False)
        self._pin(slab)
        if not self._wanted and not self._refused:
            log.info(
                "what was loaded of the host pool is pinned",
                action="pool_pinned",
                which="loaded",
                pinned_bytes=len(self._pinned) * self._slab_bytes,
            )

    def pin_ahead(self) -> bool:
        """Look at what has changed in the pool, or else pin the next slab of others' models;
        whether there may be more to do.
        """
        if not self.looks_ahead or self._held_of is None:
            return False
        if self._held is None:
            self._held = self._held_of(self._pool, self._slab_bytes)
        if self._held is None:
            self._blind = True
            return False
        changes = self._held.changes
        if changes != self._changes or not (changes or self._ahead):
            self._changes = changes
            self._ahead = deque(slab for slab in self._held.occupied() if slab not in self._pinned)
        elif self._ahead:
            self._pin(self._ahead.popleft())
            self._told = False
        while self._ahead and self._ahead[0] in self._pinned:
            self._ahead.popleft()
        if self._refused:
            return False
        if self._ahead and len(self._pinned) < self._most_ahead:
            return True
        if not self._told:
            self._told = True
            log.info(
                "the host pool is pinned, as far as it is to be",
                action="pool_pinned",
                which="occupied",
                pinned_bytes=len(self._pinned) * self._slab_bytes,
                left_bytes=len(self._ahead) * self._slab_bytes,
            )
        self._ahead.clear()
        return False

    def _pin(self, slab: int) -> None:
        if self._slabs is None:
            return
        try:
            self._slabs.pin_next((slab * self._slab_bytes,))
            self._pinned.add(slab)
        except EngineError as error:
            # What is pinned stays so until the pool moves: it serves, and its pages may not go
            # before they are taken back.
            self._refused = True
            log.warning(
                "the host pool is not pinned any further", action="pin_refused", error=error.message
            )
