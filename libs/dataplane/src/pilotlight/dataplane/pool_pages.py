"""Has the system give the host pool its memory ahead, in the background, so that a fetch need not
wait for it.

::

    pool    [given by the system ........)[ STEP )[ not yet ...............)

A step at a time in each thread, none while a fetch goes on, and none that would make files leave
the system's memory.

A page that is there already costs a fetch nothing but its own bytes: a new one has to be found,
cleared and mapped, which takes half as long again as reading and hashing what comes there.
"""

import asyncio
import os
import threading
from collections.abc import Callable

import structlog

from pilotlight.checkpoint.free_memory import MemoryFacts, memory_facts, untaken_bytes
from pilotlight.dataplane.pool import HostPool
from pilotlight.native.library import Library
from pilotlight.native.reads import populate

log = structlog.get_logger()

STEP_BYTES = 8 * 1024 * 1024
"""What is taken at once: some milliseconds."""
LEFT_BYTES = 2 * 1024**3
"""Memory that nothing has and that is left to others."""
BUSY_S = 0.05
"""How long a fetch that goes on is waited for, before it is looked at again."""
NICE = 19
STOP_S = 10.0


class PoolPages:
    """Some threads, which end when the pool has all its memory, or the system has no more to
    spare.
    """

    def __init__(
        self,
        pool: HostPool,
        library: Library,
        is_busy: Callable[[], bool],
        facts: Callable[[], MemoryFacts] = memory_facts,
        threads: int = 1,
    ) -> None:
        """Prepare it.

        Args:
            pool: Whose memory is taken.
            library: Whose functions are called.
            is_busy: Whether a fetch goes on; called in the threads.
            facts: What the system has of memory.
            threads: How many steps are taken at a time; one fills one core.
        """
        self.given_bytes = 0
        """From the start of the pool's data on, with the steps that are under way."""
        self._pool = pool
        self._library = library
        self._is_busy = is_busy
        self._facts = facts
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="pool pages", daemon=True)
            for _ in range(threads)
        ]

    async def start(self) -> None:
        """Begin, unless it has begun; it goes on behind everything else."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    async def stop(self) -> None:
        """End after the steps that are under way."""
        self._stopping.set()
        alive = [thread for thread in self._threads if thread.is_alive()]
        await asyncio.gather(*(asyncio.to_thread(thread.join, STOP_S) for thread in alive))

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came.

        Args:
            timeout_s: For each thread.
        """
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopping.is_set():
            if self._is_busy():
                self._stopping.wait(BUSY_S)
                continue
            with self._lock:
                at, step_bytes = self.given_bytes, self._step_bytes()
                self.given_bytes += step_bytes
            if not step_bytes:
                return
            try:
                with self._pool.memory(at, step_bytes) as memory:
                    populate(self._library, memory)
            except (OSError, ValueError) as error:
                # Its file system is smaller than it, or it was closed.
                if not self._stopping.is_set():
                    log.warning(
                        "the pool gets no memory",
                        action="pool_pages_end",
                        given_bytes=at,
                        error=str(error),
                    )
                self._stopping.set()

    def _step_bytes(self) -> int:
        """Of the next step; 0: there is none."""
        step_bytes = min(STEP_BYTES, self._pool.geometry.data_bytes - self.given_bytes)
        if not step_bytes or self._stopping.is_set():
            return 0
        spare = untaken_bytes(self._facts())
        # What others are at is not theirs yet by that.
        at_once = STEP_BYTES * (len(self._threads) - 1)
        if spare is None or spare < LEFT_BYTES + at_once + step_bytes:
            log.info(
                "the pool is left without some of its memory",
                action="pool_pages_end",
                given_bytes=self.given_bytes,
            )
            self._stopping.set()
            return 0
        return step_bytes
