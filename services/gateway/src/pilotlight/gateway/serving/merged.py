"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from pilotlight.common.waiting import cancel_all

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What the sources give, as it comes, until all have ended; as much as there are sources waits
    to be taken.

    Each is iterated and closed by one task; a single one by its caller's. The first error ends all
    of them, and overtakes what still waits here: sources that fail at once do so before anything is
    given.

    Raises:
        Exception: what a source raised.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield item
        return
    line: asyncio.Queue[T | None] = asyncio.Queue(len(sources))
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
                yield item
    finally:
        await cancel_all(tasks)


async def _drain(
    source: AsyncGenerator[T, None], line: asyncio.Queue[T | None], failures: list[Exception]
) -> None:
    try:
        async with aclosing(source) as items:
            async for item in items:
                await line.put(item)
    except Exception as error:  # noqa: BLE001 - raised again to the reader of the line
        failures.append(error)
    await line.put(None)
