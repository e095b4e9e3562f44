"""Threads that run blocking work for one event loop.

::

    loop      submit ─ submit ─ submit ─────────────── deliver (all that ended meanwhile)
    thread    work ─────────────── ended ─ wake │
    thread       work ──────────────── ended ───┘ no second wake

``ThreadPoolExecutor`` has a lock for each piece of work and wakes the loop for each that ends: of
chunks that come by the thousand in a second, that is a good part of what Python does.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple


class _Work(NamedTuple):
    future: asyncio.Future[Any]
    run: Callable[[], object]


class _Ended(NamedTuple):
    future: asyncio.Future[Any]
    result: object
    error: BaseException | None


class ReadThreads:
    """As many threads as there is work at once. They are made when they are needed, stay, and keep
    no process from ending: one may hang in a disk for ever.

    For the event loop alone.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = SimpleQueue[_Work | None]()
        self._ended = deque[_Ended]()
        self._is_woken = False
        self._unfinished = 0
        self._threads = 0
        self._stopped = False

    def submit(self, run: Callable[[], object]) -> "asyncio.Future[Any]":
        """Run it in a thread, now. The caller bounds how much runs at once.

        Raises:
            RuntimeError: ``stop`` was called.
        """
        if self._stopped:
            raise RuntimeError("the threads that read are stopped")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unfinished += 1
        self._queue.put(_Work(future, run))
        if self._unfinished > self._threads:
            name = f"{self._name}_{self._threads}"
            self._threads += 1
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def stop(self) -> None:
        """Begin nothing more. What has begun goes on, each in its thread, which then ends."""
        self._stopped = True
        try:
            while work := self._queue.get_nowait():
                work.future.cancel()
        except Empty:
            pass
        for _ in range(self._threads):
            self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            result, error = None, None
            try:
                result = work.run()
            except BaseException as raised:  # noqa: BLE001 - whatever it is, the loop is told
                error = raised
            loop = work.future.get_loop()
            self._ended.append(_Ended(work.future, result, error))
            # Nothing of it stays while the next is waited for.
            del work, result, error
            if not self._is_woken:
                self._is_woken = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    return  # The loop was closed: the thread hung in a read for long.

    def _deliver(self) -> None:
        # Before looking: what ends from now on wakes again.
        self._is_woken = False
        while self._ended:
            future, result, error = self._ended.popleft()
            self._unfinished -= 1
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
