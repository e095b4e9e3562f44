"""Has the system give the host pool its memory ahead, in the background, so that a fetch need not
wait for it.

::

    pool    [given by the system ........)[ STEP )[ not yet ...............)

One step at a time, none while a fetch goes on, and none that would make files leave the system's
memory.

A page that is there already costs a fetch nothing but its own bytes: a new one has to be found,
cleared and mapped, which takes half as long again as reading and hashing what comes there.
"""

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
    """One thread, which ends when the pool has all its memory, or the system has no more to
    spare.
    """

    def __init__(
        self,
        pool: HostPool,
        library: Library,
        is_busy: Callable[[], bool],
        facts: Callable[[], MemoryFacts] = memory_facts,
    ) -> None:
        """Prepare it.

        Args:
            pool: Whose memory is taken.
            library: Whose functions are called.
            is_busy: Whether a fetch goes on; called in the thread.
            facts: What the system has of memory.
        """
        self.given_bytes = 0
        """From the start of the pool's data on."""
        self._pool = pool
        self._library = library
        self._is_busy = is_busy
        self._facts = facts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool pages", daemon=True)

    async def start(self) -> None:
        """Begin; it goes on behind everything else."""
        self._thread.start()

    async def stop(self) -> None:
        """End after the step that is under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        total_bytes = self._pool.geometry.data_bytes
        while self.given_bytes < total_bytes and not self._stopping.is_set():
            if self._is_busy():
                self._stopping.wait(BUSY_S)
                continue
            step_bytes = min(STEP_BYTES, total_bytes - self.given_bytes)
            spare = untaken_bytes(self._facts())
            if spare is None or spare < LEFT_BYTES + step_bytes:
                log.info(
                    "the pool is left without some of its memory",
                    action="pool_pages_end",
                    given_bytes=self.given_bytes,
                )
                return
            try:
                with self._pool.memory(self.given_bytes, step_bytes) as memory:
                    populate(self._library, memory)
            except (OSError, ValueError) as error:
                # Its file system is smaller than it, or it was closed.
                log.warning(
                    "the pool gets no memory",
                    action="pool_pages_end",
                    given_bytes=self.given_bytes,
                    error=str(error),
                )
                return
            self.given_bytes += step_bytes
