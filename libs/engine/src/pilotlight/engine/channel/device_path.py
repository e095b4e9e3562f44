"""How payloads go from device to device of one host, beside a channel over TCP.

::

    sender                                                         receiver
    takes a ring of device memory
    its descriptor, with a nonce   -- Unix socket (mailbox) -->
    "a ring", the same nonce       -- the channel -->              fetches the descriptor, maps the ring for its own device
                                   <-- the channel --              "mapped", or that it cannot
    copies a payload into the ring
    a frame: header, place         -- the channel -->              copies the payload out
                                   <-- the channel --              credit: the place is free again

Headers, credit and all that is small stay on the channel, and so does a payload for which the ring
gets no room within a moment. Where any of these steps fails, all of them do. What was sent stays in
place when the sender is gone: the ring's memory lives as long as one of the two has it mapped.
"""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pilotlight.engine.channel.channel import PlacedFrame
from pilotlight.engine.channel.mailbox import NONCE_BYTES, Mailbox, is_here, post
from pilotlight.engine.channel.ring import Ring
from pilotlight.engine.errors import EngineError, PeerLost

if TYPE_CHECKING:
    from torch import Tensor

RING_BYTES = 256 << 20
"""Of a channel between stages: hidden states of the longest batch of a large model, 10,240 tokens
of 8,192 values, and of the one before it in a smaller one."""
MAX_RING_BYTES = 1 << 30
"""A longer one is not mapped."""
LEAST_BYTES = 128 << 10
"""Shorter payloads go with their header, which took less time for 64 KiB, and more for 1 MiB, on
two GPUs of one host (decision 89)."""


class Window(Protocol):
    """Device memory that another process has, too. Used by one thread at a time."""

    def write(self, offset: int, payload: "Tensor") -> None:
        """Copies a row of bytes there; it is there when this returns."""
        ...

    def read(self, offset: int, num_bytes: int) -> "Tensor":
        """A copy as a row of bytes, all of it when this returns: on this process's device, or in
        the host's memory where the device has no room.
        """
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


class DeviceMemory(Protocol):
    """What a process can do with memory of its device."""

    def share(self, num_bytes: int) -> tuple[Window, int]:
        """New memory, and a descriptor of it, which the caller closes.

        Raises:
            EngineError: there is none.
        """
        ...

    def map(self, descriptor: int, num_bytes: int) -> Window:
        """Another process's memory. The descriptor stays the caller's.

        Raises:
            EngineError: the device cannot reach it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Devices:
    """A process's device, for its channels."""

    memory: DeviceMemory
    on_way: Callable[[str], None] = lambda way: None
    """Hears which way payloads go, and what went there."""

    def path(self) -> "DevicePath | None":
        """For a new channel; None: the system gives none."""
        try:
            return DevicePath(self.memory, self.on_way)
        except OSError:
            return None


class DevicePath:
    """One end's, for one thread."""

    def __init__(self, memory: DeviceMemory, on_way: Callable[[str], None]) -> None:
        """Nothing goes this way before both ends know of each other.

        Raises:
            OSError: the system gives no mailbox.
        """
        self._memory = memory
        self._on_way = on_way
        self._mailbox = Mailbox()
        self._theirs = ""
        self._ring: Ring | None = None
        """Of what this end sends; it can be used once the other one has mapped it."""
        self._sends: Window | None = None
        self._mapped = False
        self.waits = False
        """The other end has not said yet whether it has mapped the ring."""
        self._receives: Window | None = None
        self._receives_bytes = 0
        self._gone_bytes, self._beside_bytes = 0, 0
        """Of payloads that went this way; and of others, while they could have but for room."""

    @property
    def address(self) -> str:
        """Where the other end sends descriptors to."""
        return self._mailbox.address

    @property
    def carries(self) -> bool:
        """Payloads go this way, as far as there is room."""
        return self._mapped

    def meet(self, theirs: str) -> bool:
        """The other end has such a path, too; whether it can be reached from here.

        Args:
            theirs: its ``address``; empty: it knows nothing of them.
        """
        self._theirs = theirs if is_here(theirs) else ""
        return bool(self._theirs)

    def offer(self, num_bytes: int) -> bytes | None:
        """Takes a ring and sends its descriptor; the nonce that is to go over the channel now.
        None: there is no ring, or there was an offer before.
        """
        if not self._theirs or self._sends is not None:
            return None
        try:
            self._sends, descriptor = self._memory.share(num_bytes)
        except EngineError as error:
            self._on_way(f"the host's memory: {error.message}")
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            post(self._theirs, nonce, descriptor)
        except OSError as error:
            self._give_up(f"the other engine cannot be reached: {error}")
            return None
        finally:
            os.close(descriptor)
        self._ring, self.waits = Ring(num_bytes), True
        return nonce

    def answered(self, *, mapped: bool) -> None:
        """The other end has mapped the ring, or cannot."""
        if not self.waits:
            return
        self.waits, self._mapped = False, mapped
        if mapped:
            self._on_way("device memory")
        else:
            self._give_up("the other engine cannot map it")

    def takes(self, num_bytes: int) -> bool:
        """Whether a payload of this length goes this way, as soon as there is room."""
        ring = self._ring if self._mapped else None
        return ring is not None and LEAST_BYTES <= num_bytes <= ring.num_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether there is some now."""
        return self._ring is not None and self._ring.has_room(num_bytes)

    def place(self, number: int, payload: "Tensor") -> int | None:
        """Copies a payload into the ring; where it lies. None: it goes with its header.

        Args:
            number: of its frame.
            payload: a row of bytes.
        """
        if self._sends is None or self._ring is None or not self.takes(payload.nbytes):
            return None
        offset = self._ring.take(number, payload.nbytes)
        if offset is None:
            self._beside_bytes += payload.nbytes
            return None
        self._sends.write(offset, payload)
        self._gone_bytes += payload.nbytes
        return offset

    def taken(self, number: int) -> None:
        """The other end has read all frames up to this one."""
        if self._ring is not None:
            self._ring.give_back(number)

    def map(self, nonce: bytes, num_bytes: int) -> bool:
        """Maps the ring whose descriptor came with this nonce; False: it cannot."""
        if self._receives is not None or num_bytes > MAX_RING_BYTES:
            return False
        descriptor = self._mailbox.fetch(nonce)
        self._mailbox.close()
        if descriptor is None:
            return False
        try:
            self._receives = self._memory.map(descriptor, num_bytes)
        except EngineError as error:
            self._on_way(f"the host's memory: {error.message}")
            return False
        finally:
            os.close(descriptor)
        self._receives_bytes = num_bytes
        return True

    def holds(self, offset: int, num_bytes: int) -> bool:
        """Whether that is a place in the other end's ring."""
        return self._receives is not None and offset + num_bytes <= self._receives_bytes

    def fetch(self, placed: PlacedFrame) -> "Tensor":
        """A copy of a payload that came.

        Raises:
            PeerLost: this end was closed meanwhile.
        """
        if self._receives is None:
            raise PeerLost("the channel was closed before its last frames were taken")
        return self._receives.read(placed.offset, placed.num_bytes)

    def close(self) -> None:
        """Unmaps everything. Closing twice is closing once."""
        self._mailbox.close()
        if self._mapped:
            self._on_way(
                f"closed: {self._gone_bytes} bytes by device memory, {self._beside_bytes} had no room there"
            )
        self._mapped = self.waits = False
        for window in (self._sends, self._receives):
            if window is not None:
                window.close()
        self._sends = self._receives = None

    def _give_up(self, why: str) -> None:
        self._on_way(f"the host's memory: {why}")
        self._ring = None
        if self._sends is not None:
            self._sends.close()
            self._sends = None
        self._theirs = ""
