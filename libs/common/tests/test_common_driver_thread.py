"""Calls of a driver that may hang: in order, with what they give or raise, and waited for by
nothing.
"""

import asyncio
import threading

import pytest

from pilotlight.common.driver_thread import DriverThread


@pytest.mark.anyio
async def test_calls_that_hang_are_left_to_themselves() -> None:
    driver, goes_on = DriverThread("test"), threading.Event()
    hung = driver.call(lambda: goes_on.wait(20))
    after = driver.call(lambda: 7)

    def fails() -> None:
        raise ValueError("no")

    failed = driver.call(fails)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(hung), 0.05)
    assert not after.done()
    goes_on.set()
    assert await hung
    assert await after == 7
    with pytest.raises(ValueError, match="no"):
        await failed
    driver.close()
