"""A socket as a stream of frames, in the event loop of a link's thread.

The thin part: what frames mean is told elsewhere.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from pilotlight.common.errors import MessageUndecodable
from pilotlight.dataplane.link.steering import Steering
from pilotlight.dataplane.link.wire import (
    HEADER,
    FrameKind,
    Head,
    control_frame,
    decode_control,
    parse_head,
)

READ_BYTES = 512 * 1024
"""Taken from a socket at once, at most."""
WAKE_BYTES = 32 * 1024
"""How many of a unit's bytes are waited for at once, or what is left of it. Less than a packet may
hold (64 KiB within a host): a sender that sends one packet for each acknowledgement would wait for
ours, and we for its next packet."""
UNSENT_BYTES = 256 * 1024
"""That the system keeps unsent for one connection: little, so that what matters more need not wait
behind it."""
COPY_BYTES = 256 * 1024
SLOW_S = 30.0
"""A peer that takes no byte for so long has hung up without a word."""


@contextmanager
def _broken_as_such() -> Generator[None]:
    """Uvloop has closed its handle of a connection that was reset, and says so to the next wait for
    it in words of its own.
    """
    try:
        yield
    except RuntimeError as error:
        raise ConnectionResetError(f"the connection was reset: {error}") from error


class FrameStream:
    """One connection.

    One task reads, one writes bytes; control frames may be written by any task of the loop.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._sock = sock
        self._steering = Steering(sock)
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.Lock()
        self._head = memoryview(bytearray(HEADER.size))
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._sendfile_works = True
        self._wakes_at = 1
        self._is_within_frame = False
        """A frame was begun and not ended: nothing else may be sent any more, or it would be taken
        for the rest of it."""

    def close(self) -> None:
        """Let go of it."""
        self._sock.close()

    async def read_head(self) -> Head | None:
        """The next frame's header; None at the stream's end.

        Raises:
            MessageUndecodable, MessageTooLarge: it is none.
            OSError: the connection broke.
        """
        if not await self._fill(self._head):
            return None
        return parse_head(self._head)

    async def read_control(self, head: Head, as_type: Any) -> Any:
        """The body of a control frame.

        Raises:
            MessageUndecodable: it is none of these messages.
        """
        with self._buffer[: head.length] as body:
            if not await self._fill(body) and head.length:
                raise MessageUndecodable("the stream ended within a frame")
            return decode_control(body, as_type)

    async def read_message(self, as_type: Any) -> Any:
        """The next frame, where nothing but a control message may come; None at the stream's end.

        Raises as the two above.
        """
        head = await self.read_head()
        if head is None:
            return None
        if head.kind is not FrameKind.CONTROL:
            raise MessageUndecodable("bytes come where a message should")
        return await self.read_control(head, as_type)

    async def read_some(self, at_most: int) -> memoryview:
        """Some bytes of a frame's body; good until the next read.

        Raises:
            MessageUndecodable: the stream ended.
        """
        self._wake_at(min(at_most, WAKE_BYTES))
        with _broken_as_such():
            count = await self._loop.sock_recv_into(
                self._sock, self._buffer[: min(at_most, READ_BYTES)]
            )
        if not count:
            raise MessageUndecodable("the stream ended within a frame")
        # Acknowledged at once, not 40 ms later: when a receiver has hung for a while, BBR takes
        # that delay for the link's speed.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return self._buffer[:count]

    async def write(self, message: object, request: int = 0) -> None:
        """Send a control message; it goes between frames.

        Raises:
            OSError: the connection broke, or has broken off within a frame.
            TimeoutError: the peer took nothing for ``SLOW_S``.
        """
        data = control_frame(message, request)
        async with self._writing, asyncio.timeout(SLOW_S):
            self._begin_frame()
            with _broken_as_such():
                await self._loop.sock_sendall(self._sock, data)
            self._is_within_frame = False

    async def write_file(
        self,
        head: bytes,
        descriptor: int,
        offset: int,
        size_bytes: int,
        moved: Callable[[int], None],
    ) -> None:
        """Send a frame whose body lies in a file.

        Args:
            head: The frame's head, encoded.
            descriptor: Of the open file.
            offset: Where the body begins in the file, in bytes.
            size_bytes: The body's length.
            moved: Told of how many bytes more the system took, as it takes them.

        Raises:
            OSError: the connection broke.
            TimeoutError: the peer took nothing for ``SLOW_S``.
        """
        async with self._writing:
            self._begin_frame()
            await self._send(head)
            done = 0
            while done < size_bytes:
                try:
                    count = self._send_file(descriptor, offset + done, size_bytes - done)
                except (BlockingIOError, InterruptedError):
                    await self._writable()
                    continue
                if count == 0:
                    raise OSError("the host pool's file is shorter than it should be")
                done += count
                self._steering.look()
                moved(count)
            self._is_within_frame = False

    def _begin_frame(self) -> None:
        if self._is_within_frame:
            raise OSError("a frame was broken off")
        self._is_within_frame = True

    def _send_file(self, descriptor: int, offset: int, size_bytes: int) -> int:
        if self._sendfile_works:
            try:
                return os.sendfile(self._sock.fileno(), descriptor, offset, size_bytes)
            except BlockingIOError:
                raise
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                # Files on hugetlbfs cannot be sent from.
                self._sendfile_works = False
        return self._sock.send(os.pread(descriptor, min(size_bytes, COPY_BYTES), offset))

    async def _send(self, head: bytes) -> None:
        """A header, with the word that more comes at once."""
        done = 0
        while done < len(head):
            try:
                done += self._sock.send(head[done:], socket.MSG_MORE)
            except (BlockingIOError, InterruptedError):
                await self._writable()

    async def _writable(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()

        def ready() -> None:
            if not future.done():
                future.set_result(None)

        with _broken_as_such():
            self._loop.add_writer(self._sock.fileno(), ready)
        try:
            async with asyncio.timeout(SLOW_S):
                await future
        finally:
            self._loop.remove_writer(self._sock.fileno())

    def _wake_at(self, size_bytes: int) -> None:
        """Sleep until this many bytes are there: on a slow link they come in hundreds of small
        packets.
        """
        if size_bytes != self._wakes_at:
            self._wakes_at = size_bytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    async def _fill(self, view: memoryview) -> bool:
        self._wake_at(1)
        done = 0
        while done < len(view):
            with _broken_as_such():
                count = await self._loop.sock_recv_into(self._sock, view[done:])
            if not count:
                if done:
                    raise MessageUndecodable("the stream ended within a frame")
                return False
            done += count
        return True
