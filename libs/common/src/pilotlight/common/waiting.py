"""Waiting with a limit. The only module that may sleep; everyone else waits for something to happen."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

from pilotlight.common.errors import DeadlineExceeded

T = TypeVar("T")


async def pause(seconds: float) -> None:
    """Let time pass: for periodic work that has no event to wait for."""
    await asyncio.sleep(seconds)  # noqa: TID251 - this is the one place


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


async def every(seconds: float) -> AsyncIterator[None]:
    """Yield now and then every ``seconds``, counted from the end of the body: a slow body never piles up."""
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
