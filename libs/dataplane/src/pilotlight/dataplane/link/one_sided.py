"""The receiver's end of a link whose bytes it reads itself from the other node's memory; all else
of a request goes its usual way.

::

    sender, over TCP    Region           Units (1)    Placed (1)   Placed (1)   Sent (1)
    receiver            learn                         read         read             the last read's end is the request's
    bytes                                             ....landed    ....landed    written to the pool in order, and verified

Where a read fails, takes too long or gives wrong bytes, the link's requests are asked for again
over TCP, and so is everything until the other node offers its memory anew, the process that reads
is another one, or the connection is made again.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.common.messages.link import Placed, Region
from pilotlight.dataplane.chunk_fill import ChunkWork, WrongBytes
from pilotlight.dataplane.link.nixl_process import NixlFailed, ReadsMemory
from pilotlight.dataplane.link.nixl_reads import UnitRead
from pilotlight.policy.ids import NodeId

log = structlog.get_logger()

WINDOW = 8
"""Reads under way on one link: enough for any link, and few enough that a slow one leaves slots for
others."""


class OneSidedListener(Protocol):
    """Hears of what was asked for. Calls come within the event loop of the link."""

    def on_read_bytes(self, size_bytes: int) -> None:
        """``size_bytes`` came, verified or not."""
        ...

    def on_read_end(self, number: int, error: Exception | None) -> None:
        """A request's bytes are all there; ``NixlFailed``: ask for them over TCP.

        Other errors are those of ``ChunkWork.write``.
        """
        ...


@dataclass(slots=True, eq=False)
class _Request:
    """A request that is read one-sided."""

    number: int
    work: ChunkWork
    placed_bytes: int
    """From the chunk's start on: the other node said where they lie."""
    reads: deque[tuple[int, UnitRead]] = field(default_factory=deque[tuple[int, UnitRead]])
    """In order, with where in the chunk each begins."""
    is_sent: bool = False


class OneSidedReads:
    """The reads of one link. For its event loop."""

    def __init__(
        self,
        memory: ReadsMemory | None,
        node_id: NodeId,
        deadline_s: float,
        listener: OneSidedListener,
    ) -> None:
        """Nothing is read before ``offer``.

        Args:
            memory: Reads; None: nothing ever is.
            node_id: The other node's, for logs.
            deadline_s: A read that is not done within so many seconds has failed.
            listener: Hears of bytes and of ends.
        """
        self._memory = memory
        self._node_id = node_id
        self._deadline_s = deadline_s
        self._listener = listener
        self._region: Region | None = None
        self._learned: tuple[Region, int] | None = None
        """By what process which memory can be read,"""
        self._failed: tuple[Region, int] | None = None
        """and by which it cannot."""
        self._peer = 0
        self._learning: asyncio.Task[None] | None = None
        self._requests: dict[int, _Request] = {}
        self._queue: deque[UnitRead] = deque()
        self._under_way: set[UnitRead] = set()

    def offer(self, region: Region) -> None:
        """The other node lets its memory be read."""
        self._region = region
        self._is_usable()

    def begin(self, number: int, work: ChunkWork) -> bool:
        """Whether a request is to be read one-sided; if not, its bytes have to come over TCP."""
        if not self._is_usable():
            return False
        self._requests[number] = _Request(number, work, work.position)
        return True

    def place(self, number: int, message: Placed) -> None:
        """The other node has told where the next bytes of a request lie."""
        request, region = self._requests.get(number), self._region
        if request is None or region is None:
            return
        start, stop = request.placed_bytes, request.placed_bytes + message.size_bytes
        is_unit = (
            message.size_bytes > 0
            and start // UNIT_BYTES == (stop - 1) // UNIT_BYTES
            and stop <= request.work.size_bytes
        )
        if (
            not is_unit
            or message.offset < 0
            or message.offset + message.size_bytes > region.size_bytes
        ):
            self._fail("it says that bytes lie where there are none")
            return
        read = UnitRead(
            self._peer,
            region.address + message.offset,
            message.size_bytes,
            self._deadline_s,
            lambda ended: self._on_read(request, ended),
        )
        request.placed_bytes = stop
        request.reads.append((start, read))
        self._queue.append(read)
        self._pump()

    def on_sent(self, number: int) -> bool:
        """The other node has told of all bytes of a request; whether
        ``OneSidedListener.on_read_end`` will say when they are here.
        """
        request = self._requests.get(number)
        if request is None or not request.reads:
            return False
        request.is_sent = True
        return True

    def give_up(self, number: int) -> None:
        """A request is over. What is still read for it is thrown away."""
        request = self._requests.pop(number, None)
        for _, read in request.reads if request is not None else ():
            read.is_wanted = False
            self._release(read)
        self._pump()

    def stop(self) -> None:
        """The connection has ended."""
        self._queue.clear()
        for number in tuple(self._requests):
            self.give_up(number)
        if self._learning is not None:
            self._learning.cancel()
        if (
            self._memory is not None
            and self._learned is not None
            and self._learned[1] == self._memory.generation
        ):
            self._memory.forget(self._peer)
        self._region = self._learned = self._failed = self._learning = None

    def _is_usable(self) -> bool:
        if self._memory is None or self._region is None:
            return False
        now = self._region, self._memory.generation
        if now not in (self._learned, self._failed) and (
            self._learning is None or self._learning.done()
        ):
            self._learning = asyncio.create_task(
                self._learn(self._memory, self._region), name=f"memory of {self._node_id}"
            )
        return now == self._learned and now != self._failed

    async def _learn(self, memory: ReadsMemory, region: Region) -> None:
        try:
            self._peer = await memory.learn(region)
        except NixlFailed as error:
            self._failed = region, memory.generation
            self._warn(str(error))
        else:
            self._learned = region, memory.generation
            log.info("bytes go by NIXL", action="link_by_nixl", node=self._node_id)

    def _pump(self) -> None:
        while self._memory is not None and self._queue and len(self._under_way) < WINDOW:
            read = self._queue.popleft()
            if read.is_wanted:
                self._under_way.add(read)
                self._memory.read(read)

    def _on_read(self, request: _Request, read: UnitRead) -> None:
        self._under_way.discard(read)
        if read.error is not None:
            self._fail(read.error)
            return
        self._write_landed(request)
        self._pump()

    def _write_landed(self, request: _Request) -> None:
        """Write what has landed to the pool, as far as nothing before it is missing."""
        while request.reads and (view := request.reads[0][1].view) is not None:
            start, read = request.reads.popleft()
            try:
                if start != request.work.position:
                    raise WrongBytes("they are not those that are missing")
                request.work.write(view)
            except WrongBytes as error:
                # Not held against the sender before they were wrong over TCP as well.
                self._fail(f"the bytes that were read are wrong: {error}")
                return
            except Exception as error:  # noqa: BLE001 - the request raises it
                self._end(request, error)
                return
            finally:
                self._release(read)
            self._listener.on_read_bytes(read.size_bytes)
        if request.is_sent and not request.reads:
            self._end(request, None)

    def _end(self, request: _Request, error: Exception | None) -> None:
        if request.number in self._requests:
            self.give_up(request.number)
            self._listener.on_read_end(request.number, error)

    def _fail(self, why: str) -> None:
        """No more of it on this link: everything is asked for over TCP."""
        if self._failed != self._learned:
            self._failed = self._learned
            self._warn(why)
        self._queue.clear()
        for request in tuple(self._requests.values()):
            self._end(request, NixlFailed(why))

    def _warn(self, why: str) -> None:
        log.warning(
            "link goes on over TCP", action="link_nixl_failed", node=self._node_id, error=why
        )

    def _release(self, read: UnitRead) -> None:
        self._under_way.discard(read)
        if self._memory is not None:
            self._memory.release(read)
