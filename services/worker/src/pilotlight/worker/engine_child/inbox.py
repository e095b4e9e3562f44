"""What an engine child's parent has said, in order: read as it comes, obeyed one by one."""

import math
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


FIRST_PART_S = 0.01
"""A stage that has all of its memory waits no longer for its first part before the rest of it is
set up. One that is in the host pool comes within one or two milliseconds."""


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
        self._buffer.add(data)
        return bool(data)

    def commands(self) -> Iterator[CommandFrame]:
        """Those that were read, each once; also those that are read meanwhile."""
        while self._read or self._decode():
            yield self._read.popleft()

    def parts_of(self, instance_id: InstanceId, most: int = EARLY_PARTS) -> list[PlacePart]:
        """The first parts of a stage that have arrived, which are commands still; no further ones
        are looked at than are asked for.
        """
        if self._has_come(0):
            self.read()  # That the parent is gone is found again.
        return self._parts_of(instance_id, min(most, EARLY_PARTS))

    def first_part_of(self, instance_id: InstanceId) -> list[PlacePart]:
        """The first part of a stage, as soon as it is here; nothing where it does not come in time,
        or something else comes, which is to be obeyed.
        """
        found = self.parts_of(instance_id, 1)
        while not (found or self._read) and self._has_come(FIRST_PART_S) and self.read():
            found = self._parts_of(instance_id, 1)
        return found

    def _has_come(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(math.ceil(wait_s * 1000)))

    def _parts_of(self, instance_id: InstanceId, most: int) -> list[PlacePart]:
        found: list[PlacePart] = []
        at = 0
        while len(found) < most and (at < len(self._read) or self._decode()):
            said = self._read[at].message
            if isinstance(said, PlacePart) and said.instance_id == instance_id:
                found.append(said)
            at += 1
        return found

    def _decode(self) -> bool:
        """One more command; False where none has come whole."""
        told = self._buffer.take()
        if told is not None:
            self._read.append(told)
        return told is not None
