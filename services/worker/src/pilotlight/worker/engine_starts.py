"""Starts of a worker's engine: the first one, and those after deaths."""

import random
from collections.abc import Callable

import structlog

from pilotlight.common.errors import DeviceFailed, EngineFailed
from pilotlight.common.messages.engine import EngineUp
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.cluster import DeviceHealth
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.device_watch import DeviceWatch

log = structlog.get_logger()

RESTARTS = 8
"""Attempts to start an engine that ends at its start, before the worker ends itself."""
SETTLED_S = 30.0
"""An engine that has lived for this long starts anew at once when it dies."""


class EngineStarts:
    """Starts the engine while the worker runs and its device is well.

    Args:
        core: the worker's parts.
        watch: of the device; None: it is taken to be well.
        on_up: called with what the engine says of itself, once it runs.
        on_back: called when an engine that died has been replaced, or may not be.
    """

    def __init__(
        self,
        core: WorkerCore,
        watch: DeviceWatch | None,
        on_up: Callable[[EngineUp], None],
        on_back: Callable[[], None],
    ) -> None:
        self._core = core
        self._watch = watch
        self._on_up = on_up
        self._on_back = on_back
        self.running = False
        """The worker runs: an engine that dies is replaced."""
        self.busy = False
        """An engine is being started, or it is found out whether one may be."""
        self._failures = 0
        self._started_s = 0.0
        self._rng = random.Random()

    @property
    def usable(self) -> bool:
        """The device has not failed."""
        return self._watch is None or self._watch.usable

    async def first(self, on_health: Callable[[DeviceHealth], None]) -> None:
        """Watch the device, and start the engine; on a device that has failed none is started.

        Raises:
            EngineFailed: the engine does not start, and its device is well.
        """
        self.running = self.busy = True
        if self._watch is not None:
            await self._watch.start(on_health)
        try:
            if self.usable:
                await self._start()
        except EngineFailed:
            if self.usable:
                raise
        self.busy = False

    def forget_failures(self) -> None:
        """The device is well again: what failed before says nothing of the next start."""
        self._failures = 0

    def again(self) -> None:
        """Replace the engine, unless that is under way or the worker ends."""
        if not self.running or self.busy:
            return
        # Not in the task: in the turn of the loop before it begins another event may want the same.
        self.busy = True
        self._core.background.spawn(f"restart engine of {self._core.worker_id}", self._restart())

    async def _start(self) -> None:
        up = await self._core.engine.start()
        self._core.device_bytes = up.device_bytes or self._core.device_bytes
        if self._watch is not None:
            self._watch.promise(self._core.device_bytes)
        self._started_s = self._core.clock.monotonic_s()
        self._on_up(up)
        if self._watch is not None and not self.usable:
            # It has failed since it was looked at, and what was killed then may have been none.
            await self._core.engine.kill(self._watch.health.reason, DeviceFailed.code)

    async def _restart(self) -> None:
        """Start the next one, unless the device has failed.

        Raises:
            EngineFailed: that fails time and again, which ends the worker.
        """
        try:
            await self._try_again()
        finally:
            self.busy = False
        self._on_back()

    async def _try_again(self) -> None:
        if self._core.clock.monotonic_s() - self._started_s >= SETTLED_S:
            self._failures = 0
        backoff = Backoff(first_s=0.2, limit_s=10.0)
        while self.running:
            if self._failures > 0:
                await pause(backoff.delay_s(self._failures - 1, self._rng))
            if self._watch is not None:
                await self._watch.fresh()
                if not self.usable:
                    log.error(
                        "no engine on a device that has failed",
                        action="device_left_alone",
                        reason=self._watch.health.reason,
                    )
                    return
            self._failures += 1
            try:
                await self._start()
                break
            except EngineFailed as error:
                if self._failures >= RESTARTS and self.usable:
                    raise
                log.error(
                    "engine does not start",
                    action="engine_start_failed",
                    attempt=self._failures,
                    error=error.message,
                )
