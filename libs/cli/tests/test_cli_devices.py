"""What the command line says of devices: in `doctor`, in `node list`, and when the system is up."""

import threading
from typing import Any

import pytest

from pilotlight.cli import doctor, nodes
from pilotlight.cli.doctor import Verdict, check_gpus
from pilotlight.cli.home import Home
from pilotlight.cli.plan import Endpoints, SystemOptions, child_specs
from pilotlight.cli.up import told_workers
from pilotlight.common.nvml import DeviceState, Gpu, NvmlFailed, NvmlUnavailable
from pilotlight.policy.cluster import DeviceHealth, HealthState

WELL = DeviceHealth(state=HealthState.HEALTHY)
ILL = DeviceHealth(state=HealthState.FAILED, reason="lost: GPU is lost")


def states(*healths: DeviceHealth) -> tuple[DeviceState, ...]:
    return tuple(
        DeviceState(
            gpu=Gpu(
                index=index, uuid=f"GPU-{index}", name="H200", memory_bytes=1 << 37, driver="580"
            ),
            health=health,
        )
        for index, health in enumerate(healths)
    )


def test_doctor_says_which_gpus_there_are_and_how_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "unusable", lambda: "")
    monkeypatch.setattr(doctor, "unopened", lambda gpus: "")
    check = check_gpus(lambda: states(WELL, WELL))
    assert (check.verdict, check.found) == (
        Verdict.OK,
        "0: H200, 131,072 MiB, healthy; 1: H200, 131,072 MiB, healthy",
    )
    check = check_gpus(lambda: states(WELL, ILL))
    assert check.verdict is Verdict.WARNING
    assert "1: H200, 131,072 MiB, failed (lost: GPU is lost)" in check.found
    assert "A GPU fails" in check.what_to_do
    check = check_gpus(
        lambda: (*states(WELL), DeviceState(gpu=Gpu(index=1, lost="GPU is lost"), health=ILL))
    )
    assert check.found == "0: H200, 131,072 MiB, healthy; 1: failed (lost: GPU is lost)"


def test_doctor_says_why_gpus_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "unusable", lambda: "triton is not installed")
    assert (
        check_gpus(lambda: states(WELL)).what_to_do
        == "workers run on CPU cores: triton is not installed"
    )
    monkeypatch.setattr(doctor, "unusable", lambda: "")
    monkeypatch.setattr(doctor, "unopened", lambda gpus: f"torch does not open {gpus[0].uuid}")
    assert (
        check_gpus(lambda: states(WELL)).what_to_do
        == "workers run on CPU cores: torch does not open GPU-0"
    )

    def failed() -> tuple[DeviceState, ...]:
        raise NvmlFailed("NVML: Unknown Error")

    check = check_gpus(failed)
    assert (check.verdict, check.found) == (Verdict.WARNING, "NVML: Unknown Error")
    assert "no worker starts" in check.what_to_do

    def absent() -> tuple[DeviceState, ...]:
        raise NvmlUnavailable("NVML: NVML Shared Library Not Found")

    check = check_gpus(absent)
    assert (check.verdict, check.found) == (
        Verdict.WARNING,
        "none: NVML: NVML Shared Library Not Found",
    )
    assert check_gpus(tuple).found == "none: the driver has none"


def test_doctor_does_not_wait_for_a_driver_that_hangs() -> None:
    hangs = threading.Event()
    check = check_gpus(lambda: (hangs.wait(20), ())[1], deadline_s=0.1)
    hangs.set()
    assert (check.verdict, check.found) == (
        Verdict.WARNING,
        "the driver has not answered for 0.1 s",
    )


def device(
    worker_id: str,
    name: str = "H200",
    health: str = "healthy",
    reason: str = "",
    kind: str = "cuda",
) -> dict[str, Any]:
    return {"worker_id": worker_id, "kind": kind, "name": name, "health": health, "reason": reason}


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ([], ""),
        ([device("w0", kind="cpu", name="", health="unwatched")], "cpu"),
        ([device("w0"), device("w1")], "2 x H200"),
        (
            [device("w0"), device("w1", health="failed", reason="xid: 79, gone")],
            "H200; w1 failed: xid: 79, gone",
        ),
        ([device("w0", health="degraded", reason="ecc: 2")], "w0 degraded: ecc: 2"),
    ],
)
def test_node_list_names_devices_that_are_not_well(
    devices: list[dict[str, Any]], told: str
) -> None:
    assert nodes._devices({"devices": devices}) == told
    assert nodes._devices({}) == "", "of a gateway that does not say"


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ((), "no worker"),
        (("cpu",), "1 CPU worker"),
        (("cuda", "cuda"), "2 GPU workers"),
        (("sim", "cuda"), "1 GPU worker and 1 sim worker"),
    ],
)
def test_up_says_what_it_runs_on(kinds: tuple[str, ...], told: str) -> None:
    assert told_workers([{"device": {"kind": kind}} for kind in kinds]) == told


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SystemOptions(), {"PILOTLIGHT_WORKERS": "1"}),
        (SystemOptions(workers=None), {}),
        (
            SystemOptions(workers=3, worker_kind="cpu"),
            {"PILOTLIGHT_WORKERS": "3", "PILOTLIGHT_WORKER_KIND": "cpu"},
        ),
    ],
)
def test_what_is_left_open_is_the_loaders_to_decide(
    tmp_path: Any, options: SystemOptions, expected: dict[str, str]
) -> None:
    """A loader of the release before knows no `auto`."""
    endpoints = Endpoints(
        nats_url="nats://n", database_url="postgresql:///p", object_store_url="file:///o"
    )
    (loader,) = [
        spec
        for spec in child_specs(Home(tmp_path), options, endpoints, {})
        if spec.name == "loader"
    ]
    told = {
        name: value
        for name, value in loader.environment.items()
        if name in ("PILOTLIGHT_WORKERS", "PILOTLIGHT_WORKER_KIND")
    }
    assert told == expected
