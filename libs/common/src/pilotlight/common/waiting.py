"""Waiting with a limit. The only module that may sleep; all others wait for something to happen."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from pilotlight.common.errors import DeadlineExceeded

T = TypeVar("T")

CANCEL_AGAIN_S = 0.2
"""Longer than a task that has heard of its cancellation takes to end, if it has nothing to clean
up."""
GROUP_AGAIN_S = 1.0
"""The same for one that may have a transaction to roll back."""


async def pause(seconds: float) -> None:
    """Let time pass: for periodic work that has no event to wait for."""
    await asyncio.sleep(seconds)  # noqa: TID251 - this is the one place


def block(seconds: float) -> None:
    """As ``pause``, in a thread that may block."""
    time.sleep(seconds)  # noqa: TID251 - this is the one place


async def within(deadline_s: float, awaitable: Awaitable[T], what: str) -> T:
    """Await with a deadline.

    Raises:
        DeadlineExceeded: it took longer; the awaitable is cancelled.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} took longer than {deadline_s:g} s") from error


async def woken(event: asyncio.Event, at_most_s: float) -> bool:
    """Wait for an event and clear it; False when ``at_most_s`` passed first."""
    try:
        async with asyncio.timeout(at_most_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


class Signal:
    """Wakes every task that waits at this moment. For one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def send(self) -> None:
        """Something changed."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, at_most_s: float | None = None) -> None:
        """Return when something changes, or after this number of seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._event.wait()


async def cancel_all(
    tasks: Iterable[asyncio.Task[Any]], *, again_s: float = CANCEL_AGAIN_S
) -> None:
    """Cancel tasks and return when they have ended; what they raise is not raised here.

    Asks more than once: until Python 3.12, ``asyncio.wait_for`` (and so every library that uses it)
    loses a cancellation that comes in the same turn of the loop as the result it waits for. Asking
    again breaks a clean-up off that is under way: give ``again_s`` where one takes longer.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=again_s)
        for task in done:
            if not task.cancelled():
                task.exception()


class Group(asyncio.TaskGroup):
    """A task group that an error ends while the body runs, the body's or that of a task; every
    other task ends with it.

    As ``cancel_all`` it asks more than once: ``asyncio.TaskGroup`` alone waits for ever for a task
    that has lost its cancellation. So does this one when a task fails after the body's end: it is
    for bodies that run as long as their tasks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: set[asyncio.Task[Any]] = set()

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, name=name, context=context)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def __aexit__(
        self, et: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        while et is not None and self._running:
            with suppress(asyncio.CancelledError):
                # A second cancellation changes nothing: there is nothing that could be done faster.
                await cancel_all(self._running, again_s=GROUP_AGAIN_S)
        await super().__aexit__(et, exc, tb)


async def every(seconds: float) -> AsyncIterator[None]:
    """Yield now and then every ``seconds``, counted from the end of the body: a slow body never
    piles up.
    """
    while True:
        yield
        await pause(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential delays with full jitter."""

    first_s: float = 0.05
    factor: float = 2.0
    limit_s: float = 5.0

    def delay_s(self, attempt: int, rng: random.Random) -> float:
        """Delay before try ``attempt`` + 1; attempts count from 0."""
        ceiling = min(self.limit_s, self.first_s * self.factor ** min(attempt, 32))
        return rng.uniform(ceiling / 2, ceiling)
