"""A channel between processes, over a connected stream socket: what those over Unix sockets and
over TCP share.

::

    frame    [ magic 4 | kind 1 | 3 zero | header bytes 4 | payload bytes 8 )[ header )[ payload )
    credit   the same prefix, with the number of frames taken in place of the header's bytes

and between ends that have told each other of their devices (``device_path``), as control and as one
more kind of frame::

    ring     the same prefix, with the ring's bytes in place of the payload's, and a nonce
    mapped   the same prefix, with 1 in place of the header's bytes, or 0: it cannot be
    placed   a frame without its payload: the header begins with the 8 bytes of its place in the ring

Nothing waits in ``send`` for the socket's own buffer: what it does not take stays here and leaves
whenever this end is looked at. So a ring of stages that all send at the same time does not lock up.
"""

import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING

import numpy

from pilotlight.engine.channel.channel import WINDOW_FRAMES, Frame, PlacedFrame, PolledChannel
from pilotlight.engine.channel.device_path import MAX_RING_BYTES, RING_BYTES, DevicePath
from pilotlight.engine.channel.mailbox import NONCE_BYTES
from pilotlight.engine.errors import PeerLost, PeerSilent

if TYPE_CHECKING:
    from torch import Tensor

MAX_GATHERED = 16
"""Pieces that are handed to the system at once."""
PATIENCE_MS = 5
"""How long a sender watches a socket whose other end reads nothing, before it turns to something
else."""

_PREFIX = Struct("<4sB3xIQ")
_MAGIC = b"PLch"
_PLACE = Struct("<Q")
_FRAME, _CREDIT, _RING, _MAPPED, _PLACED = range(5)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Beyond these, the other end is not one of ours."""

    header_bytes: int = 64 << 20
    payload_bytes: int = 4 << 30
    ring_bytes: int = MAX_RING_BYTES


class StreamChannel(PolledChannel):
    """One end, over a socket that it owns from now on."""

    def __init__(
        self,
        connection: socket.socket,
        monotonic_s: Callable[[], float],
        window: int = WINDOW_FRAMES,
        limits: FrameLimits | None = None,
    ) -> None:
        super().__init__(monotonic_s, window)
        self._socket = connection
        self._socket.setblocking(False)
        self._outbox: deque[memoryview] = deque()
        self._window = window
        self._limits = limits or FrameLimits()
        """Of frames whose header has not come yet."""
        self._path: DevicePath | None = None
        self._sent, self._credited = 0, 0
        """Frames that were sent; and those of them that the other end has taken."""
        self._prefix = memoryview(bytearray(_PREFIX.size))
        self._expect(self._prefix, self._on_prefix)

    def interest(self) -> tuple[int, int]:
        return self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0)

    def close(self) -> None:
        self._lost = self._lost or "it was closed here"
        self._socket.close()
        self.carry(None)

    def carry(self, path: DevicePath | None) -> None:
        """Has a way for payloads beside it from now on, which is its own; None: it has none."""
        if self._path is not None and self._path is not path:
            self._path.close()
        self._path = path

    def offer_device(self, ring_bytes: int = RING_BYTES) -> None:
        """Payloads that lie on the device here are to go to the other end's device, if they can:
        nothing waits for that, and until it is so they go as they did.
        """
        if self._path is None or self._lost is not None:
            return
        nonce = self._path.offer(ring_bytes)
        if nonce is not None:
            prefix = _PREFIX.pack(_MAGIC, _RING, len(nonce), ring_bytes)
            self._outbox.append(memoryview(prefix + nonce))
            self._write()

    def carries_device(self, timeout_s: float = 0.0) -> bool:
        """Whether they can; waits so long for the other end's answer to an offer.

        Raises:
            PeerLost: the other end is gone.
        """
        path = self._path
        if path is None:
            return False
        with suppress(PeerSilent):
            self._wait_until(lambda: not path.waits, timeout_s, "has not answered")
        return path.carries

    def _put(self, frame: Frame) -> None:
        self._sent += 1
        payload = frame.payload
        place = None if isinstance(payload, memoryview) else self._place(payload)
        if place is None:
            prefix = _PREFIX.pack(_MAGIC, _FRAME, len(frame.header), payload.nbytes)
            parts = (prefix + frame.header, frame.in_host)
        else:
            header = _PLACE.pack(place) + frame.header
            parts = (_PREFIX.pack(_MAGIC, _PLACED, len(header), payload.nbytes) + header,)
        self._outbox.extend(memoryview(part) for part in parts if len(part))
        self._flush()

    def _place(self, payload: "Tensor") -> int | None:
        """Where in the ring a payload lies now, if it goes that way."""
        path, num_bytes = self._path, payload.nbytes
        if path is None:
            return None
        if path.takes(num_bytes) and not path.has_room(num_bytes):
            # The other end takes what is there in less time than this would need another way.
            with suppress(PeerSilent):
                self._wait_until(
                    lambda: path.has_room(num_bytes), PATIENCE_MS / 1000, "gives no room"
                )
        return path.place(self._sent, payload)

    def _flush(self) -> None:
        """Sends as long as the other end reads."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        self._write()
        while self._outbox and self._lost is None and poll.poll(PATIENCE_MS):
            self._write()

    def _grant(self) -> None:
        if self._lost is None:
            self._outbox.append(memoryview(_PREFIX.pack(_MAGIC, _CREDIT, 1, 0)))
            self._write()

    def _pump(self) -> None:
        if self._lost is None:
            self._write()
        while self._lost is None and self._read():
            pass

    def _write(self) -> None:
        try:
            while self._outbox:
                self._forget(self._socket.sendmsg(list(islice(self._outbox, MAX_GATHERED))))
        except BlockingIOError:
            return
        except OSError as error:
            # What it sent before it went is read all the same.
            while self._lost is None and self._read():
                pass
            self._lose(str(error))

    def _forget(self, sent: int) -> None:
        """Drops the first bytes of the outbox: the system has them."""
        while sent:
            first = self._outbox[0]
            if sent < len(first):
                self._outbox[0] = first[sent:]
                return
            sent -= len(self._outbox.popleft())

    def _read(self) -> bool:
        """Reads once; False if there was nothing."""
        try:
            count = self._socket.recv_into(self._wanted[self._filled :])
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(str(error))
            return False
        if not count:
            self._lose("it hung up")
            return False
        self._filled += count
        if self._filled == len(self._wanted):
            self._arrived()
        return True

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._outbox.clear()

    def _expect(self, into: memoryview, then: Callable[[], None]) -> None:
        """Has the next bytes go into a buffer; when it is full, the rest follows."""
        self._wanted, self._filled, self._arrived = into, 0, then
        if not into:
            then()

    def _on_prefix(self) -> None:
        magic, kind, header_bytes, payload_bytes = _PREFIX.unpack(self._prefix)
        limits = self._limits
        known = (_FRAME, _CREDIT) if self._path is None else range(_PLACED + 1)
        if magic != _MAGIC or kind not in known:
            self._lose("it sends what is no frame")
        elif kind == _CREDIT:
            self._credits += header_bytes
            self._credited += header_bytes
            if self._path is not None:
                self._path.taken(self._credited)
            self._expect(self._prefix, self._on_prefix)
        elif kind == _MAPPED:
            assert self._path is not None
            self._path.answered(mapped=header_bytes == 1)
            self._expect(self._prefix, self._on_prefix)
        elif kind == _RING:
            self._on_ring(header_bytes, payload_bytes)
        elif (
            header_bytes > limits.header_bytes
            or payload_bytes > limits.payload_bytes
            or len(self._inbox) >= self._window
        ):
            self._lose(
                f"it sends more than it may: a header of {header_bytes} and a payload of {payload_bytes} bytes"
            )
        elif kind == _PLACED:
            self._on_placed(header_bytes, payload_bytes)
        else:
            self._receive(header_bytes, payload_bytes)

    def _on_ring(self, nonce_bytes: int, ring_bytes: int) -> None:
        if nonce_bytes != NONCE_BYTES or not 0 < ring_bytes <= self._limits.ring_bytes:
            self._lose(f"it offers a ring of {ring_bytes} bytes")
            return
        nonce = _room(nonce_bytes)

        def come() -> None:
            mapped = self._path is not None and self._path.map(bytes(nonce), ring_bytes)
            self._outbox.append(memoryview(_PREFIX.pack(_MAGIC, _MAPPED, int(mapped), 0)))
            self._expect(self._prefix, self._on_prefix)
            self._write()

        self._expect(nonce, come)

    def _on_placed(self, header_bytes: int, payload_bytes: int) -> None:
        header = _room(header_bytes)

        def come() -> None:
            place = _PLACE.unpack(header[: _PLACE.size])[0] if header_bytes >= _PLACE.size else None
            if place is None or self._path is None or not self._path.holds(place, payload_bytes):
                self._lose(f"it says that {payload_bytes} bytes lie where nothing is")
                return
            self._inbox.append(PlacedFrame(bytes(header[_PLACE.size :]), place, payload_bytes))
            self._expect(self._prefix, self._on_prefix)

        self._expect(header, come)

    def _fetch(self, came: Frame | PlacedFrame) -> Frame:
        if isinstance(came, Frame):
            return came
        if self._path is None:
            raise PeerLost("the channel was closed before its last frames were taken")
        return Frame(came.header, self._path.fetch(came))

    def _receive(self, header_bytes: int, payload_bytes: int) -> None:
        """Makes room for a frame.

        The system gives memory only for what comes of it, whatever was announced.
        """
        try:
            header, payload = _room(header_bytes), _room(payload_bytes)
        except MemoryError:
            self._lose(
                f"there is no memory for a header of {header_bytes} and a payload of {payload_bytes} bytes"
            )
            return
        self._expect(header, lambda: self._expect(payload, lambda: self._on_frame(header, payload)))

    def _on_frame(self, header: memoryview, payload: memoryview) -> None:
        self._inbox.append(Frame(bytes(header), payload))
        self._expect(self._prefix, self._on_prefix)


def _room(size_bytes: int) -> memoryview:
    """Memory that is not written to yet."""
    return numpy.empty(size_bytes, numpy.uint8).data
