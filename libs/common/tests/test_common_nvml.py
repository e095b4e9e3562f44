"""What is read of a GPU by a library that is scripted, and calls that hang."""

import asyncio
import importlib
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pilotlight.common.apart import Apart
from pilotlight.common.nvml import NvmlReader, NvmlUnavailable, device_states, list_gpus
from pilotlight.policy.device_health import Recovery
from pilotlight.policy.types import HealthState

GIB = 1 << 30


class ScriptedNvml:
    """The functions of ``pynvml`` that are used; all else (constants, errors) is its own."""

    def __init__(self) -> None:
        self.xids: list[int] = []
        self.recovery: int | None = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
        self.ecc: int | None = 0
        self.remapped = (0, 0, 0, 0)
        self.processes = [SimpleNamespace(pid=7, usedGpuMemory=2 * GIB), SimpleNamespace(pid=8, usedGpuMemory=3 * GIB)]
        self.lost = False
        self.events = True
        self.inits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.inits -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.0"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
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
        return SimpleNamespace(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=self.xids.pop(0))

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


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ScriptedNvml:
    scripted = ScriptedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", scripted)  # type: ignore[arg-type]
    return scripted


def test_every_name_is_pynvmls() -> None:
    for name in vars(ScriptedNvml):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))


def test_gpus_are_listed(nvml: ScriptedNvml) -> None:
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.memory_bytes, gpu.driver) for gpu in list_gpus()] == [
        (0, "GPU-0", "H200", 80 * GIB, "580.0"),
        (1, "GPU-1", "H200", 80 * GIB, "580.0"),
    ]
    assert nvml.inits == 0


def test_a_device_is_read(nvml: ScriptedNvml) -> None:
    reader = NvmlReader("1")
    assert reader.open().uuid == "GPU-1"
    nvml.xids = [31, 45]
    nvml.remapped = (1, 2, 1, 0)
    reading = reader.read({7})
    assert (reading.xids, reading.recovery, reading.uncorrected_errors) == ((31, 45), Recovery.NONE, 0)
    assert (reading.remap_pending, reading.remap_failed) == (True, False)
    assert (reading.memory_bytes, reading.used_bytes, reading.own_bytes) == (80 * GIB, 6 * GIB, 2 * GIB)
    assert reading.others_bytes == 4 * GIB
    assert reader.read({7}).xids == (), "told once"
    assert reader.read({99}).own_bytes is None, "the driver knows our processes by other numbers"


@pytest.mark.parametrize(
    ("action", "expected"), [(0, "none"), (1, "reset"), (2, "reboot"), (3, "drain"), (4, "drain"), (77, "reset")]
)
def test_what_the_driver_says_is_to_be_done(nvml: ScriptedNvml, action: int, expected: str) -> None:
    nvml.recovery = action
    reader = NvmlReader("")
    reader.open()
    assert reader.read(()).recovery is Recovery(expected)


def test_what_a_device_does_not_tell_is_not_known(nvml: ScriptedNvml) -> None:
    nvml.ecc = nvml.recovery = None
    nvml.events = False
    nvml.xids = [79]
    nvml.processes[0].usedGpuMemory = None
    reader = NvmlReader("GPU-0")
    reader.open()
    reading = reader.read({7})
    assert (reading.xids, reading.recovery, reading.uncorrected_errors, reading.own_bytes) == ((), Recovery.UNKNOWN, None, None)


def test_a_lost_device_is_looked_for_again(nvml: ScriptedNvml) -> None:
    reader = NvmlReader("0")
    reader.open()
    nvml.lost = True
    for _ in range(3):
        assert reader.read(()).lost in ("GPU is lost", "Not Found")
    nvml.lost = False
    assert reader.read(()).lost == ""
    assert nvml.inits == 1
    reader.close()
    assert nvml.inits == 0


def test_doctor_sees_each_device_as_it_is(nvml: ScriptedNvml) -> None:
    nvml.recovery = pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    states = device_states()
    assert [one.health.state for one in states] == [HealthState.FAILED] * 2
    assert states[1].health.reason == "recovery: the driver asks for a reboot"


def test_without_library_or_driver_it_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match="nvidia-ml-py is not installed"):
        list_gpus()
    monkeypatch.undo()
    scripted = ScriptedNvml()

    def refused() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(scripted, "nvmlInit", refused)
    monkeypatch.setitem(sys.modules, "pynvml", scripted)  # type: ignore[arg-type]
    with pytest.raises(NvmlUnavailable, match="NVML Shared Library Not Found"):
        list_gpus()
    with pytest.raises(NvmlUnavailable, match="device 0"):
        NvmlReader("").open()
    assert importlib.import_module("pynvml") is scripted


@pytest.mark.anyio
async def test_calls_that_hang_are_left_to_themselves() -> None:
    apart, goes_on = Apart("test"), threading.Event()
    hung = apart.call(lambda: goes_on.wait(20))
    after = apart.call(lambda: 7)

    def fails() -> None:
        raise ValueError("no")

    failed = apart.call(fails)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(hung), 0.05)
    assert not after.done()
    goes_on.set()
    assert await hung
    assert await after == 7
    with pytest.raises(ValueError, match="no"):
        await failed
    apart.close()
