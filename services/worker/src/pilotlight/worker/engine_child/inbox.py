"""What an engine child's parent has said, in order: read as it comes, obeyed one by one."""

import select
import socket
from collections import deque
from collections.abc import Iterator

from pilotlight.common.messages.codec import FrameBuffer
from pilotlight.common.messages.engine import CommandFrame, PlacePart
from pilotlight.policy.ids import InstanceId

RECEIVE_BYTES = 1024 * 1024
EARLY_PARTS = 24
"""Of a stage, whose copies begin as soon as it is set up: as much as the bus has to do while
recorded kernels are read and the first token is rehearsed."""


class Inbox:
    """Commands that were read, and are not obeyed yet."""

    def __init__(self, connection: socket.socket) -> None:
        """Reads nothing yet."""
        self._connection = connection
        self._buffer = FrameBuffer(CommandFrame)
        self._read: deque[CommandFrame] = deque()

    def read(self) -> bool:
        """Takes what has arrived, or waits for it; False when the parent is gone."""
        data = self._connection.recv(RECEIVE_BYTES)
        self._read.extend(self._buffer.feed(data))
        return bool(data)

    def commands(self) -> Iterator[CommandFrame]:
        """Those that were read, each once; also those that are read meanwhile."""
        while self._read:
            yield self._read.popleft()

    def parts_of(self, instance_id: InstanceId) -> list[PlacePart]:
        """The first parts of a stage that have arrived, which are commands still."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if poll.poll(0):
            self.read()  # That the parent is gone is found again.
        said = (one.message for one in self._read)
        parts = (one for one in said if isinstance(one, PlacePart))
        return [one for one in parts if one.instance_id == instance_id][:EARLY_PARTS]
