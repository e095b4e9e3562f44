"""Several sources of items as one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pilotlight.common.waiting import cancel_all

T = TypeVar("T")
Taker = Callable[[T], Awaitable[None]]
Source = Callable[[Taker[T]], Awaitable[None]]
"""Gives what it has to the taker, and returns when there is no more."""


def merged(sources: Sequence[Source[T]], take: Taker[T]) -> Awaitable[None]:
    """Take what the sources give, as it comes, until all have ended; as much as there are sources
    waits to be taken.

    Each runs in one task; a single one in its caller's, without a layer between. The first error
    ends all of them, and overtakes what still waits here: sources that fail at once do so before
    anything is taken.

    Raises:
        Exception: what a source or the taker raised.
    """
    return sources[0](take) if len(sources) == 1 else _merged(sources, take)


async def _merged(sources: Sequence[Source[T]], take: Taker[T]) -> None:
    line: asyncio.Queue[tuple[T] | None] = asyncio.Queue(len(sources))
    failures: list[Exception] = []
    tasks = [
        asyncio.create_task(_drain(source, line, failures), name=f"stream {index}")
        for index, source in enumerate(sources)
    ]
    running = len(tasks)
    try:
        while running:
            item = await line.get()
            if failures:
                raise failures[0]
            if item is None:
                running -= 1
            else:
                await take(item[0])
    finally:
        await cancel_all(tasks)


async def _drain(
    source: Source[T], line: asyncio.Queue[tuple[T] | None], failures: list[Exception]
) -> None:
    async def put(item: T) -> None:
        await line.put((item,))

    try:
        await source(put)
    except Exception as error:  # noqa: BLE001 - raised again to the taker of the line
        failures.append(error)
    await line.put(None)
