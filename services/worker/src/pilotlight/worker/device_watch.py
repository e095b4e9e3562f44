"""Watches a worker's GPUs through their driver.

In the worker's own process, which has no context on a device and no torch.

::

    of each GPU
    read ──> judge ──> health ──> of the worst ──> the worker: ends its engine, or starts it again
     ^  │ late: the reading is that it is late, and the call is waited for on; no other is made meanwhile
     └──┘ every ``poll_s``, and at once when a caller wants to know
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.device_health import DeviceReading, Judgement, judge
from pilotlight.common.driver_thread import DriverThread
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.nvml import DeviceReader, Gpu, NvmlUnavailable
from pilotlight.common.service import Background
from pilotlight.common.waiting import Signal, within, woken
from pilotlight.policy.cluster import DeviceHealth, HealthState
from pilotlight.policy.devices import worst_of

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTimes:
    """How often, and how patiently."""

    poll_s: float = 0.5
    deadline_s: float = 5.0
    """A driver that has not answered by then hangs: its calls take milliseconds."""
    grace_s: float = 0.5
    """Beyond that."""


class DeviceWatch:
    """What is known of a worker's devices. All of them have to be well for its engine to run."""

    def __init__(
        self,
        readers: Sequence[DeviceReader],
        clock: Clock,
        background: Background,
        own_pids: Callable[[], frozenset[int]],
        times: WatchTimes,
    ) -> None:
        """Watches nothing yet.

        Args:
            readers: one for each device, at least one.
            clock: for what is late.
            background: owns the tasks.
            own_pids: processes whose memory on the devices is the worker's own.
            times: how often, and how patiently.
        """
        self.each = tuple(
            OneDevice(reader, clock, background, own_pids, times) for reader in readers
        )
        self._on_change: Callable[[DeviceHealth], None] = lambda health: None
        self._told = DeviceHealth()

    @property
    def names(self) -> tuple[str, ...]:
        """What the driver calls the devices of which it has answered."""
        return tuple(one.gpu.name for one in self.each if one.gpu is not None)

    @property
    def health(self) -> DeviceHealth:
        """By the last readings."""
        return worst_of(one.health for one in self.each)

    @property
    def usable(self) -> bool:
        """An engine may be started on them."""
        return all(one.usable for one in self.each)

    def promise(self, device_bytes: int) -> None:
        """The bytes of their memory that are for models, an equal share of each."""
        for one in self.each:
            one.promise(device_bytes // len(self.each))

    async def start(self, on_change: Callable[[DeviceHealth], None]) -> None:
        """Return when the first readings are there, or are late, or no driver is there to ask.

        ``on_change`` is called with each new health of all devices together, in the worker's event
        loop.
        """
        self._on_change = on_change
        await asyncio.gather(*(one.start(self._changed) for one in self.each))

    async def stop(self) -> None:
        """Watch no more. A call that hangs is left to itself."""
        await asyncio.gather(*(one.stop() for one in self.each))

    async def fresh(self) -> None:
        """Return after readings that were begun after this was asked for; at once, where no driver
        is asked.
        """
        await asyncio.gather(*(one.fresh() for one in self.each))

    def _changed(self, one: DeviceHealth) -> None:
        before, self._told = self._told, self.health
        if self._told != before:
            self._on_change(self._told)


class OneDevice:
    """What is known of one device. ``on_change`` is called with each new health of it."""

    def __init__(
        self,
        reader: DeviceReader,
        clock: Clock,
        background: Background,
        own_pids: Callable[[], frozenset[int]],
        times: WatchTimes,
    ) -> None:
        self.gpu: Gpu | None = None
        """The device, once the driver answered."""
        self.readings = 0
        """The number that have come, the late ones too."""
        self._reader = reader
        self._clock = clock
        self._background = background
        self._own_pids = own_pids
        self._times = times
        self._driver = DriverThread("nvml")
        self._judgement = Judgement()
        self._promised_bytes = 0
        self._on_change: Callable[[DeviceHealth], None] = lambda health: None
        self._unwatched = ""
        self._asked = asyncio.Event()
        self._told = Signal()
        self._task: asyncio.Task[None] | None = None

    @property
    def health(self) -> DeviceHealth:
        """By the last reading."""
        return DeviceHealth(reason=self._unwatched) if self._unwatched else self._judgement.health

    @property
    def usable(self) -> bool:
        """An engine may be started on it."""
        return bool(self._unwatched) or self._judgement.usable

    def promise(self, device_bytes: int) -> None:
        """The bytes of the device's memory that are for models."""
        self._promised_bytes = device_bytes

    async def start(self, on_change: Callable[[DeviceHealth], None]) -> None:
        """Return when the first reading is there, or is late, or no driver is there to ask."""
        self._on_change = on_change
        if self._task is None:
            self._task = self._background.spawn("device watch", self._watch())
            await self._next()

    async def stop(self) -> None:
        """Watch no more. A call that hangs is left to itself."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._driver.call(self._reader.close)
        self._driver.close()

    async def fresh(self) -> None:
        """Return after a reading that was begun after this was asked for; at once, where no driver
        is asked.
        """
        if self._task is None or self._unwatched:
            return
        for _ in range(2):  # One that is under way may have been begun before.
            self._asked.set()
            await self._next()
            if not self.usable:
                return

    async def _next(self) -> None:
        seen = self.readings
        while self.readings == seen and not self._unwatched:
            await self._told.wait()

    async def _watch(self) -> None:
        try:
            self.gpu = await self._answer(self._driver.call(self._reader.open))
        except NvmlUnavailable as error:
            self._unwatched = f"not watched: {error}"
            log.warning("the device is not watched", action="device_unwatched", error=str(error))
            self._told.send()
            self._on_change(self.health)
            return
        while True:
            self._take(
                await self._answer(self._driver.call(partial(self._reader.read, self._own_pids())))
            )
            await woken(self._asked, self._times.poll_s)

    async def _answer(self, call: "asyncio.Future[T]") -> T:
        """What the driver answers, however late; each deadline that passes meanwhile is a
        reading.
        """
        since_s = self._clock.monotonic_s()
        while True:
            # Twice: when this process itself stood still the first time is over at once, and what
            # was answered is heard in the second.
            for wait_s in (self._times.deadline_s, self._times.grace_s):
                with suppress(DeadlineExceeded):
                    return await within(wait_s, asyncio.shield(call), "the driver's answer")
            self._take(DeviceReading(late_s=self._clock.monotonic_s() - since_s))

    def _take(self, reading: DeviceReading) -> None:
        before, self._judgement = (
            self._judgement,
            judge(self._judgement, reading, self._promised_bytes),
        )
        self.readings += 1
        if reading.untold and not before.untold_readings:
            log.warning(
                "the driver answers with an error", action="device_untold", error=reading.untold
            )
        for number in reading.xids:
            log.warning("Xid", action="device_xid", xid=number)
        health = self._judgement.health
        self._told.send()
        if health != before.health:
            level = log.error if health.state is HealthState.FAILED else log.info
            level(
                "device health",
                action="device_health",
                state=health.state.value,
                reason=health.reason,
            )
            self._on_change(health)
