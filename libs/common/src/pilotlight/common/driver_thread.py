"""Blocking calls of a driver, which may never return, in a thread of their own that no exit waits
for.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class DriverThread:
    """One thread, which makes one call after the other.

    The process ends without waiting for it: a call may hang for ever.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Has it called after what was asked for before; its result, or what it raises."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((function, answer))
        if not self._thread.is_alive():
            self._thread.start()
        return answer

    def close(self) -> None:
        """Ends the thread after what was asked for, if that ever ends."""
        self._calls.put(None)

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            function, answer = asked
            try:
                result, error = function(), None
            except Exception as raised:  # noqa: BLE001 - the caller gets it
                result, error = None, raised
            with suppress(RuntimeError):  # The loop is closed: no caller is left.
                answer.get_loop().call_soon_threadsafe(_tell, answer, result, error)


def _tell(answer: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
