"""The sender's end of a link: one connection of a node that asks this one for chunks, its requests,
and the task that sends.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.common.clock import Clock
from pilotlight.common.errors import BadRequest, DeadlineExceeded
from pilotlight.common.messages.link import (
    Ask,
    Enough,
    NotHeld,
    Placed,
    Recorded,
    Region,
    Sent,
    Units,
    Waiting,
)
from pilotlight.common.waiting import cancel_all, woken
from pilotlight.dataplane.link.offers import Offer, Offers, Ticket
from pilotlight.dataplane.link.stream import SLOW_S, FrameStream
from pilotlight.dataplane.link.wire import FrameKind, bytes_head
from pilotlight.dataplane.link.yielding import Yielding
from pilotlight.dataplane.origin import NotHere
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import NodeId

log = structlog.get_logger()

SHORTEST_BEAT_S, LONGEST_BEAT_S = 0.02, 5.0
"""A receiver that waits hears that its bytes are on their way as often as it wants, within these.
"""
MAX_REQUESTS = 512
"""Of one connection, at once."""
MAX_OFFERED = 4
"""Chunks that the other node was told to read and has not acknowledged: what is offered goes at its
own speed, whatever comes next."""

T = TypeVar("T")


class ReadableMemory(Protocol):
    """Lets other nodes read this host pool by one-sided reads. Any thread."""

    @property
    def region(self) -> Region | None:
        """What they have to know; None while they cannot."""
        ...

    def offset_of(self, file_offset: int) -> int:
        """Where a place of the pool's file lies in the region."""
        ...

    def stir(self) -> None:
        """Bytes are about to be read, or are still being read: said at least every
        ``LONGEST_BEAT_S``.
        """
        ...


class LinkObserver(Protocol):
    """Hears what goes over links. Calls come in any thread and must not block."""

    def on_sent(self, node_id: NodeId, size_bytes: int) -> None:
        """``size_bytes`` of chunks went to a node."""
        ...

    def on_received(self, node_id: NodeId, size_bytes: int) -> None:
        """``size_bytes`` of chunks came from a node, verified or not."""
        ...

    def on_refused(self) -> None:
        """A connection was refused, by this node or by another."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    ask: Ask
    arrival: int
    position: int
    ticket: Ticket = field(default_factory=Ticket)
    offer: Offer | None = None
    is_recorded: bool = False
    is_missing: bool = False
    is_placed: bool = False
    """The receiver reads its bytes itself."""
    has_units: bool = False
    """The list of the chunk's units was sent."""
    over_s: float | None = None
    """When its last word was sent."""

    @property
    def order(self) -> tuple[bool, int]:
        return self.ask.priority is not FetchPriority.COLD_START, self.arrival


@dataclass(slots=True, kw_only=True)
class Sender:
    """Serves one authenticated connection. For the event loop of the link."""

    peer: NodeId
    beat_s: float
    """How often the other node wants a sign of life."""
    stream: FrameStream
    offers: Offers
    pool_loop: asyncio.AbstractEventLoop
    """Where the offers live."""
    yielding: Yielding
    clock: Clock
    observer: LinkObserver
    memory: ReadableMemory | None = None
    """Where the other node can read it."""
    _told: Region | None = None
    _requests: dict[int, _Request] = field(default_factory=dict[int, _Request])
    _finding: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    _arrivals: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def run(self) -> None:
        """Serve until the other node closes the connection.

        Raises:
            PilotlightError: it does not keep to the protocol, or takes nothing any more.
            OSError: the connection broke.
        """
        reading = asyncio.create_task(self._read_for_ever(), name=f"requests of {self.peer}")
        sending = asyncio.create_task(self._send_for_ever(), name=f"bytes for {self.peer}")
        try:
            done, _ = await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.peer} took nothing for {SLOW_S:g} s") from error
        finally:
            await cancel_all((reading, sending, *self._finding.values()))
            for number in tuple(self._requests):
                self._let_go(number)

    async def _read_for_ever(self) -> None:
        while (head := await self.stream.read_head()) is not None:
            if head.kind is not FrameKind.CONTROL:
                raise BadRequest(f"{self.peer} sends bytes that nobody asked for")
            message = await self.stream.read_control(head, Ask | Enough)
            if isinstance(message, Enough):
                self._let_go(head.request)
                continue
            if head.request in self._requests or len(self._requests) >= MAX_REQUESTS:
                raise BadRequest(
                    f"{self.peer} has more than {MAX_REQUESTS} requests, or two of one number"
                )
            request = _Request(head.request, message, self._arrivals(), message.from_byte)
            request.is_placed = message.one_sided and self._told is not None
            self._requests[request.number] = request
            self._finding[request.number] = asyncio.create_task(
                self._find(request), name=f"find a chunk for {self.peer}"
            )

    async def _find(self, request: _Request) -> None:
        try:
            if request.ask.digest is None:
                await self._in_pool(self.offers.until_whole(request.ask, request.ticket))
                request.is_recorded = True
            else:
                offer = await self._in_pool(self.offers.find(request.ask, request.ticket))
                if offer.needs_units:
                    await asyncio.to_thread(offer.learn_units)
                if offer.held.fill is not None:
                    offer.held.fill.watch(self._moved)
                request.offer = offer
        except NotHere:
            request.is_missing = True
        except Exception:  # the receiver must hear something
            log.exception(
                "chunk could not be looked for", action="link_find_failed", node=self.peer
            )
            request.is_missing = True
        self._wake.set()

    async def _in_pool(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.pool_loop))

    def _moved(self) -> None:
        """In any thread: more of a chunk may be sent."""
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            # The link has stopped.
            return

    def _let_go(self, number: int) -> None:
        request = self._requests.pop(number, None)
        finding = self._finding.pop(number, None)
        if finding is not None:
            finding.cancel()
        if request is None:
            return
        self._wake.set()
        if request.offer is not None and request.offer.held.fill is not None:
            request.offer.held.fill.unwatch(self._moved)
        self.pool_loop.call_soon_threadsafe(self.offers.let_go, request.ticket)

    async def _send_for_ever(self) -> None:
        beat_s, spoke_s = (
            min(max(self.beat_s, SHORTEST_BEAT_S), LONGEST_BEAT_S),
            self.clock.monotonic_s(),
        )
        while True:
            self._wake.clear()
            await self._tell_region()
            request = self._next()
            delay_s = (
                beat_s
                if request is None
                else self.yielding.delay_s(request.ask.priority, self.clock.monotonic_s())
            )
            if request is not None and delay_s <= 0:
                await self._send(request)
            else:
                self._check_late()
                if self.memory is not None and any(
                    request.is_placed for request in self._requests.values()
                ):
                    self.memory.stir()
                await woken(self._wake, min(delay_s, beat_s))
                if not self._requests or self.clock.monotonic_s() - spoke_s < beat_s:
                    continue
                # Also to a receiver that waits because others come first.
                await self.stream.write(Waiting())
            spoke_s = self.clock.monotonic_s()

    def _next(self) -> _Request | None:
        """The first request, in order, for which there is something to send."""
        offered = sum(
            request.is_placed and request.over_s is not None for request in self._requests.values()
        )
        ready = (
            request
            for request in self._requests.values()
            if request.over_s is None
            and (offered < MAX_OFFERED or not request.is_placed)
            and _is_ready(request)
        )
        return min(ready, key=lambda request: request.order, default=None)

    async def _send(self, request: _Request) -> None:
        if request.is_recorded or request.is_missing or request.offer is None:
            await self._end(request, Recorded() if request.is_recorded else NotHeld())
            return
        offer, prefix = request.offer, request.offer.prefix()
        if not request.has_units and prefix.units is not None:
            request.has_units = True
            await self.stream.write(Units(digests=b"".join(prefix.units)), request.number)
        elif request.position < prefix.size_bytes:
            stop = min(prefix.size_bytes, (request.position // UNIT_BYTES + 1) * UNIT_BYTES)
            await self._send_bytes(request, offer, stop)
        else:
            await self._end(request, NotHeld() if prefix.is_lost else Sent())

    async def _send_bytes(self, request: _Request, offer: Offer, stop: int) -> None:
        start, priority = request.position, request.ask.priority

        def moved(count: int) -> None:
            self.yielding.sent(priority, self.clock.monotonic_s())

        request.position = stop
        if request.is_placed and self.memory is not None:
            placed = Placed(
                offset=self.memory.offset_of(offer.file_offset + start), size_bytes=stop - start
            )
            self.memory.stir()
            await self.stream.write(placed, request.number)
            moved(stop - start)
            self.observer.on_sent(self.peer, stop - start)
            return
        head = bytes_head(request.number, stop - start)
        await self.stream.write_file(
            head, offer.descriptor, offer.file_offset + start, stop - start, moved
        )
        self.observer.on_sent(self.peer, stop - start)

    async def _tell_region(self) -> None:
        region = self.memory.region if self.memory is not None else None
        if region is not None and region != self._told:
            self._told = region
            await self.stream.write(region)

    async def _end(self, request: _Request, message: object) -> None:
        request.over_s = self.clock.monotonic_s()
        await self.stream.write(message, request.number)

    def _check_late(self) -> None:
        now_s = self.clock.monotonic_s()
        if any(
            request.over_s is not None and now_s - request.over_s > SLOW_S
            for request in self._requests.values()
        ):
            raise DeadlineExceeded(
                f"{self.peer} did not say within {SLOW_S:g} s that it has a chunk that was sent"
            )


def _is_ready(request: _Request) -> bool:
    if request.is_missing or request.is_recorded:
        return True
    if request.offer is None:
        return False
    prefix = request.offer.prefix()
    if not request.has_units and prefix.units is not None:
        return True
    is_at_end = request.has_units and request.position == request.offer.size_bytes
    return is_at_end or request.position < prefix.size_bytes or prefix.is_lost
