"""Which workers a node gets: by its GPUs, its settings, and what CUDA shows it."""

import threading

import pytest

from pilotlight.common.errors import BadRequest
from pilotlight.common.nvml import Gpu, NvmlUnavailable
from pilotlight.loader import devices
from pilotlight.loader.devices import FoundGpus, WorkerDevices, find_gpus, plan_workers, visible
from pilotlight.loader.settings import LoaderSettings

GPUS = tuple(
    Gpu(index=index, uuid=f"GPU-{index}{letter}", name="H200", memory_bytes=1 << 37, driver="580.0")
    for index, letter in enumerate("abcd")
)
UUIDS = tuple(gpu.uuid for gpu in GPUS)
FOUR, NONE = FoundGpus(gpus=GPUS), FoundGpus(why_none="there is no driver")


@pytest.mark.parametrize(
    ("kind", "workers", "found", "expected"),
    [
        ("auto", None, FOUR, ("cuda", UUIDS)),
        ("auto", 2, FOUR, ("cuda", UUIDS[:2])),
        ("auto", 5, FOUR, ("cpu", ("",) * 5)),
        ("auto", None, NONE, ("cpu", ("",))),
        ("auto", 3, NONE, ("cpu", ("",) * 3)),
        ("auto", 0, FOUR, ("cuda", ())),
        ("auto", 0, NONE, ("cpu", ())),
        ("cuda", None, FOUR, ("cuda", UUIDS)),
        ("cuda", 1, FOUR, ("cuda", UUIDS[:1])),
        ("cpu", None, FOUR, ("cpu", ("",))),
        ("cpu", 4, FOUR, ("cpu", ("",) * 4)),
        ("sim", 7, FOUR, ("sim", ("",) * 7)),
    ],
)
def test_each_setting(kind: str, workers: int | None, found: FoundGpus, expected: tuple[str, tuple[str, ...]]) -> None:
    assert plan_workers(kind, workers, found) == WorkerDevices(kind=expected[0], devices=expected[1])


@pytest.mark.parametrize(
    ("workers", "found", "why"), [(None, NONE, "there is no driver"), (5, FOUR, "5 GPUs are needed: there are 4")]
)
def test_gpus_that_are_asked_for_and_not_there_are_an_error(workers: int | None, found: FoundGpus, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        plan_workers("cuda", workers, found)


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


@pytest.mark.anyio
async def test_gpus_are_found_where_an_engine_can_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: GPUS)
    monkeypatch.setattr(devices, "unusable", lambda: "")
    assert await find_gpus("auto", {}) == FOUR
    assert (await find_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "3"})).gpus == GPUS[3:]
    assert (await find_gpus("auto", {"CUDA_VISIBLE_DEVICES": ""})).why_none == "of 4 GPUs CUDA_VISIBLE_DEVICES shows none"
    monkeypatch.setattr(devices, "unusable", lambda: "triton is not installed")
    assert await find_gpus("auto", {}) == FoundGpus(why_none="triton is not installed")


@pytest.mark.anyio
async def test_a_driver_that_is_absent_or_hangs_leaves_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[Gpu, ...]:
        raise NvmlUnavailable("NVML: library not found")

    monkeypatch.setattr(devices, "list_gpus", absent)
    assert await find_gpus("auto", {}) == FoundGpus(why_none="NVML: library not found")
    hangs = threading.Event()
    monkeypatch.setattr(devices, "list_gpus", lambda: (hangs.wait(20), GPUS)[1])
    monkeypatch.setattr(devices, "LOOK_DEADLINE_S", 0.1)
    found = await find_gpus("auto", {})
    hangs.set()
    assert "took longer than 0.1 s" in found.why_none
    assert (await find_gpus("sim", {})).gpus == ()


def test_an_empty_number_of_workers_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_WORKERS", "")
    assert LoaderSettings().workers is None
    monkeypatch.setenv("PILOTLIGHT_WORKERS", "3")
    assert LoaderSettings().workers == 3
