"""NVIDIA's management library: which GPUs there are, and how one is. It opens no context on a device.

Any call may hang where a device does: make them where nobody has to wait for them (``apart``).
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pilotlight.policy.device_health import DeviceReading, Judgement, Recovery, judge
from pilotlight.policy.types import DeviceHealth

T = TypeVar("T")

MAX_EVENTS = 64
"""Read at once; what is beyond comes with the next reading."""


class NvmlUnavailable(Exception):
    """There is no NVML here, or no such device; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    """In the order of the bus, as nvidia-smi counts."""
    uuid: str
    name: str
    memory_bytes: int
    driver: str


class DeviceReader(Protocol):
    """Reads one device, in one thread. ``NvmlReader`` is the real one."""

    def open(self) -> Gpu:
        """Finds the device.

        Raises:
            NvmlUnavailable: there is none, or nobody to ask.
        """
        ...

    def read(self, own_pids: Collection[int]) -> DeviceReading:
        """Reads everything, and what happened since the last time. ``own_pids``: whose memory is the worker's own."""
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


def list_gpus() -> tuple[Gpu, ...]:
    """Every GPU that the driver shows this process.

    Raises:
        NvmlUnavailable: there is no library or no driver, or it does not answer as it should.
    """
    nvml = _library()
    try:
        nvml.nvmlInit()
        try:
            return tuple(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount()))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A GPU, and how it is by one reading."""

    gpu: Gpu
    health: DeviceHealth


def device_states() -> tuple[DeviceState, ...]:
    """How every GPU is now; what happened to it before is not known.

    Raises:
        NvmlUnavailable: as ``list_gpus``.
    """
    states: list[DeviceState] = []
    for gpu in list_gpus():
        reader = NvmlReader(gpu.uuid)
        reader.open()
        states.append(DeviceState(gpu=gpu, health=judge(Judgement(), reader.read(())).health))
        reader.close()
    return tuple(states)


class NvmlReader:
    """See ``DeviceReader``."""

    def __init__(self, device: str) -> None:
        """``device``: an index or a UUID; the first one, if empty."""
        self._device = device or "0"
        self._nvml: Any = None
        self._handle: Any = None
        self._events: Any = None

    def open(self) -> Gpu:
        self._nvml = nvml = _library()
        try:
            nvml.nvmlInit()
            by_index = self._device.isdecimal()
            find = nvml.nvmlDeviceGetHandleByIndex if by_index else nvml.nvmlDeviceGetHandleByUUID
            self._handle = find(int(self._device) if by_index else self._device)
            found = _gpu(nvml, self._handle)
            self._device = found.uuid
            self._events = self._watched()
        except nvml.NVMLError as error:
            raise NvmlUnavailable(f"NVML, device {self._device}: {error}") from error
        return found

    def read(self, own_pids: Collection[int]) -> DeviceReading:
        nvml = self._nvml
        try:
            if self._handle is None:
                self._find_again()
            xids = self._new_xids()
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            _, _, pending, failed = self._told(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
            return DeviceReading(
                xids=xids,
                recovery=self._recovery(),
                uncorrected_errors=self._told(
                    nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                ),
                remap_pending=bool(pending),
                remap_failed=bool(failed),
                memory_bytes=int(memory.total),
                used_bytes=int(memory.used),
                own_bytes=self._own_bytes(own_pids),
            )
        except nvml.NVMLError as error:
            # Found anew with the next reading: a device that was reset has another handle.
            self._handle = self._events = None
            return DeviceReading(lost=str(error))

    def close(self) -> None:
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _find_again(self) -> None:
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(self._device)
        self._events = self._watched()

    def _watched(self) -> Any:
        """A set of the device's events; None where it tells of none."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            if error.value not in _untold(nvml):
                raise
            return None
        return events

    def _new_xids(self) -> tuple[int, ...]:
        nvml, xids = self._nvml, list[int]()
        while self._events is not None and len(xids) < MAX_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    raise
                break
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                xids.append(int(event.eventData))
        return tuple(xids)

    def _recovery(self) -> Recovery:
        nvml = self._nvml
        (value,) = self._told(nvml.nvmlDeviceGetFieldValues, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]) or (None,)
        if value is None or value.nvmlReturn != nvml.NVML_SUCCESS:
            return Recovery.UNKNOWN
        # One that is not known here is worse than none.
        return _recoveries(nvml).get(int(value.value.uiVal), Recovery.RESET)

    def _own_bytes(self, own_pids: Collection[int]) -> int | None:
        """None where the driver shows no process of ours: in a container it may know them by other numbers."""
        processes = self._told(self._nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        own = [one.usedGpuMemory for one in processes if one.pid in own_pids]
        return sum(own) if own and None not in own else None

    def _told(self, ask: Callable[..., T], *arguments: object) -> T | None:
        """None for what this device or its driver does not tell."""
        try:
            return ask(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value not in _untold(self._nvml):
                raise
            return None


def _library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailable(f"the package nvidia-ml-py is not installed: {error}") from error


def _gpu(nvml: Any, handle: Any) -> Gpu:
    return Gpu(
        index=int(nvml.nvmlDeviceGetIndex(handle)),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver=str(nvml.nvmlSystemGetDriverVersion()),
    )


def _untold(nvml: Any) -> frozenset[int]:
    """What says of a question that it is not answered here, and nothing of the device."""
    return frozenset(
        {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            nvml.NVML_ERROR_NO_DATA,
            nvml.NVML_ERROR_DEPRECATED,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
        }
    )


def _recoveries(nvml: Any) -> Mapping[int, Recovery]:
    return {
        nvml.NVML_GPU_RECOVERY_ACTION_NONE: Recovery.NONE,
        nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: Recovery.RESET,
        nvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: Recovery.REBOOT,
        nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: Recovery.DRAIN,
        nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: Recovery.DRAIN,
    }
