"""One other node that chunks are asked of: the connection to it, kept, and the requests on it."""

import asyncio
import itertools
import random
import socket
from collections.abc import Callable
from contextlib import suppress

import structlog
from msgspec import structs

from pilotlight.checkpoint.digests import UNIT_DIGEST_BYTES
from pilotlight.common.clock import Clock
from pilotlight.common.errors import DeadlineExceeded, PeerRefused, PeerUnavailable, PilotlightError
from pilotlight.common.handshake import Identity
from pilotlight.common.messages.hold import Peer
from pilotlight.common.messages.link import (
    Ask,
    Enough,
    FromSender,
    NotHeld,
    Placed,
    Recorded,
    Refused,
    Region,
    Sent,
    Units,
)
from pilotlight.common.waiting import Backoff, cancel_all, pause, within
from pilotlight.dataplane.chunk_fill import ChunkWork, WrongBytes
from pilotlight.dataplane.link.connecting import CONNECT_S, connected
from pilotlight.dataplane.link.nixl_process import NixlFailed, ReadsMemory
from pilotlight.dataplane.link.one_sided import OneSidedReads
from pilotlight.dataplane.link.pull import Pull
from pilotlight.dataplane.link.sender import LinkObserver
from pilotlight.dataplane.link.state import LinkState
from pilotlight.dataplane.link.stream import FrameStream
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.link.wire import FrameKind, Head
from pilotlight.dataplane.origin import NotHere, RecordedNow
from pilotlight.policy.cluster import FetchPriority

log = structlog.get_logger()

LOOKS = 20
"""How often within the stall timeout a request is looked at."""
LIVED_S = 1.0
"""A connection that held for so long was a good one: what comes after it is a first failure."""
BEATS = 5
"""Signs of life that are asked for within the stall timeout."""
BACKOFF = Backoff(first_s=0.2, limit_s=10.0)
MAX_OUT = 4096
"""Requests that wait to be sent: more than all threads that read can have under way."""
PATIENCE = 3
"""This many stall timeouts without any byte are a stall, though the other node says that it is
well: it may wait for this one."""

RECORD_PATIENCE = 30
"""The same for a request that waits until the other node has read a part for the first time."""


class PeerLink:
    """The link to one node. ``keep`` runs in the link's thread, ``pull`` in any other."""

    def __init__(
        self,
        me: Identity,
        peer: Peer,
        thread: LinkThread,
        clock: Clock,
        observer: LinkObserver,
        *,
        stall_timeout_s: float,
        backoff: Backoff = BACKOFF,
        memory: ReadsMemory | None = None,
    ) -> None:
        """The link is made once ``keep`` runs.

        Args:
            me: What this node proves to the other one.
            peer: The other node.
            thread: The one that ``keep`` will run in.
            clock: Tells how long a connection lived.
            observer: Hears of bytes that come and of connections that are refused.
            stall_timeout_s: Seconds without a byte after which a pull stalls.
            backoff: Waits before the next attempt to connect.
            memory: Reads the other one's memory, where that can be done.
        """
        self.peer = peer
        self.state = LinkState.CONNECTING
        self._me = me
        self._clock = clock
        self._thread = thread
        self._observer = observer
        self._stall_timeout_s = stall_timeout_s
        self._backoff = backoff
        self._rng = random.Random()
        self._numbers = itertools.count(1)
        self._waiting: set[Pull] = set()
        self._pulls: dict[int, Pull] = {}
        self._out: asyncio.Queue[tuple[object, int]] | None = None
        self._sock: socket.socket | None = None
        self._frames = 0
        self._bytes = 0
        self._reads_memory = memory is not None
        self._one_sided = OneSidedReads(memory, peer.node_id, stall_timeout_s / 2, self)

    def pull(
        self, ask: Ask, work: ChunkWork, priority: Callable[[], FetchPriority] | None = None
    ) -> None:
        """Have a chunk's bytes written to ``work``, from ``ask.from_byte`` on. Blocks.

        ``priority`` is how much it matters at a moment: what began as a prefetch is asked for again
        when a cold start waits for it.

        Raises:
            NotHere: the node has not got it.
            RecordedNow: the answer to a request without a digest.
            PeerUnavailable: it cannot be reached, broke off, or gives nothing.
            WrongBytes: what it gives is wrong.
            Abandoned, HostPoolFull: as ``ChunkWork.write``.
        """
        pull = Pull(ask, work)
        self._thread.call(self._begin, pull)
        frames, gave, quiet, dry = self._frames, self._bytes, 0, 0
        patience = PATIENCE if ask.digest is not None else RECORD_PATIENCE
        try:
            while not pull.ended.wait(self._stall_timeout_s / LOOKS):
                work.check()
                quiet = (
                    quiet + 1
                    if self._frames == frames and self.state is not LinkState.CONNECTING
                    else 0
                )
                dry = dry + 1 if self._bytes == gave else 0
                frames, gave = self._frames, self._bytes
                if quiet >= LOOKS or dry >= patience * LOOKS:
                    raise self._stalled(quiet >= LOOKS)
                if not quiet:
                    work.sign()
                if priority is not None:
                    self._thread.call(self._matters, pull, priority())
        finally:
            self._thread.call(self._end, pull)
        if pull.error is not None:
            raise pull.error

    async def keep(self) -> None:
        """Make the connection, and make it again when it breaks, for ever."""
        failures = 0
        try:
            while True:
                since_s = self._clock.monotonic_s()
                try:
                    await self._live()
                except (PilotlightError, OSError) as error:
                    if self._clock.monotonic_s() - since_s > LIVED_S and self.state is LinkState.UP:
                        failures = 0
                    self._on_broken(error, told=failures > 0)
                await pause(self._backoff.delay_s(failures, self._rng))
                failures += 1
                self.state = LinkState.AGAIN
        finally:
            self._give_up("the link was given up")

    async def _live(self) -> None:
        """From one connection's begin to its end.

        Raises:
            PilotlightError, OSError: it broke, or could not be made.
        """
        connecting = connected(
            self.peer, self._me, self._stall_timeout_s / BEATS, one_sided=self._reads_memory
        )
        stream, self._sock = await within(
            CONNECT_S, connecting, f"connecting to {self.peer.node_id}"
        )
        try:
            await self._use(stream)
        finally:
            self._out = self._sock = None
            stream.close()

    async def _use(self, stream: FrameStream) -> None:
        """Carry requests until the connection breaks.

        Raises:
            PilotlightError, OSError: it did.
        """
        self._out = asyncio.Queue(MAX_OUT)
        self.state = LinkState.UP
        log.info("link is up", action="link_up", node=self.peer.node_id)
        for pull in sorted(self._waiting, key=lambda pull: (pull.ask.part, pull.ask.chunk)):
            self._send(pull)
        self._waiting.clear()
        writing = asyncio.create_task(
            self._write_for_ever(stream, self._out), name=f"requests to {self.peer.node_id}"
        )
        receiving = asyncio.create_task(
            self._receive_for_ever(stream), name=f"bytes from {self.peer.node_id}"
        )
        try:
            done, _ = await asyncio.wait({writing, receiving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.peer.node_id} takes no requests") from error
        finally:
            await cancel_all((writing, receiving))

    async def _write_for_ever(
        self, stream: FrameStream, out: "asyncio.Queue[tuple[object, int]]"
    ) -> None:
        while True:
            await stream.write(*await out.get())

    async def _receive_for_ever(self, stream: FrameStream) -> None:
        while (head := await stream.read_head()) is not None:
            self._frames += 1
            if head.kind is FrameKind.BYTES:
                await self._receive(stream, head)
            else:
                self._on_message(
                    await stream.read_control(head, FromSender), self._pulls.get(head.request)
                )
        raise PeerUnavailable(f"{self.peer.node_id} closed the connection")

    async def _receive(self, stream: FrameStream, head: Head) -> None:
        left = head.length
        while left:
            piece = await stream.read_some(left)
            left -= len(piece)
            self._bytes += len(piece)
            self._frames += 1
            pull = self._pulls.get(head.request)
            if pull is not None:
                try:
                    pull.work.write(piece)
                except Exception as error:  # noqa: BLE001 - the waiting request raises it
                    self._end(pull, error)
        self._observer.on_received(self.peer.node_id, head.length)

    def _on_message(self, message: object, pull: Pull | None) -> None:
        if isinstance(message, Refused):
            raise PeerRefused(f"{self.peer.node_id} ended the connection: {message.message}")
        if isinstance(message, Region):
            self._one_sided.offer(message)
        if pull is None:
            return
        match message:
            case Units():
                self._on_units(message, pull)
            case Placed():
                self._one_sided.place(pull.number, message)
            case Sent():
                if not self._one_sided.on_sent(pull.number):
                    self._end(pull)
            case NotHeld():
                self._end(pull, NotHere())
            case Recorded():
                self._end(pull, RecordedNow())
            case _:
                pass

    def _on_units(self, message: Units, pull: Pull) -> None:
        digests, size = message.digests, UNIT_DIGEST_BYTES
        try:
            if len(digests) % size:
                raise WrongBytes("the list of the units' digests is cut off")
            pull.work.expect([digests[at : at + size] for at in range(0, len(digests), size)])
        except Exception as error:  # noqa: BLE001 - the waiting request raises it
            self._end(pull, error)
            return
        if pull.work.position != pull.ask.from_byte:
            # What came before from elsewhere is not what the list says.
            self._forget(pull)
            self._send(pull)

    def _begin(self, pull: Pull) -> None:
        if pull.ended.is_set():
            return
        if self.state is LinkState.CONNECTING:
            self._waiting.add(pull)
        elif self.state is LinkState.UP:
            self._send(pull)
        else:
            pull.end(PeerUnavailable(f"{self.peer.node_id} cannot be reached"))

    def _send(self, pull: Pull) -> None:
        if self._out is None:
            pull.end(PeerUnavailable(f"{self.peer.node_id} cannot be reached"))
            return
        pull.number = next(self._numbers)
        self._pulls[pull.number] = pull
        is_one_sided = pull.ask.digest is not None and self._one_sided.begin(pull.number, pull.work)
        pull.ask = structs.replace(pull.ask, from_byte=pull.work.position, one_sided=is_one_sided)
        self._post(pull.ask, pull.number)

    def _matters(self, pull: Pull, priority: FetchPriority) -> None:
        if pull.ask.priority is FetchPriority.PREFETCH and priority is FetchPriority.COLD_START:
            pull.ask = structs.replace(pull.ask, priority=priority)
            if pull.number in self._pulls:
                self._forget(pull)
                self._send(pull)

    def _end(self, pull: Pull, error: BaseException | None = None) -> None:
        """A request is over, in whatever way: the other node may let go of the chunk."""
        self._waiting.discard(pull)
        self._forget(pull)
        pull.end(error)

    def on_read_bytes(self, size_bytes: int) -> None:
        """As ``OneSidedListener.on_read_bytes``."""
        self._frames += 1
        self._bytes += size_bytes
        self._observer.on_received(self.peer.node_id, size_bytes)

    def on_read_end(self, number: int, error: Exception | None) -> None:
        """As ``OneSidedListener.on_read_end``."""
        pull = self._pulls.get(number)
        if pull is not None and isinstance(error, NixlFailed):
            self._forget(pull)
            self._send(pull)
        elif pull is not None:
            self._end(pull, error)

    def _forget(self, pull: Pull) -> None:
        self._one_sided.give_up(pull.number)
        if self._pulls.pop(pull.number, None) is not None:
            self._post(Enough(), pull.number)

    def _post(self, message: object, number: int) -> None:
        try:
            if self._out is not None:
                self._out.put_nowait((message, number))
        except asyncio.QueueFull:
            self._break()

    def _stalled(self, is_silent: bool) -> PeerUnavailable:
        if is_silent:
            self._thread.call(self._break)
        said = "nothing came from it" if is_silent else "it gave no bytes, though it is well"
        return PeerUnavailable(f"{self.peer.node_id} stalled: {said}")

    def _break(self) -> None:
        """The connection is worth nothing any more: make another."""
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _give_up(self, why: str) -> None:
        self.state = LinkState.DOWN
        self._one_sided.stop()
        pulls = (*self._waiting, *self._pulls.values())
        self._waiting.clear()
        self._pulls.clear()
        for pull in pulls:
            pull.end(PeerUnavailable(f"{self.peer.node_id}: {why}"))

    def _on_broken(self, error: Exception, *, told: bool) -> None:
        message = error.message if isinstance(error, PilotlightError) else str(error)
        self._give_up(message)
        if isinstance(error, PeerRefused):
            self._observer.on_refused()
        if not told:
            code = error.code if isinstance(error, PilotlightError) else PeerUnavailable.code
            log.warning(
                "link is down", action="link_down", node=self.peer.node_id, code=code, error=message
            )
