"""A worker with a real engine child on cores, whose device is a fake."""

from typing import Any

from fake_nvml import FakeNvml

from pilotlight.common.bus import Bus
from pilotlight.policy.cluster import HealthState, WorkerFacts
from pilotlight.policy.model import Model
from pilotlight.worker.device_watch import DeviceWatch, WatchTimes
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.testing import DEADLINE_S, Rig
from pilotlight.worker.worker import Worker

PATIENT = WatchTimes(poll_s=0.02, deadline_s=DEADLINE_S / 2, grace_s=1.0)
"""However slow the machine is, a driver that answers is never late."""
IMPATIENT = WatchTimes(poll_s=0.02, deadline_s=0.2, grace_s=0.1)
"""For drivers that do not answer."""


class DeviceRig(Rig):
    """A worker with a real engine child on cores, whose device is a fake."""

    def __init__(
        self, worker: Worker, engine: ProcessEngine, nvml: FakeNvml, bus: Bus, model: Model
    ) -> None:
        super().__init__(worker, bus, model)
        self.engine, self.nvml = engine, nvml
        self.starts = 0
        start = engine.start

        async def counted() -> Any:
            self.starts += 1
            return await start()

        engine.start = counted

    def hang(self) -> None:
        """The driver does not answer any more."""
        self.watch.each[0]._times = IMPATIENT
        self.nvml.hang()

    def answer(self) -> None:
        self.watch.each[0]._times = PATIENT
        self.nvml.answer()

    @property
    def watch(self) -> DeviceWatch:
        assert self.worker._watch is not None
        return self.worker._watch

    async def health(self, state: HealthState) -> WorkerFacts:
        return await self.until(
            lambda: self.facts and self.facts.health.state is state and self.facts
        )
