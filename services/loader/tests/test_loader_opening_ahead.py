"""The proof that torch opens a GPU, begun before its loader has imported anything."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pilotlight.common import service
from pilotlight.common.procfs import look_at
from pilotlight.common.testing import until
from pilotlight.loader import __main__, devices, opening_ahead
from pilotlight.loader.devices import FoundGpus, find_gpus
from pilotlight.loader.opening_ahead import OpeningAhead, record_path_of
from pilotlight.loader.testing import Cluster
from pilotlight.native.building import compiler

DEADLINE_S = 60.0
OPENS, NONE, FAILS, KILLED, WAITS = "opens", "none", "fails", "killed", "waits"
RUNTIME = """
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;
extern "C" int cudaGetDeviceCount(int *count) {
    if (const char *told = getenv("TOLD")) {
        FILE *file = fopen(told, "w");
        for (char **one = environ; *one; one++) fwrite(*one, 1, strlen(*one) + 1, file);
        fclose(file);
    }
    const char *does = getenv("DOES");
    if (!strcmp(does, "killed")) kill(getpid(), SIGKILL);
    if (!strcmp(does, "waits")) fclose(fopen(getenv("GATE"), "r"));
    *count = strcmp(does, "none") ? 2 : 0;
    return strcmp(does, "fails") ? 0 : 35;
}
"""
"""Of the library that torch has for CUDA: it says who asks, and does as it is told."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library."""
    found = compiler()
    if found is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.cpp").write_text(RUNTIME)
    made = folder / "libc10_cuda.so"
    subprocess.run(
        [found, "-shared", "-fPIC", str(folder / "runtime.cpp"), "-o", str(made)], check=True
    )
    return made


class Node:
    """A machine with two GPUs, no state, and a torch that does as it is told."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.state = folder / "state"
        self.devices = folder / "dev"
        self.gate = folder / "gate"
        self.told = folder / "told"
        self._modules = folder / "modules"
        self.library = self._modules / "torch" / "lib" / "libc10_cuda.so"
        for made in (self.state, self.devices, self.library.parent):
            made.mkdir(parents=True)
        os.mkfifo(self.gate)
        self.library.symlink_to(runtime)
        self.gpus(2)
        self.does, self.asked = OPENS, False
        self.torch("pass")

    def gpus(self, count: int) -> None:
        for path in self.devices.iterdir():
            path.unlink()
        for index in range(count):
            (self.devices / f"nvidia{index}").touch()

    def torch(self, opening: str) -> None:
        """What ``torch.cuda.init`` does, if somebody imports torch."""
        (self._modules / "torch" / "__init__.py").write_text(
            f"class cuda:\n    @staticmethod\n    def init():\n        {opening}\n"
        )

    @property
    def variables(self) -> dict[str, str]:
        hidden = ("PILOTLIGHT", "CUDA")
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(hidden)},
            "PILOTLIGHT_STATE_DIR": str(self.state),
            "PYTHONPATH": str(self._modules),
            "GATE": str(self.gate),
            "DOES": self.does,
            **({"TOLD": str(self.told)} if self.asked else {}),
        }

    def begin(self, **asked: str) -> OpeningAhead:
        return OpeningAhead.of(self.variables | asked, self.devices)

    def let_go(self) -> None:
        """Who waits at the gate goes on; returns when somebody has come there."""
        self.gate.write_text("")


@pytest.fixture
def node(tmp_path: Path, runtime: Path) -> Node:
    return Node(tmp_path, runtime)


def pid_of(opening: OpeningAhead) -> int:
    """Of one that waits at the gate."""
    assert opening._pid is not None
    return opening._pid


def gone(pid: int) -> Callable[[], bool]:
    """Not even a zombie is left."""
    return lambda: look_at(pid) is None


@pytest.mark.parametrize(
    ("asked", "gpus", "begins"),
    [
        ({}, 2, True),
        ({}, 0, False),
        ({"PILOTLIGHT_WORKER_KIND": "cuda"}, 0, True),
        ({"PILOTLIGHT_WORKER_KIND": "cpu"}, 2, False),
        ({"PILOTLIGHT_WORKER_KIND": "sim"}, 2, False),
        ({"PILOTLIGHT_WORKERS": "3"}, 2, False),
        ({"PILOTLIGHT_WORKERS": "two"}, 2, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, False),
    ],
)
def test_it_begins_where_workers_will_be_on_gpus(
    asked: dict[str, str], gpus: int, begins: bool, node: Node
) -> None:
    node.gpus(gpus)
    assert node.begin(**asked).opened(DEADLINE_S) == begins


def test_what_an_earlier_run_has_kept_is_not_proven_again(node: Node) -> None:
    record_path_of(node.state).write_text("{}")
    assert not node.begin().opened(DEADLINE_S)


def test_torch_sees_what_the_loader_is_shown_and_none_of_its_secrets(node: Node) -> None:
    node.asked = True
    assert node.begin(CUDA_VISIBLE_DEVICES="1,0", HF_TOKEN="hf").opened(DEADLINE_S)
    lines = node.told.read_text().split("\0")
    told = dict(line.split("=", 1) for line in lines if "=" in line)
    assert (told["CUDA_VISIBLE_DEVICES"], told["CUDA_DEVICE_ORDER"]) == ("1,0", "PCI_BUS_ID")
    assert "HF_TOKEN" not in told


@pytest.mark.parametrize("does", [FAILS, NONE, KILLED])
def test_a_process_that_fails_has_opened_none(does: str, node: Node) -> None:
    node.does = does
    assert not node.begin().opened(DEADLINE_S)


def test_torch_without_cuda_opens_none(node: Node) -> None:
    node.library.unlink()
    assert not node.begin().opened(DEADLINE_S)


def test_torch_itself_is_not_imported(node: Node) -> None:
    (node.library.parents[1] / "__init__.py").write_text("raise ImportError('it takes seconds')")
    assert node.begin().opened(DEADLINE_S)


def test_one_that_cannot_be_started_has_opened_none(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening_ahead, "COMMAND", ("/no/such/program",))
    opening = node.begin()
    assert not opening.opened(DEADLINE_S)
    opening.give_up()


@pytest.mark.anyio
async def test_one_that_hangs_has_opened_none_and_is_ended(node: Node) -> None:
    node.does = WAITS
    opening = node.begin()
    pid = pid_of(opening)
    assert not opening.opened(0.1)
    await until(gone(pid))


@pytest.mark.anyio
async def test_one_that_ends_is_reaped_where_nobody_asks(node: Node) -> None:
    node.does = WAITS
    pid = pid_of(node.begin())
    node.let_go()
    await until(gone(pid))


@pytest.mark.anyio
async def test_a_loader_whose_workers_are_others_ends_it(node: Node, cluster: Cluster) -> None:
    node.does = WAITS
    opening = node.begin()
    pid = pid_of(opening)
    await cluster.start(worker_kind="sim", opening=opening)
    await until(gone(pid))


@pytest.mark.anyio
async def test_why_none_is_opened_is_found_after_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the process that begins ahead to the one that tells why: of both torch is the same."""
    gpu = devices.Gpu(index=0, uuid="GPU-0", name="H200", driver="580.0")
    monkeypatch.setattr(devices, "list_gpus", lambda: (gpu,))
    monkeypatch.setattr(devices, "unusable", lambda: "")
    monkeypatch.setenv("PYTHONPATH", node.variables["PYTHONPATH"])
    node.does = FAILS
    node.torch("raise RuntimeError('the driver is too old')")
    opening = node.begin()
    assert await find_gpus("auto", {}, opening=opening) == FoundGpus(
        why_none="torch does not open H200 GPU-0 with driver 580.0: RuntimeError: the driver is too old"
    )


def test_it_ends_with_its_loader(node: Node) -> None:
    program = """
import os, sys
from pathlib import Path
from pilotlight.loader.opening_ahead import OpeningAhead
opening = OpeningAhead.of(os.environ, Path(sys.argv[1]))
open(os.environ["TOLD"]).read()
print(opening._pid, flush=True)
os._exit(0)
"""
    # It says so when it is as far as the driver.
    os.mkfifo(node.told)
    node.does, node.asked = WAITS, True
    done = subprocess.run(
        [sys.executable, "-c", program, str(node.devices)],
        env=node.variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pid = int(done.stdout)
    asyncio.run(until(lambda: (found := look_at(pid)) is None or found.state == "Z"))


def test_the_loaders_entry_begins_it_and_hands_it_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[partial[object]] = []

    def run_service(name: str, settings: type, build: partial[object]) -> int:
        handed.append(build)
        return 0

    monkeypatch.setattr(service, "run_service", run_service)
    asked = {"PILOTLIGHT_WORKER_KIND": "cuda", "PILOTLIGHT_WORKERS": "0"}
    for name, value in (node.variables | asked).items():
        monkeypatch.setenv(name, value)
    assert __main__._main() == 0
    opening = handed[0].keywords["opening"]
    assert isinstance(opening, OpeningAhead)
    assert opening.opened(DEADLINE_S)
