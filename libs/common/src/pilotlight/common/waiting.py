"""Waiting with a limit. The only module that may sleep; all others wait for something to happen."""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

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
    """Await with a deadline. There is no timer where there is nothing to wait for.

    Raises:
        DeadlineExceeded: it took longer; the awaitable is cancelled.
    """
    try:
        begun = Begun(awaitable)
        if begun.ended:
            return begun.result()
        async with asyncio.timeout(deadline_s):
            return await begun
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} took longer than {deadline_s:g} s") from error


class Begun(Awaitable[T]):
    """What is awaited, up to the first thing that it waits for; to be awaited by the same task."""

    __slots__ = ("_result", "_steps", "_waits_for", "ended")

    def __init__(self, awaitable: Awaitable[T]) -> None:
        self._steps = awaitable.__await__()
        self._waits_for: object = None
        self._result: list[T] = []
        try:
            self._waits_for = next(self._steps)
        except StopIteration as end:
            self._result.append(end.value)
        self.ended = bool(self._result)

    def result(self) -> T:
        """What came of one that has ended."""
        return self._result[0]

    def __await__(self) -> Generator[object, object, T]:
        while True:
            try:
                yield self._waits_for
            except BaseException as error:  # noqa: BLE001 - goes where a plain await would send it
                step = partial(self._steps.throw, error)
            else:
                step = partial(next, self._steps)
            try:
                self._waits_for = step()
            except StopIteration as end:
                return end.value
            finally:
                # It may have an error, whose traceback has this frame: all that is in its frames,
                # such as open connections, would stay until the collector comes.
                del step


async def woken(event: asyncio.Event, at_most_s: float) -> bool:
    """Wait for an event and clear it; False when ``at_most_s`` passed first."""
    if event.is_set():
        event.clear()
        return True
    try:
        async with asyncio.timeout(at_most_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


class Wake:
    """As ``woken`` on an event of its own, for one task that waits very often."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Something happened."""
        self._set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """What happened has been seen."""
        self._set = False

    async def wait(self, at_most_s: float) -> bool:
        """Wait until something happens and take it for seen; False when ``at_most_s`` passed
        first.
        """
        if not self._set:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(at_most_s, _resolve, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        happened, self._set = self._set, False
        return happened


class SharedTimers:
    """Limits for very many that wait for long: one timer of the loop for all that end within one
    step. A timer of its own takes 0.6 KB.
    """

    def __init__(self, step_s: float) -> None:
        """``step_s`` is how much later than asked a wait may end."""
        self._step_s = step_s
        self._steps: dict[int, list[asyncio.Future[bool]]] = {}
        """What ends with each; what happened before is kept until then."""

    def limit(self, waiter: "asyncio.Future[bool]", at_most_s: float) -> None:
        """Resolve it with False when so much time has passed, if nothing else has."""
        loop = waiter.get_loop()
        step = math.ceil((loop.time() + max(0.0, at_most_s)) / self._step_s)
        if step not in self._steps:
            self._steps[step] = []
            loop.call_at(step * self._step_s, self._end, step)
        self._steps[step].append(waiter)

    def _end(self, step: int) -> None:
        for waiter in self._steps.pop(step):
            if not waiter.done():
                waiter.set_result(False)


class Flag:
    """As ``asyncio.Event`` for one task that waits: that has room for many, which takes as much
    memory as all else of a small task.
    """

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """It was set, and not cleared since."""
        return self._set

    def set(self) -> None:
        """Let the task go on, now or when it waits."""
        self._set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """Let it wait."""
        self._set = False

    async def wait(self) -> Literal[True]:
        """Until it is set."""
        if not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True


def _resolve(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


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
