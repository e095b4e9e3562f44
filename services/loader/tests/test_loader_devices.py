"""Which workers a node gets: by its GPUs, its settings, and what CUDA shows it."""

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pilotlight.common.errors import BadRequest, MachineUnfit
from pilotlight.common.nvml import Gpu, NvmlFailed, NvmlUnavailable
from pilotlight.loader import devices
from pilotlight.loader.devices import (
    FoundGpus,
    WorkerDevices,
    find_gpus,
    plan_workers,
    unopened,
    unusable,
    visible,
)
from pilotlight.loader.opening_ahead import OpeningAhead
from pilotlight.loader.settings import LoaderSettings

GPUS = tuple(
    Gpu(index=index, uuid=f"GPU-{index}{letter}", name="H200", memory_bytes=1 << 37, driver="580.0")
    for index, letter in enumerate("abcd")
)
UUIDS = tuple(gpu.uuid for gpu in GPUS)
FOUR, NONE = FoundGpus(gpus=GPUS), FoundGpus(why_none="there is no driver")
LOST = (GPUS[0], Gpu(index=1, lost="GPU is lost"), *GPUS[2:])
UNTOLD = FoundGpus(why_none="NVML: Unknown Error", untold=True)


def each(*devices: str) -> tuple[tuple[str, ...], ...]:
    """A worker for each of the devices."""
    return tuple((device,) for device in devices)


@pytest.mark.parametrize(
    ("kind", "workers", "found", "expected"),
    [
        ("auto", None, FOUR, ("cuda", each(*UUIDS))),
        ("auto", 2, FOUR, ("cuda", each(*UUIDS[:2]))),
        ("auto", 5, FOUR, ("cpu", ((),) * 5)),
        ("auto", None, NONE, ("cpu", ((),))),
        ("auto", 3, NONE, ("cpu", ((),) * 3)),
        ("auto", 0, FOUR, ("cuda", ())),
        ("auto", 0, NONE, ("cpu", ())),
        ("auto", None, FoundGpus(gpus=LOST), ("cuda", each(UUIDS[0], "1", *UUIDS[2:]))),
        ("auto", None, replace(FOUR, untold=True), ("cuda", each(*UUIDS))),
        ("auto", 0, UNTOLD, ("cpu", ())),
        ("cpu", None, UNTOLD, ("cpu", ((),))),
        ("cuda", None, FOUR, ("cuda", each(*UUIDS))),
        ("cuda", 1, FOUR, ("cuda", each(UUIDS[0]))),
        ("cpu", None, FOUR, ("cpu", ((),))),
        ("cpu", 4, FOUR, ("cpu", ((),) * 4)),
        ("sim", 7, FOUR, ("sim", ((),) * 7)),
    ],
)
def test_each_setting(
    kind: str,
    workers: int | None,
    found: FoundGpus,
    expected: tuple[str, tuple[tuple[str, ...], ...]],
) -> None:
    assert plan_workers(kind, workers, found) == WorkerDevices(
        kind=expected[0], devices=expected[1]
    )


@pytest.mark.parametrize(
    ("workers", "found", "why"),
    [(None, NONE, "there is no driver"), (5, FOUR, "5 GPUs are needed: there are 4")],
)
def test_gpus_that_are_asked_for_and_not_there_are_an_error(
    workers: int | None, found: FoundGpus, why: str
) -> None:
    with pytest.raises(BadRequest, match=why):
        plan_workers("cuda", workers, found)


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_a_driver_that_does_not_say_which_gpus_there_are_does_not_mean_cores(
    workers: int | None,
) -> None:
    with pytest.raises(MachineUnfit, match=r"NVML: Unknown Error.*PILOTLIGHT_WORKER_KIND=cpu"):
        plan_workers("auto", workers, UNTOLD)
    with pytest.raises(BadRequest, match="Unknown Error"):
        plan_workers("cuda", workers, UNTOLD)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, "0123"),
        ("", ""),
        ("2,0", "20"),
        (" 3 , 1", "31"),
        ("GPU-1b,GPU-3", "13"),
        ("1,9,2", "1"),
        ("1,1", "1"),
        ("-1", ""),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(shown: str | None, expected: str) -> None:
    assert "".join(str(gpu.index) for gpu in visible(GPUS, shown)) == expected


class Machine:
    """What the looks at it find; each look is counted."""

    def __init__(self) -> None:
        self.gpus: tuple[Gpu, ...] | Exception = GPUS
        self.unusable = self.unopened = ""
        self.opens: list[tuple[Gpu, ...]] = []
        self.answers = threading.Event()
        self.compiles = threading.Event()
        self.answers.set()
        self.compiles.set()

    def list_gpus(self) -> tuple[Gpu, ...]:
        self.answers.wait(20)
        if isinstance(self.gpus, Exception):
            raise self.gpus
        return self.gpus

    def look(self) -> str:
        self.compiles.wait(20)
        return self.unusable

    def open(self, gpus: tuple[Gpu, ...]) -> str:
        assert threading.current_thread() is not threading.main_thread()
        self.opens.append(gpus)
        return self.unopened


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(devices, "list_gpus", made.list_gpus)
    monkeypatch.setattr(devices, "unusable", made.look)
    monkeypatch.setattr(devices, "unopened", made.open)
    return made


@pytest.mark.anyio
async def test_gpus_are_found_where_an_engine_can_use_them(machine: Machine) -> None:
    assert await find_gpus("auto", {}) == FOUR
    assert (await find_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "3"})).gpus == GPUS[3:]
    assert machine.opens[-1] == GPUS[3:]
    assert (
        await find_gpus("auto", {"CUDA_VISIBLE_DEVICES": ""})
    ).why_none == "of 4 GPUs CUDA_VISIBLE_DEVICES shows none"
    machine.unusable = "triton is not installed"
    assert await find_gpus("auto", {}) == FoundGpus(why_none="triton is not installed")
    machine.gpus = ()
    assert await find_gpus("auto", {}) == FoundGpus(why_none="the driver has none")


@pytest.mark.anyio
async def test_gpus_that_torch_does_not_open_leave_the_cores_with_a_warning(
    machine: Machine, tmp_path: Path
) -> None:
    machine.unopened = "torch does not open H200 with driver 470.1: too old"
    with capture_logs() as logs:
        found = await find_gpus("auto", {}, tmp_path / "gpus.json")
    assert found == FoundGpus(why_none=machine.unopened)
    assert plan_workers("auto", None, found).kind == "cpu"
    assert [(one["log_level"], one["action"], one["error"]) for one in logs] == [
        ("warning", "gpus_unusable", machine.unopened)
    ]


@pytest.mark.anyio
async def test_torch_opens_a_gpu_once_for_each_driver(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "gpus.json"
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "2.9")
    machine.unopened = "too old"
    for _ in range(2):
        assert (await find_gpus("auto", {}, kept)).gpus == ()
    machine.unopened = ""
    for _ in range(3):
        assert (await find_gpus("auto", {}, kept)).gpus == GPUS
    assert len(machine.opens) == 3
    machine.gpus = tuple(replace(gpu, driver="590.0") for gpu in GPUS)
    assert (await find_gpus("auto", {}, kept)).gpus == machine.gpus
    assert len(machine.opens) == 4


class Opening(OpeningAhead):
    """What a process has opened, and what it is asked."""

    def __init__(self, opened: bool) -> None:
        super().__init__()
        self._opened = opened
        self.asked: list[float] = []
        self.given_up = 0

    def opened(self, deadline_s: float) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        self.asked.append(deadline_s)
        return self._opened

    def give_up(self) -> None:
        self.given_up += 1


@pytest.mark.anyio
async def test_what_a_process_opened_ahead_is_not_opened_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "gpus.json"
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "2.9")
    first, second = Opening(opened=True), Opening(opened=True)
    assert await find_gpus("auto", {}, kept, first) == FOUR
    assert await find_gpus("auto", {}, kept, second) == FOUR
    assert machine.opens == []
    assert (first.asked, second.asked) == ([devices.OPEN_DEADLINE_S], []), "the record says so"
    assert first.given_up == second.given_up == 1


@pytest.mark.anyio
async def test_what_no_process_opened_ahead_is_tried_in_turn(
    machine: Machine, tmp_path: Path
) -> None:
    kept, opening = tmp_path / "gpus.json", Opening(opened=False)
    machine.unopened = "torch does not open H200 with driver 470.1: too old"
    assert await find_gpus("auto", {}, kept, opening) == FoundGpus(why_none=machine.unopened)
    assert not kept.exists()
    machine.unopened = ""
    assert await find_gpus("auto", {}, kept, opening) == FOUR
    assert machine.opens == [GPUS, GPUS]
    assert len(opening.asked) == opening.given_up == 2


@pytest.mark.anyio
async def test_nobody_waits_for_a_process_that_is_not_wanted(machine: Machine) -> None:
    opening = Opening(opened=True)
    await find_gpus("sim", {}, opening=opening)
    machine.unusable = "triton is not installed"
    await find_gpus("auto", {}, opening=opening)
    machine.unusable = ""
    machine.gpus = (LOST[1],)
    assert (await find_gpus("auto", {}, opening=opening)).gpus == machine.gpus
    machine.gpus = NvmlUnavailable("NVML: library not found")
    await find_gpus("auto", {}, opening=opening)
    assert opening.asked == []
    assert opening.given_up == 4


@pytest.mark.anyio
async def test_a_lost_gpu_keeps_its_place_and_is_named(machine: Machine, tmp_path: Path) -> None:
    kept = tmp_path / "gpus.json"
    machine.gpus = LOST
    with capture_logs() as logs:
        assert (await find_gpus("auto", {}, kept)).gpus == LOST
    assert [(one["action"], one["index"], one["error"]) for one in logs] == [
        ("gpu_lost", 1, "GPU is lost")
    ]
    machine.gpus = GPUS
    await find_gpus("auto", {}, kept)
    machine.gpus = LOST
    for _ in range(2):
        assert plan_workers("auto", None, await find_gpus("auto", {}, kept)).devices == each(
            *UUIDS
        ), "it is known from before"
    found = await find_gpus("auto", {"CUDA_VISIBLE_DEVICES": "GPU-1b,GPU-3d"}, kept)
    assert plan_workers("auto", None, found).devices == each(UUIDS[1], UUIDS[3])


@pytest.mark.anyio
async def test_workers_find_themselves_in_the_plan_while_the_driver_does_not_tell(
    machine: Machine, tmp_path: Path
) -> None:
    """A loader that comes while its predecessor's workers run."""
    kept = tmp_path / "gpus.json"
    await find_gpus("auto", {"CUDA_VISIBLE_DEVICES": "2,0"}, kept)
    machine.gpus = NvmlFailed("NVML: Unknown Error")
    for kind in ("auto", "cuda"):
        found = await find_gpus(kind, {"CUDA_VISIBLE_DEVICES": "2,0"}, kept)
        assert plan_workers(kind, None, found).devices == each(UUIDS[2], UUIDS[0])
    kept.write_text("{")
    found = await find_gpus("auto", {}, kept)
    assert found == UNTOLD
    assert (await find_gpus("auto", {"CUDA_VISIBLE_DEVICES": ""}, kept)).untold is False, (
        "none are wanted"
    )


@pytest.mark.anyio
async def test_a_driver_that_is_absent_leaves_the_cores_and_one_that_hangs_does_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus = NvmlUnavailable("NVML: library not found")
    assert await find_gpus("auto", {}) == FoundGpus(why_none="NVML: library not found")
    machine.answers.clear()
    monkeypatch.setattr(devices, "LOOK_DEADLINE_S", 0.1)
    with capture_logs() as logs:
        found = await find_gpus("auto", {})
    machine.answers.set()
    assert "took longer than 0.1 s" in found.why_none
    assert found.untold
    assert logs[0]["event"] == "the driver hangs"
    assert (await find_gpus("sim", {})).gpus == ()


@pytest.mark.anyio
async def test_native_code_that_takes_too_long_is_not_the_drivers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.compiles.clear()
    monkeypatch.setattr(devices, "COMPILE_DEADLINE_S", 0.1)
    with capture_logs() as logs:
        found = await find_gpus("auto", {})
    machine.compiles.set()
    assert found == FoundGpus(why_none="compiling native code took longer than 0.1 s")
    assert [one["action"] for one in logs] == ["gpus_unusable"]


@pytest.mark.parametrize(
    ("installed", "named", "why"),
    [
        ({"gcc"}, None, ""),
        ({"clang"}, None, ""),
        ({"/opt/cc"}, "/opt/cc", ""),
        ({"g++"}, None, "neither gcc nor clang is installed"),
        ({"gcc"}, "/opt/cc", "CC names /opt/cc"),
    ],
)
def test_triton_needs_a_c_compiler(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], named: str | None, why: str
) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda package: package)
    monkeypatch.setattr(devices, "unavailable", lambda: "")
    monkeypatch.setattr(devices.shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.delenv("CC", raising=False)
    if named:
        monkeypatch.setenv("CC", named)
    assert why in unusable()
    assert bool(unusable()) == bool(why)


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", text)


def test_one_gpu_that_is_opened_is_enough() -> None:
    only_the_last = "import os, sys; sys.exit(0 if os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-3d' else 'old driver')"
    assert unopened(GPUS, program(only_the_last)) == ""
    assert (
        unopened(GPUS[:3], program(only_the_last))
        == "torch does not open H200 GPU-2c with driver 580.0: old driver"
    )
    assert (
        unopened(GPUS, program("import os; os.abort()"))
        == "torch does not open H200 GPU-3d with driver 580.0: exit code -6"
    )
    assert unopened((LOST[1],), ("/no/such/program",)) == "", "a lost one is not tried"


def test_a_process_that_hangs_in_the_driver_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "OPEN_DEADLINE_S", 0.2)
    hangs = program("import sys; sys.stdin = open(sys.argv[1])")
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    assert (
        unopened(GPUS, (*hangs, str(fifo)))
        == "torch has not opened H200 GPU-0a in 0.2 s, with driver 580.0"
    )


def test_an_empty_number_of_workers_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_WORKERS", "")
    assert LoaderSettings().workers is None
    monkeypatch.setenv("PILOTLIGHT_WORKERS", "3")
    assert LoaderSettings().workers == 3
