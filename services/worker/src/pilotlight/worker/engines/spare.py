"""A second engine child that waits: it has imported what an engine needs, which is most of a start,
and has no device yet.

::

    engine is up ──> pause ──> spawn, import at low priority ──> ready ──> promoted when the engine has died
                       ^                                  |         |
                       └──────── longer each time ────────┴── dies ─┘
"""

import asyncio
import random

import structlog

from pilotlight.common.envelope import Timed
from pilotlight.common.errors import EngineFailed, PilotlightError
from pilotlight.common.messages.codec import read_frame, write_frame
from pilotlight.common.messages.engine import EventFrame, Promote, SpareReady
from pilotlight.common.waiting import Backoff, cancel_all, pause, within
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.child_process import Child, bury, kill_group, spawn

log = structlog.get_logger()

IMPORT_DEADLINE_S = 300.0
"""At low priority on busy cores an import takes its time; nothing waits for it."""
PROMOTE_DEADLINE_S = 1.0
BACKOFF = Backoff(first_s=2.0, limit_s=120.0)
"""Before a spare is made: an engine that has just come up has its first load to do. Doubled with
each spare that dies unused."""


class Spare:
    """Keeps one spare child of an engine, or none."""

    def __init__(self, options: ChildOptions, backoff: Backoff = BACKOFF) -> None:
        self._options = options
        self._backoff = backoff
        self._ready: Child | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._rng = random.Random()

    @property
    def pid(self) -> int | None:
        """Of the spare that is ready."""
        return self._ready.process.pid if self._ready is not None else None

    def keep(self) -> None:
        """The engine is up: see that there is a spare for when it dies."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep(), name="spare engine")

    async def take(self) -> Child | None:
        """The spare, told to become the engine: its first frame is ``EngineUp``.

        None when there is none that is ready.

        One that still imports is given up: at low priority it may take longer than a child that is
        started now.
        """
        child, self._ready = self._ready, None
        await self._stop_keeping()
        if child is None:
            return None
        try:
            write_frame(child.writer, Timed(Promote()))
            await within(PROMOTE_DEADLINE_S, child.writer.drain(), "promoting the spare engine")
        except (PilotlightError, OSError) as error:
            log.warning(
                "the spare engine is gone",
                action="spare_lost",
                pid=child.process.pid,
                error=str(error),
            )
            await bury(child)
            return None
        log.info("spare engine promoted", action="spare_promoted", pid=child.process.pid)
        return child

    async def stop(self) -> None:
        """End it, and make no other."""
        child, self._ready = self._ready, None
        await self._stop_keeping()
        if child is not None:
            await _end(child)

    async def _stop_keeping(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            await cancel_all((keeping,))

    async def _keep(self) -> None:
        failures = 0
        while True:
            await pause(self._backoff.delay_s(failures, self._rng))
            try:
                await self._make_and_watch()
            except (PilotlightError, OSError) as error:
                log.warning("no spare engine", action="spare_failed", error=str(error))
            failures += 1

    async def _make_and_watch(self) -> None:
        """Make a spare; return when it has ended.

        Raises:
            PilotlightError: it did not become ready.
            OSError: it cannot be started.
        """
        child = await spawn(self._options, spare=True)
        is_ready = False
        try:
            told: EventFrame | None = await within(
                IMPORT_DEADLINE_S, read_frame(child.reader, EventFrame), "its imports"
            )
            first = told.message if told is not None else None
            if not isinstance(first, SpareReady):
                raise EngineFailed(f"the spare ended at its start. See {self._options.log_path}.")
            if first.device_open:
                raise EngineFailed("the spare has opened its device, which is the engine's alone")
            self._ready, is_ready = child, True
            log.info("spare engine ready", action="spare_ready", pid=child.process.pid)
            await child.process.wait()
            log.warning(
                "the spare engine ended",
                action="spare_ended",
                pid=child.process.pid,
                status=child.process.returncode,
            )
        finally:
            if self._ready is child or not is_ready:
                self._ready = None
                await _end(child)
            # Else it was taken: it belongs to the engine that took it.


async def _end(child: Child) -> None:
    """It holds nothing that it would have to give back."""
    kill_group(child.process)
    await bury(child)
