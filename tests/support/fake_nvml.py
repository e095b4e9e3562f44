"""A fake of NVML's reader of one device: what a test says is read, and it hangs when it is told to."""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from pilotlight.common.nvml import Gpu, NvmlUnavailable
from pilotlight.policy.device_health import DeviceReading, Recovery

GIB = 1 << 30
GPU = Gpu(index=0, uuid="GPU-0", name="fake GPU", memory_bytes=80 * GIB, driver="580.0")
GOOD = DeviceReading(recovery=Recovery.NONE, uncorrected_errors=0, memory_bytes=80 * GIB, used_bytes=GIB, own_bytes=GIB)
HANGS_AT_MOST_S = 60.0


@dataclass
class FakeNvml:
    """See ``DeviceReader``. Asked in a thread of its own, told by the test's."""

    reading: DeviceReading = GOOD
    absent: str = ""
    """Why there is no NVML."""
    reads: int = 0
    pids: frozenset[int] = frozenset()
    closed: bool = False
    _once: list[DeviceReading] = field(default_factory=list)
    _answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._answers.set()

    def hang(self) -> None:
        """Nothing is answered from now on."""
        self._answers.clear()

    def answer(self) -> None:
        """Everything is."""
        self._answers.set()

    def once(self, reading: DeviceReading) -> None:
        """What the next reading is; then it is as before."""
        self._once.append(reading)

    def open(self) -> Gpu:
        if self.absent:
            raise NvmlUnavailable(self.absent)
        assert self._answers.wait(HANGS_AT_MOST_S)
        return GPU

    def read(self, own_pids: Collection[int]) -> DeviceReading:
        self.reads += 1
        assert self._answers.wait(HANGS_AT_MOST_S)
        self.pids = frozenset(own_pids)
        return self._once.pop(0) if self._once else self.reading

    def close(self) -> None:
        self.closed = True
