"""Clients that leave before the end of their answers."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from types import TracebackType

from starlette.types import Message, Receive

from pilotlight.common.waiting import CANCEL_AGAIN_S


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class Receiving(ABC):
    """The ``receive`` of a connection that says so when its client has left: a task that waits for
    ``http.disconnect`` takes more memory than most of a request that waits.
    """

    @abstractmethod
    def __call__(self) -> Awaitable[Message]:
        """As of ASGI."""

    @abstractmethod
    def on_leave(self, call: Callable[[], None] | None) -> None:
        """Call this when the client leaves, or soon, where it has; None: call nothing any more."""


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
            self._receive.on_leave(self._cancel)
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

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        self._asked += 1
        self._worker.cancel()
        loop = asyncio.get_running_loop()
        self._again = loop.call_later(CANCEL_AGAIN_S, self._cancel)
