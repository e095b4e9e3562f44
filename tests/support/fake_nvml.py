"""NVML for tests: a reader of one device that reads what a test says, and hangs when it is told to;
and a library for the true reader.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from pilotlight.common.device_health import DeviceReading, Recovery
from pilotlight.common.nvml import DeviceReader, Gpu, NvmlUnavailable

GIB = 1 << 30
GPU = Gpu(index=0, uuid="GPU-0", name="fake GPU", memory_bytes=80 * GIB, driver="580.0")
GOOD = DeviceReading(
    recovery=Recovery.NONE,
    uncorrected_errors=0,
    memory_bytes=80 * GIB,
    used_bytes=GIB,
    own_bytes=GIB,
)
HANGS_AT_MOST_S = 60.0


@dataclass
class FakeNvml:
    """See ``DeviceReader``. Asked in a thread of its own, told by the test's."""

    reading: DeviceReading = GOOD
    absent: str = ""
    """Why there is no NVML."""
    reads_as: DeviceReader | None = None
    """What is asked instead."""
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
        return self.reads_as.open() if self.reads_as else GPU

    def read(self, own_pids: Collection[int]) -> DeviceReading:
        self.reads += 1
        assert self._answers.wait(HANGS_AT_MOST_S)
        self.pids = frozenset(own_pids)
        if self.reads_as:
            return self.reads_as.read(own_pids)
        return self._once.pop(0) if self._once else self.reading

    def close(self) -> None:
        self.closed = True


class ScriptedNvml:
    """The functions of ``pynvml`` that are used; all else (constants, errors) is its own."""

    def __init__(self) -> None:
        self.xids: list[int] = []
        self.recovery: int | None = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
        self.ecc: int | None = 0
        self.remapped = (0, 0, 0, 0)
        self.processes = [
            SimpleNamespace(pid=7, usedGpuMemory=2 * GIB),
            SimpleNamespace(pid=8, usedGpuMemory=3 * GIB),
        ]
        self.lost: dict[int, int] = {}
        """By index: the error with which everything that is asked of a device is answered."""
        self.refuses = pynvml.NVML_SUCCESS
        """With what it does not begin."""
        self.absent: set[str] = set()
        """Names that this release has not."""
        self.asked: list[int | str] = []
        """For which handles."""
        self.events = True
        self.inits = 0

    def lose(self, index: int, code: int = pynvml.NVML_ERROR_GPU_IS_LOST) -> None:
        """Whatever is asked of it is answered with an error."""
        self.lost[index] = code

    def _check(self, index: int) -> int:
        if index in self.lost:
            raise pynvml.NVMLError(self.lost[index])
        return index

    def __getattr__(self, name: str) -> Any:
        if name in self.absent:
            raise AttributeError(name)
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        if self.refuses != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(self.refuses)
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        if self.inits == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.inits -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self.asked.append(index)
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._check(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        self.asked.append(uuid)
        return self._check(int(uuid.removeprefix("GPU-")))

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.0"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        self._check(handle)
        return SimpleNamespace(total=80 * GIB, used=6 * GIB)

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:  # noqa: N802
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:  # noqa: N802
        assert timeout_ms == 0
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(
            eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=self.xids.pop(0)
        )

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        if self.ecc is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.ecc

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:  # noqa: N802
        return self.remapped

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        code = pynvml.NVML_ERROR_NOT_SUPPORTED if self.recovery is None else pynvml.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=self.recovery or 0))]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return self.processes
