"""The HTTP edge: clients that leave, and work that does not hear of it at once."""

import asyncio

import pytest

from pilotlight.gateway.edge.departure import ClientGone, Connected, Receiving

pytestmark = pytest.mark.anyio


class Telling(Receiving):
    """A connection that tells of its client's end by itself; it is not asked for messages."""

    def __init__(self, left: bool) -> None:
        self.left = left
        self.call = None

    def __call__(self):
        raise AssertionError

    def on_leave(self, call):
        self.call = call
        if self.left and call is not None:
            asyncio.get_running_loop().call_soon(call)


async def _for_ever():
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def _gone():
    return {"type": "http.disconnect"}


@pytest.fixture(params=["asgi", "telling"])
def for_ever(request):
    return _for_ever if request.param == "asgi" else Telling(left=False)


@pytest.fixture(params=["asgi", "telling"])
def gone(request):
    return _gone if request.param == "asgi" else Telling(left=True)


async def while_connected(receive, work):
    with Connected(receive):
        return await work


async def test_result_of_the_work(for_ever):
    async def work():
        return 7

    assert await while_connected(for_ever, work()) == 7


async def test_error_of_the_work(for_ever):
    async def work():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(for_ever, work())


async def test_client_gone_cancels(gone):
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(ClientGone):
        await while_connected(gone, work())
    assert cancelled.is_set()


async def test_a_lost_cancellation_is_repeated(gone):
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


async def test_nothing_is_left_of_the_cancellation(gone):
    async def work():
        await asyncio.Event().wait()

    with pytest.raises(ClientGone):
        await while_connected(gone, work())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_elsewhere_goes_on(for_ever):
    begun = asyncio.Event()

    async def work():
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(while_connected(for_ever, work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_connection_is_told_to_call_no_more():
    receive = Telling(left=False)
    with Connected(receive):
        assert receive.call is not None
    assert receive.call is None


async def test_work_that_ends_all_the_same_has_its_result(gone):
    """It swallows the cancellation, as a library's ``wait_for`` may."""

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7

    assert await while_connected(gone, work()) == 7
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
