"""The thread that moves bytes between nodes: an event loop of its own, so that nothing else waits
for bytes, nor bytes for it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog
import uvloop

from pilotlight.common.waiting import cancel_all

log = structlog.get_logger()

STOP_S = 5.0


class LinkThread:
    """One such thread. Its methods may be called in any other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.died: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Gets the error of a task that ended with one: a bug."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Its event loop, while it runs."""
        if self._loop is None:
            raise RuntimeError(f"{self._name} does not run")
        return self._loop

    def start(self) -> None:
        """Run from now on."""
        if self._thread is not None:
            return
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop,), name=self._name, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End every task, and the thread. Blocks for a moment."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        with suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(cancel_all(self._tasks), loop).result(STOP_S)
        self._thread = self._loop = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(STOP_S)

    def call(self, what: Callable[..., object], *args: object) -> None:
        """Call something in the thread, soon. Nothing happens once it has stopped."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(what, *args)

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run a task in the thread until it ends, is cancelled, or the thread is stopped."""

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(work, name=name)
            self._tasks.add(task)
            task.add_done_callback(self._on_done)

        self.loop.call_soon_threadsafe(begin)

    def cancel(self, name: str) -> None:
        """Cancel the tasks of this name."""
        self.call(lambda: [task.cancel() for task in self._tasks if task.get_name() == name])

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error(
                "task of the link died",
                action="link_task_died",
                task=task.get_name(),
                exc_info=error,
            )
            if not self.died.done():
                self.died.set_exception(error)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
