"""Copies from the host's memory to a device, in a thread of the library's own: Python's lock is not
needed for them.
"""

from collections.abc import Sequence
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

from pilotlight.native.device import Device
from pilotlight.native.library import out

SLAB_BYTES = 16 << 20
DEPTH = 2
"""Units of ``SLAB_BYTES`` that are on their way at once, at most: what else wants the bus waits for
no more."""
NUM_STREAMS = 2
NUM_MOVERS = 8
"""Threads that fill slabs, where memory is not pinned."""
DEADLINE_S = 60.0
PLAIN, BACKGROUND, ALONE = range(3)
"""How an order is carried out, as the library knows it."""


class Copy(NamedTuple):
    """Addresses on the host and on the device."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CopierCounts:
    """What a copier has done so far."""

    units: int
    direct_bytes: int
    """From pinned memory."""
    ring_bytes: int
    """Through the ring of slabs."""
    calls: int
    """Copies that the driver was asked for."""


class Copier:
    """Carries out orders of copies one after the other, a bounded number of bytes at a time."""

    def __init__(
        self,
        device: Device,
        *,
        slab_bytes: int = SLAB_BYTES,
        depth: int = DEPTH,
        num_streams: int = NUM_STREAMS,
        num_movers: int = NUM_MOVERS,
    ) -> None:
        """Starts its thread.

        Args:
            device: where copies go.
            slab_bytes: of a unit of copies, and of each pinned slab that a unit goes through.
            depth: units that are on their way at once, at most.
            num_streams: of the device, that units take turns on; one more is for the background.
            num_movers: threads that fill slabs, where memory is not pinned.

        Raises:
            NativeError: the driver gives no streams or no pinned memory.
        """
        self._library = device.library
        pointer, copier = out(c_void_p)
        self._library.call(
            "copier_open", device.context, slab_bytes, depth, num_streams, num_movers, pointer
        )
        self._pointer = copier()

    def pin(self, address: int, num_bytes: int) -> None:
        """Makes memory of the host one that the device reads directly; whole pages, which stay
        mapped until ``unpin``.

        Raises:
            NativeError: it is pinned already, or the driver refuses.
        """
        self._library.call("copier_pin", self._pointer, address, num_bytes)

    def unpin(self, address: int) -> None:
        """Takes back a ``pin``, after what was ordered before.

        Raises:
            NativeError: nothing is pinned there.
        """
        self._library.call("copier_unpin", self._pointer, address)

    def submit(
        self, copies: Sequence[Copy], *, background: bool = False, alone: bool = False
    ) -> int:
        """Orders copies; their ticket.

        Pinned sources are read until the order is done, others until it is on its way.

        Args:
            copies: joined where they lie side by side in both memories.
            background: in smaller units, one at a time, at the lowest priority.
            alone: nothing else wants the bus: three times as many units of pinned memory are on
                their way at once. The bus is not idle then while another thread is in the driver.
        """
        manner = BACKGROUND if background else ALONE if alone else PLAIN
        flat = (c_uint64 * (3 * len(copies)))(*(number for copy in copies for number in copy))
        return self._library.get("copier_submit", self._pointer, flat, len(copies), manner)

    def wait_done(self, ticket: int, timeout_s: float = DEADLINE_S) -> None:
        """Returns when all of an order has arrived.

        Raises:
            NativeError: a copy failed, or it takes too long.
        """
        self._library.call("copier_wait", self._pointer, ticket, timeout_s)

    def is_over(self, ticket: int) -> bool:
        """Whether ``wait_done`` would return, or raise, at once."""
        return bool(self._library.get("copier_is_over", self._pointer, ticket))

    def order_before(self, ticket: int, stream: int, timeout_s: float = DEADLINE_S) -> None:
        """Has what comes to a stream from now on wait for an order; returns when that is on its
        way.

        Raises:
            NativeError: a copy failed, or it takes too long.
        """
        self._library.call("copier_order_before", self._pointer, ticket, stream, timeout_s)

    @property
    def counts(self) -> CopierCounts:
        """What it has done so far."""
        numbers = [out(c_uint64) for _ in range(4)]
        self._library.get("copier_counts", self._pointer, *(pointer for pointer, _ in numbers))
        return CopierCounts(*(value() for _, value in numbers))

    def close(self) -> None:
        """Ends its thread; what is not on its way is not copied any more."""
        if self._pointer:
            self._library.get("copier_close", self._pointer)
            self._pointer = 0
