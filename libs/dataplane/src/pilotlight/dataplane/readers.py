"""The threads that read, how long they are waited for, and how what they do is given up."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from pilotlight.common.errors import SourceUnavailable
from pilotlight.dataplane.priority_semaphore import (
    Permit,
    PrioritySemaphore,
    Rank,
    Recalled,
    in_order_of_arrival,
)
from pilotlight.dataplane.read_threads import ReadThreads

LOOKS = 4
"""How often within the stall timeout a read is looked at: it stalls when nothing has come between
this many looks."""

SPARES = 4
"""For each thread, how many more may hang, given up: one that stalls must not keep others from
reading from elsewhere."""

T = TypeVar("T")


class Abandoned(Exception):
    """What is being read is not awaited any more."""


class Counting(Protocol):
    """Work that counts by itself, while it goes on."""

    @property
    def done_bytes(self) -> int:
        """Bytes that came; any thread may look."""
        ...


class ReadProgress:
    """Counts the bytes of one read, across threads, and ends it once no fetch waits for it."""

    def __init__(self) -> None:
        self.signs = 0
        self.abandoned = False
        self._bytes = 0
        self._followed: Counting | None = None

    def __call__(self, count: int) -> None:
        """Told of bytes as they come."""
        self._bytes += count
        self.check()

    @property
    def bytes(self) -> int:
        """Bytes that came."""
        followed = self._followed
        return self._bytes + (followed.done_bytes if followed is not None else 0)

    def follow(self, work: Counting) -> None:
        """Count what comes of work that counts by itself, until ``unfollow``."""
        self._followed = work

    def unfollow(self) -> None:
        """The work has ended; what came of it stays counted."""
        if self._followed is not None:
            count, self._followed = self._followed.done_bytes, None
            self._bytes += count

    @property
    def moves(self) -> int:
        """Changes whenever something happened: a read stalls when nothing does."""
        return self.bytes + self.signs

    def sign(self) -> None:
        """Told that no bytes came, and yet they are on their way."""
        self.signs += 1

    def check(self) -> None:
        """For a reader that waits for bytes.

        Raises:
            Abandoned: no fetch waits for them any more.
        """
        if self.abandoned:
            raise Abandoned


class Readers:
    """The threads that read, apart from all others, so that a disk that hangs holds up nothing but
    fetches.
    """

    def __init__(self, threads: int, stall_timeout_s: float) -> None:
        self.threads = threads
        self.stall_timeout_s = stall_timeout_s
        # At most (1 + SPARES) * threads: as many permits, and as many reads that were given up.
        self._threads = ReadThreads("fetch")
        self._permits = PrioritySemaphore(threads)
        self._running: dict[asyncio.Future[Any], tuple[ReadProgress, Permit]] = {}
        self._given_up: set[asyncio.Future[Any]] = set()
        self._ended = 0

    async def submit(
        self,
        work: Callable[[ReadProgress], T],
        progress: ReadProgress,
        rank: Rank = in_order_of_arrival,
        recalled: asyncio.Event | None = None,
    ) -> "asyncio.Future[T]":
        """Start blocking work as soon as a thread is idle.

        Args:
            work: Runs in the thread, and is given ``progress``.
            progress: Counts what the work reads.
            rank: The work's among all that wait for a thread.
            recalled: Set when the thread is wanted for what matters more; None: the work goes on.

        Raises:
            SourceUnavailable: none became idle, and no byte came to any of them, for the stall
                timeout.
            Recalled: ``recalled`` was set before one did.
        """
        permit = self._permits.take_now(rank, recalled) or await self._permit(rank, recalled)
        future = self._threads.submit(partial(work, progress))
        self._running[future] = progress, permit
        future.add_done_callback(self._on_done)
        return future

    async def _permit(self, rank: Rank, recalled: asyncio.Event | None) -> Permit:
        waiting = asyncio.ensure_future(self._permits.take(rank, recalled))
        try:
            if not await self.ended(waiting, self._moved, recalled):
                raise SourceUnavailable(
                    f"the sources hang: no thread that reads got a byte for {self.stall_timeout_s:g} s"
                )
        except BaseException:
            if not waiting.cancel() and not waiting.cancelled():
                self._permits.give_back(waiting.result())
            raise
        return waiting.result()

    def give_up(self, future: "asyncio.Future[Any]") -> None:
        """A read is not awaited any more: let others read, though its thread may hang on."""
        if future in self._running and len(self._given_up) < SPARES * self.threads:
            self._permits.give_back(self._running.pop(future)[1])
            self._given_up.add(future)

    async def ended(
        self,
        future: "asyncio.Future[Any]",
        moved: Callable[[], object],
        recalled: asyncio.Event | None = None,
    ) -> bool:
        """Wait for a future as long as something moves; False once nothing has for the stall
        timeout.

        Raises:
            Recalled: the event was set first.
        """
        calling = asyncio.ensure_future(recalled.wait()) if recalled is not None else None
        awaited: set[asyncio.Future[Any]] = {future} if calling is None else {future, calling}
        seen, still = moved(), 0
        try:
            while still < LOOKS:
                done, _ = await asyncio.wait(
                    awaited,
                    timeout=self.stall_timeout_s / LOOKS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if future in done:
                    return True
                if done:
                    raise Recalled
                now = moved()
                seen, still = now, still + 1 if now == seen else 0
            return False
        finally:
            if calling is not None:
                calling.cancel()

    def stop(self) -> None:
        """Take no more work."""
        self._threads.stop()

    def _moved(self) -> tuple[int, int]:
        return self._ended, sum(progress.moves for progress, _ in self._running.values())

    def _on_done(self, future: "asyncio.Future[Any]") -> None:
        if future in self._running:
            self._permits.give_back(self._running.pop(future)[1])
        self._given_up.discard(future)
        self._ended += 1
        if not future.cancelled():
            # Its reader may have given it up as stalled; then no other asks.
            future.exception()


class Reading:
    """The blocking work of one fetch.

    Given up or cancelled, a piece of it ends as soon as its thread gets another byte.
    """

    def __init__(self, readers: Readers, rank: Rank = in_order_of_arrival) -> None:
        """``rank`` is how much the fetch matters."""
        self._readers = readers
        self._rank = rank
        self._busy: set[asyncio.Future[Any]] = set()

    async def run(
        self,
        what: str,
        work: Callable[[ReadProgress], T],
        progress: ReadProgress | None = None,
        rank: Rank | None = None,
        recalled: asyncio.Event | None = None,
    ) -> T:
        """Run work in a thread.

        Args:
            what: What is read, for the error's message.
            work: Runs in the thread, and is given ``progress``.
            progress: Counts what the work reads; None: a new one.
            rank: Of this piece of work; None: the fetch's.
            recalled: Set when the thread is wanted for what matters more; None: the work goes on.

        Raises:
            SourceUnavailable: it stalled: no byte came for the stall timeout.
            Recalled: ``recalled`` was set. The thread ends with its next byte.
        """
        progress = progress or ReadProgress()
        future = await self._readers.submit(work, progress, rank or self._rank, recalled)
        self._busy.add(future)
        future.add_done_callback(self._busy.discard)
        try:
            if not await self._readers.ended(future, lambda: progress.moves, recalled):
                raise SourceUnavailable(
                    f"{what} stalled: no bytes for {self._readers.stall_timeout_s:g} s"
                )
        finally:
            progress.abandoned = True
            self._readers.give_up(future)
        return future.result()

    @property
    def busy(self) -> bool:
        """Whether a thread still works for this fetch."""
        return bool(self._busy)

    async def settled(self) -> None:
        """Return when no thread works for it any more."""
        while self._busy:
            await asyncio.wait(self._busy)
