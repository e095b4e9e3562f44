"""A way between two nodes that a test can hold up, cut, or disturb at any byte."""

import asyncio
from contextlib import suppress

from pilotlight.common.messages.hold import Peer

PIECE_BYTES = 64 * 1024


class GatedLink:
    """Passes on what one node sends to another, up to a number of bytes for all connections
    together.
    """

    def __init__(self, allowed_bytes: int | None = None) -> None:
        self.allowed_bytes = allowed_bytes
        """None: no limit."""
        self.passed_bytes = 0
        """From the node that gives."""
        self.connections = 0
        self.flipped_at: int | None = None
        """The byte, counted as ``passed_bytes``, that comes out wrong."""
        self._opened = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._target: Peer | None = None

    async def start(self, target: Peer) -> Peer:
        """Stand before a node; where the others find it now."""
        self._target = target
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return Peer(
            node_id=target.node_id, host="127.0.0.1", port=self._server.sockets[0].getsockname()[1]
        )

    def open(self) -> None:
        """Hold nothing up any more."""
        self.allowed_bytes = None
        self._opened.set()

    @property
    def is_held_up(self) -> bool:
        """Whether all that may pass has."""
        return self.allowed_bytes is not None and self.passed_bytes >= self.allowed_bytes

    async def cut(self) -> None:
        """End every connection, as a node's death does, and take no other."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._target is not None
        self.connections += 1
        try:
            to_reader, to_writer = await asyncio.open_connection(
                self._target.host, self._target.port
            )
        except OSError:
            # The node is dead: so is everything that leads to it.
            writer.close()
            return
        self._writers |= {writer, to_writer}
        for work in (
            self._pass(reader, to_writer, counted=False),
            self._pass(to_reader, writer, counted=True),
        ):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with suppress(ConnectionError):
            while True:
                size_bytes = PIECE_BYTES
                if counted and self.allowed_bytes is not None:
                    size_bytes = min(size_bytes, self.allowed_bytes - self.passed_bytes)
                    if size_bytes <= 0:
                        self._opened.clear()
                        await self._opened.wait()
                        continue
                data = bytearray(await reader.read(size_bytes))
                if not data:
                    break
                if counted:
                    at = None if self.flipped_at is None else self.flipped_at - self.passed_bytes
                    if at is not None and 0 <= at < len(data):
                        data[at] ^= 1
                    self.passed_bytes += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
