"""A channel between processes, over a connected Unix stream socket.

::

    frame    [ magic 4 | kind 1 | 3 zero | header bytes 4 | payload bytes 8 )[ header )[ payload )
    credit   the same prefix, with the number of frames taken in place of the header's bytes

Nothing waits in ``send`` for the socket's own buffer: what it does not take stays here and leaves whenever this end is looked at. So a
ring of stages that all send at the same time does not lock up.
"""

import select
import socket
from collections import deque
from collections.abc import Callable
from struct import Struct

from pilotlight.engine.channel.channel import WINDOW_FRAMES, Frame, PolledChannel

MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 4 << 30
"""Beyond these, the other end is not one of ours."""
PATIENCE_MS = 5
"""How long a sender watches a socket whose other end reads nothing, before it turns to something else."""

_PREFIX = Struct("<4sB3xIQ")
_MAGIC = b"PLch"
_FRAME, _CREDIT = 0, 1


class UnixChannel(PolledChannel):
    """One end, over a socket that it owns from now on."""

    def __init__(self, connection: socket.socket, monotonic_s: Callable[[], float], window: int = WINDOW_FRAMES) -> None:
        super().__init__(monotonic_s, window)
        self._socket = connection
        self._socket.setblocking(False)
        self._outbox: deque[memoryview] = deque()
        self._window = window
        self._expect(bytearray(_PREFIX.size), self._on_prefix)

    def interest(self) -> tuple[int, int]:
        return self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0)

    def close(self) -> None:
        self._lost = self._lost or "it was closed here"
        self._socket.close()

    def _put(self, frame: Frame) -> None:
        prefix = _PREFIX.pack(_MAGIC, _FRAME, len(frame.header), frame.payload.nbytes)
        self._outbox.extend(memoryview(part) for part in (prefix + frame.header, frame.payload) if len(part))
        self._flush()

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
                sent = self._socket.send(self._outbox[0])
                self._outbox[0] = self._outbox[0][sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            # What it sent before it went is read all the same.
            while self._lost is None and self._read():
                pass
            self._lose(str(error))

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
            self._arrived(self._buffer)
        return True

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._outbox.clear()

    def _expect(self, buffer: bytearray, then: Callable[[bytearray], None]) -> None:
        """Has the next bytes go into a buffer; when it is full, the rest follows."""
        self._buffer, self._wanted, self._filled, self._arrived = buffer, memoryview(buffer), 0, then
        if not buffer:
            then(buffer)

    def _on_prefix(self, prefix: bytearray) -> None:
        magic, kind, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        if magic != _MAGIC or kind not in (_FRAME, _CREDIT):
            self._lose("it sends what is no frame")
        elif kind == _CREDIT:
            self._credits += header_bytes
            self._expect(bytearray(_PREFIX.size), self._on_prefix)
        elif header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES or len(self._inbox) >= self._window:
            self._lose(f"it sends more than it may: a header of {header_bytes} and a payload of {payload_bytes} bytes")
        else:
            self._expect(bytearray(header_bytes), lambda header: self._on_header(header, payload_bytes))

    def _on_header(self, header: bytearray, payload_bytes: int) -> None:
        self._expect(bytearray(payload_bytes), lambda payload: self._on_payload(header, payload))

    def _on_payload(self, header: bytearray, payload: bytearray) -> None:
        self._inbox.append(Frame(bytes(header), memoryview(payload)))
        self._expect(bytearray(_PREFIX.size), self._on_prefix)
