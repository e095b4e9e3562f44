"""What is read of a GPU by a library that is scripted, and calls that hang."""

import importlib
import sys

import pynvml
import pytest
from fake_nvml import GIB, ScriptedNvml

from pilotlight.common.device_health import Judgement, Recovery, judge
from pilotlight.common.nvml import (
    RECOVERIES,
    NvmlFailed,
    NvmlReader,
    NvmlUnavailable,
    device_states,
    list_gpus,
)
from pilotlight.policy.cluster import HealthState


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ScriptedNvml:
    scripted = ScriptedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", scripted)
    return scripted


def test_every_name_is_pynvmls() -> None:
    for name in vars(ScriptedNvml):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))


def test_gpus_are_listed(nvml: ScriptedNvml) -> None:
    assert [
        (gpu.index, gpu.uuid, gpu.name, gpu.memory_bytes, gpu.driver) for gpu in list_gpus()
    ] == [
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
    assert (reading.xids, reading.recovery, reading.uncorrected_errors) == (
        (31, 45),
        Recovery.NONE,
        0,
    )
    assert (reading.remap_pending, reading.remap_failed) == (True, False)
    assert (reading.memory_bytes, reading.used_bytes, reading.own_bytes) == (
        80 * GIB,
        6 * GIB,
        2 * GIB,
    )
    assert reading.others_bytes == 4 * GIB
    assert reader.read({7}).xids == (), "told once"
    assert reader.read({99}).own_bytes is None, "the driver knows our processes by other numbers"


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (0, "none"),
        (1, "reset"),
        (2, "reboot"),
        (3, "drain"),
        (4, "drain"),
        (5, "imex"),
        (6, "reset"),
        (7, "reboot"),
        (77, "reset"),
    ],
)
def test_what_the_driver_says_is_to_be_done(nvml: ScriptedNvml, action: int, expected: str) -> None:
    nvml.recovery = action
    reader = NvmlReader("")
    reader.open()
    assert reader.read(()).recovery is Recovery(expected)


def test_every_recovery_that_the_library_names_has_a_row() -> None:
    named = {
        name: value
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_GPU_RECOVERY_ACTION_")
    }
    assert set(named.values()) == set(RECOVERIES)
    assert RECOVERIES[named["NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT"]] is Recovery.REBOOT


def test_a_library_that_is_older_than_the_recovery_says_nothing_of_it(nvml: ScriptedNvml) -> None:
    nvml.absent.add("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    reader = NvmlReader("0")
    reader.open()
    reading = reader.read(())
    assert (reading.recovery, reading.memory_bytes) == (Recovery.UNKNOWN, 80 * GIB)


def test_what_a_device_does_not_tell_is_not_known(nvml: ScriptedNvml) -> None:
    nvml.ecc = nvml.recovery = None
    nvml.events = False
    nvml.xids = [79]
    nvml.processes[0].usedGpuMemory = None
    reader = NvmlReader("GPU-0")
    reader.open()
    reading = reader.read({7})
    assert (reading.xids, reading.recovery, reading.uncorrected_errors, reading.own_bytes) == (
        (),
        Recovery.UNKNOWN,
        None,
        None,
    )


def test_a_lost_device_is_looked_for_again(nvml: ScriptedNvml) -> None:
    reader = NvmlReader("0")
    reader.open()
    nvml.lose(0)
    for _ in range(3):
        assert reader.read(()).lost in ("GPU is lost", "Not Found")
    nvml.lost.clear()
    assert reader.read(()).lost == ""
    assert nvml.inits == 1
    reader.close()
    assert nvml.inits == 0


@pytest.mark.parametrize("named", ["1", "GPU-1"])
@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_UNKNOWN]
)
def test_a_device_that_is_lost_from_the_beginning_is_looked_for_again(
    nvml: ScriptedNvml, named: str, code: int
) -> None:
    nvml.lose(1, code)
    reader = NvmlReader(named)
    assert reader.open().lost == str(pynvml.NVMLError(code))
    reading = reader.read(())
    assert reading.lost == str(pynvml.NVMLError(code))
    assert not judge(Judgement(), reading).usable
    nvml.lost.clear()
    assert reader.read(()).lost == ""
    # From then on it is known by its UUID, whatever its index was.
    nvml.lose(1)
    assert reader.read(()).lost == "GPU is lost"
    assert reader.read(()).lost == "GPU is lost"
    assert nvml.asked[-1] == "GPU-1"


def test_a_library_that_does_not_begin_is_asked_again(nvml: ScriptedNvml) -> None:
    nvml.refuses = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    reader = NvmlReader("0")
    assert "mismatch" in reader.open().lost.lower()
    assert "mismatch" in reader.read(()).lost.lower()
    nvml.refuses = pynvml.NVML_SUCCESS
    assert reader.read(()).lost == ""


def test_xids_that_come_with_the_loss_are_told(nvml: ScriptedNvml) -> None:
    reader = NvmlReader("0")
    reader.open()
    nvml.xids = [31, 79]
    nvml.lose(0)
    reading = reader.read(())
    assert (reading.xids, reading.lost) == ((31, 79), "GPU is lost")
    judgement = judge(Judgement(), reading)
    assert (judgement.health.reason, judgement.xid) == ("lost: GPU is lost", 79)


def test_an_error_that_says_nothing_of_the_device_does_not_lose_it(nvml: ScriptedNvml) -> None:
    reader = NvmlReader("0")
    reader.open()
    asked = len(nvml.asked)
    for code in (
        pynvml.NVML_ERROR_UNKNOWN,
        pynvml.NVML_ERROR_IN_USE,
        pynvml.NVML_ERROR_MEMORY,
        pynvml.NVML_ERROR_TIMEOUT,
    ):
        nvml.xids = [31]
        nvml.lose(0, code)
        reading = reader.read(())
        assert (reading.untold, reading.lost, reading.xids) == (
            str(pynvml.NVMLError(code)),
            "",
            (31,),
        )
    nvml.lost.clear()
    assert reader.read(()).untold == ""
    assert len(nvml.asked) == asked, "the handle is the same"
    nvml.lose(0, pynvml.NVML_ERROR_RESET_REQUIRED)
    assert reader.read(()).lost == str(pynvml.NVMLError(pynvml.NVML_ERROR_RESET_REQUIRED))


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN])
def test_a_lost_device_leaves_the_others(nvml: ScriptedNvml, code: int) -> None:
    nvml.lose(0, code)
    lost, well = list_gpus()
    assert (lost.index, lost.uuid, lost.lost) == (0, "", str(pynvml.NVMLError(code)))
    assert (well.index, well.uuid, well.lost) == (1, "GPU-1", "")
    first, second = device_states()
    assert (first.health.state, first.health.reason) == (HealthState.FAILED, f"lost: {lost.lost}")
    assert second.health.state is HealthState.HEALTHY
    assert nvml.inits == 0


def test_a_device_that_is_somebody_elses_is_not_listed(nvml: ScriptedNvml) -> None:
    nvml.lose(0, pynvml.NVML_ERROR_NO_PERMISSION)
    assert [gpu.index for gpu in list_gpus()] == [1]


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
    monkeypatch.setitem(sys.modules, "pynvml", scripted)
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        scripted.refuses = code
        for ask in (list_gpus, NvmlReader("").open):
            with pytest.raises(NvmlUnavailable, match=str(pynvml.NVMLError(code))):
                ask()
    # A library and a driver that do not fit each other are not nothing.
    scripted.refuses = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    with pytest.raises(NvmlFailed, match=r"(?i)mismatch"):
        list_gpus()
    assert importlib.import_module("pynvml") is scripted
