"""NVIDIA's management library: which GPUs there are, and how one is.

It opens no context on a device.

Any call may hang where a device does: make them in a thread that nothing has to wait for
(``driver_thread``).
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pilotlight.common.device_health import DeviceReading, Judgement, Recovery, judge
from pilotlight.policy.cluster import DeviceHealth

T = TypeVar("T")

MAX_EVENTS = 64
"""Read at once; what is beyond comes with the next reading."""


RECOVERIES: Mapping[int, Recovery] = {
    0: Recovery.NONE,
    1: Recovery.RESET,
    2: Recovery.REBOOT,
    3: Recovery.DRAIN,
    4: Recovery.DRAIN,
    5: Recovery.IMEX,
    6: Recovery.RESET,
    7: Recovery.REBOOT,
}
"""``NVML_GPU_RECOVERY_ACTION_*``, by number: which of the names there are depends on the release of
nvidia-ml-py."""


class NvmlUnavailable(Exception):
    """There is no NVML here, or no driver or device for it; the message says why."""


class NvmlFailed(Exception):
    """NVML is here, and does not say which devices there are; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    """In the order of the bus, as nvidia-smi counts."""
    uuid: str = ""
    """What is not told of a lost one is empty, this too."""
    name: str = ""
    memory_bytes: int = 0
    driver: str = ""
    lost: str = ""
    """The driver's words, if it cannot be asked."""


class DeviceReader(Protocol):
    """Reads one device, in one thread. ``NvmlReader`` is the real one."""

    def open(self) -> Gpu:
        """Finds the device. One that cannot be asked is ``lost``; each reading looks for it again.

        Raises:
            NvmlUnavailable: there is no driver to ask.
        """
        ...

    def read(self, own_pids: Collection[int]) -> DeviceReading:
        """Reads everything, and what happened since the last time.

        ``own_pids``: whose memory is the worker's own.
        """
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


def list_gpus() -> tuple[Gpu, ...]:
    """Every GPU that the driver shows this process, the lost ones too; not those that it may not
    ask.

    Raises:
        NvmlUnavailable: there is no library or no driver.
        NvmlFailed: there is, and it answers with an error.
    """
    nvml = _library()
    try:
        _begin(nvml)
        try:
            return tuple(
                filter(None, (_gpu_at(nvml, index) for index in range(nvml.nvmlDeviceGetCount())))
            )
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NvmlFailed(f"NVML: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A GPU, and how it is by one reading."""

    gpu: Gpu
    health: DeviceHealth


def device_states() -> tuple[DeviceState, ...]:
    """How every GPU is now; what happened to it before is not known.

    Raises:
        NvmlUnavailable, NvmlFailed: as ``list_gpus``.
    """
    return tuple(
        DeviceState(gpu=gpu, health=judge(Judgement(), _read_once(gpu)).health)
        for gpu in list_gpus()
    )


def _read_once(gpu: Gpu) -> DeviceReading:
    if gpu.lost:
        return DeviceReading(lost=gpu.lost)
    reader = NvmlReader(gpu.uuid)
    reader.open()
    try:
        return reader.read(())
    finally:
        reader.close()


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
            _begin(nvml)
            return self._find()
        except nvml.NVMLError as error:
            by_index = self._device.isdecimal()
            return Gpu(
                index=int(self._device) if by_index else -1,
                uuid="" if by_index else self._device,
                lost=str(error),
            )

    def read(self, own_pids: Collection[int]) -> DeviceReading:
        nvml, xids = self._nvml, list[int]()
        try:
            if self._handle is None:
                self._find_again()
            self._take_xids(xids)
            return self._reading(tuple(xids), own_pids)
        except nvml.NVMLError as error:
            # What its Xids said before the error is told with it: after a fall from the bus it is
            # not told again.
            if self._handle is not None and error.value not in _losses(nvml):
                return DeviceReading(untold=str(error), xids=tuple(xids))
            # Found anew with the next reading: a device that was reset has another handle.
            self._handle = self._events = None
            return DeviceReading(lost=str(error), xids=tuple(xids))

    def close(self) -> None:
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _find_again(self) -> None:
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        nvml.nvmlInit()
        self._find()

    def _find(self) -> Gpu:
        """Finds it by its index the first time, from then on by its UUID: another device may get
        the index.
        """
        nvml = self._nvml
        by_index = self._device.isdecimal()
        find = nvml.nvmlDeviceGetHandleByIndex if by_index else nvml.nvmlDeviceGetHandleByUUID
        handle = find(int(self._device) if by_index else self._device)
        found = _gpu(nvml, handle)
        self._events = self._watched(handle)
        self._device, self._handle = found.uuid, handle
        return found

    def _watched(self, handle: Any) -> Any:
        """A set of the device's events; None where it tells of none."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            if error.value not in _untold(nvml):
                raise
            return None
        return events

    def _take_xids(self, xids: list[int]) -> None:
        nvml = self._nvml
        while self._events is not None and len(xids) < MAX_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    raise
                return
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                xids.append(int(event.eventData))

    def _reading(self, xids: tuple[int, ...], own_pids: Collection[int]) -> DeviceReading:
        nvml = self._nvml
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo)
        _, _, pending, failed = self._told(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
        return DeviceReading(
            xids=xids,
            recovery=self._recovery(),
            uncorrected_errors=self._told(
                nvml.nvmlDeviceGetTotalEccErrors,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=bool(pending),
            remap_failed=bool(failed),
            memory_bytes=int(memory.total) if memory is not None else None,
            used_bytes=int(memory.used) if memory is not None else None,
            own_bytes=self._own_bytes(own_pids),
        )

    def _recovery(self) -> Recovery:
        nvml = self._nvml
        # An installation of its own may have a release from before 12.570, which has no such field.
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return Recovery.UNKNOWN
        (value,) = self._told(nvml.nvmlDeviceGetFieldValues, [field]) or (None,)
        if value is None or value.nvmlReturn != nvml.NVML_SUCCESS:
            return Recovery.UNKNOWN
        # One that is not known here is worse than none.
        return RECOVERIES.get(int(value.value.uiVal), Recovery.RESET)

    def _own_bytes(self, own_pids: Collection[int]) -> int | None:
        """None where the driver shows no process of ours: in a container it may know them by other
        numbers.
        """
        processes = self._told(self._nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        own = [one.usedGpuMemory for one in processes if one.pid in own_pids]
        return sum(own) if own and None not in own else None

    def _told(self, ask: Callable[..., T], *arguments: object) -> T | None:
        return _told(self._nvml, ask, self._handle, *arguments)


def _library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailable(f"the package nvidia-ml-py is not installed: {error}") from error


def _begin(nvml: Any) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in _absences(nvml):
            raise NvmlUnavailable(f"NVML: {error}") from error
        raise


def _gpu_at(nvml: Any, index: int) -> Gpu | None:
    """The GPU of an index; where it cannot be asked, what is known of it all the same.

    None for one that is not this container's.
    """
    uuid = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = str(nvml.nvmlDeviceGetUUID(handle))
        return _gpu(nvml, handle)
    except nvml.NVMLError as error:
        return (
            None
            if error.value == nvml.NVML_ERROR_NO_PERMISSION
            else Gpu(index=index, uuid=uuid, lost=str(error))
        )


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    index = _told(nvml, nvml.nvmlDeviceGetIndex, handle)
    return Gpu(
        index=-1 if index is None else int(index),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(_told(nvml, nvml.nvmlDeviceGetName, handle) or ""),
        memory_bytes=int(memory.total) if memory is not None else 0,
        driver=str(_told(nvml, nvml.nvmlSystemGetDriverVersion) or ""),
    )


def _told(nvml: Any, ask: Callable[..., T], *arguments: object) -> T | None:
    """None for what this device or its driver does not tell."""
    try:
        return ask(*arguments)
    except nvml.NVMLError as error:
        if error.value not in _untold(nvml):
            raise
        return None


def _absences(nvml: Any) -> frozenset[int]:
    """What says at the beginning that there is no library, no driver or no device."""
    return frozenset(
        {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_GPU_NOT_FOUND,
        }
    )


def _losses(nvml: Any) -> frozenset[int]:
    """What says of a device that was found that it is there no more, or cannot be used as it is."""
    return frozenset(
        {
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_NOT_FOUND,
            nvml.NVML_ERROR_RESET_REQUIRED,
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        }
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
