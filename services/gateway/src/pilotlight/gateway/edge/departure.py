"""Clients that leave before the end of their answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from starlette.types import Message, Receive, Send

from pilotlight.common.waiting import CANCEL_AGAIN_S


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class Receiving:
    """The ``receive`` of a connection that says so when its client has left: a task that waits for
    ``http.disconnect`` takes more memory than most of a request that waits.

    What is read and written without waiting, most of all, need not pass ASGI's messages. Nothing
    happens where a method says None or False: ASGI's way is to be taken.
    """

    __slots__ = ()

    def __call__(self) -> Awaitable[Message]:
        """As of ASGI."""
        raise NotImplementedError

    def on_leave(self, call: Callable[[], None] | None) -> None:
        """Call this when the client leaves, or soon, where it has; None: call nothing any more."""
        raise NotImplementedError

    def sends(self, send: Send) -> bool:
        """Whether this ``send`` is the same connection's: nothing stands between."""
        return False

    def body_there(self) -> bytes | None:
        """The same as ``whole_body``, and it stays to be read."""
        return None

    def whole_body(self) -> bytes | None:
        """The request's body, where all of it is there."""
        return None

    def begin(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], data: bytes, *, more: bool
    ) -> bool:
        """Begin the answer.

        Args:
            status: of HTTP.
            headers: all of them; with ``content-length`` where there is no more.
            data: the first part of the body.
            more: other parts follow.
        """
        return False

    def go_on(self, data: bytes, *, more: bool) -> bool:
        """Send another part of the body; without ``more`` the last."""
        return False


class Connected:
    """Around what is done for a client, in the task that does it: cancels that when the client
    leaves, and as ``cancel_all`` more than once, for a cancellation may get lost.

    The request's body must have been read.

    Raises:
        ClientGone: in the place of the cancellation: the client left.
    """

    __slots__ = ("_again", "_asked", "_listening", "_receive", "_worker")

    def __init__(self, receive: Receive) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        self._worker = worker
        self._receive = receive
        self._asked = 0
        self._again: asyncio.TimerHandle | None = None
        self._listening: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        if isinstance(self._receive, Receiving):
            self._receive.on_leave(self)
        else:
            self._listening = asyncio.create_task(self._listen())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(self._receive, Receiving):
            self._receive.on_leave(None)
        if self._listening is not None:
            self._listening.cancel()
        if self._again is not None:
            self._again.cancel()
        # Another's cancellation goes on.
        own = self._asked and self._worker.cancelling() <= self._asked
        for _ in range(self._asked):
            self._worker.uncancel()
        if own and isinstance(error, asyncio.CancelledError):
            raise ClientGone from None

    def __call__(self) -> None:
        """The client has left."""
        self._asked += 1
        self._worker.cancel()
        loop = asyncio.get_running_loop()
        self._again = loop.call_later(CANCEL_AGAIN_S, self)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self()
