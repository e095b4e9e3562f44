"""The HTTP edge: clients that leave, and work that does not hear of it at once."""

import asyncio

import pytest

from pilotlight.gateway.edge.http import ClientGone, while_connected

pytestmark = pytest.mark.anyio


async def for_ever():
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def gone():
    return {"type": "http.disconnect"}


async def test_result_of_the_work():
    async def work():
        return 7

    assert await while_connected(for_ever, work()) == 7


async def test_error_of_the_work():
    async def work():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(for_ever, work())


async def test_client_gone_cancels():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(ClientGone):
        await while_connected(gone, work())
    assert cancelled.is_set()


async def test_a_lost_cancellation_is_repeated():
    """As when a library's ``wait_for`` swallows one."""
    cancels = 0

    async def work():
        nonlocal cancels
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancels += 1
                if cancels == 3:
                    raise

    with pytest.raises(ClientGone):
        await while_connected(gone, work())
    assert cancels == 3
