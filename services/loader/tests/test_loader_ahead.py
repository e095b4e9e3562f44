"""Workers that begin before their loader knows what they are."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.common.clock import SystemClock
from pilotlight.common.machine import END_WITH_PARENT
from pilotlight.common.procfs import look_at
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff
from pilotlight.loader import workers_ahead
from pilotlight.loader.identity import node_id_of
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.loader.processes import Process, ProcessFile
from pilotlight.loader.reports import Changes
from pilotlight.loader.settings import LoaderSettings
from pilotlight.loader.supervise import WorkerPlan, WorkerSupervisor
from pilotlight.loader.workers_ahead import LOG_DIR, STATE_DIR, WorkersAhead, pid_path_of
from pilotlight.policy.ids import WorkerId

WORKER = WorkerId("node-1-w0")
TELLS = """
import json, os, signal, sys
told = sys.stdin.read()
print("told", told, flush=True)
if not told:
    sys.exit(0)
signal.pause()
"""


def command_of(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def says(path: Path, text: str) -> Callable[[], bool]:
    return lambda: path.exists() and text in path.read_text()


def alive(pid: int) -> bool:
    found = look_at(pid)
    return found is not None and found.state != "Z"


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that say what they are told."""
    monkeypatch.setattr(workers_ahead, "COMMAND", command_of(TELLS))


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if "PILOTLIGHT" not in name},
        "PILOTLIGHT_STATE_DIR": str(tmp_path / "state"),
        "PILOTLIGHT_LOG_DIR": str(tmp_path / "logs"),
        "PILOTLIGHT_WORKER_KIND": "cpu",
    }


def devices(folder: Path, gpus: int) -> Path:
    folder.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(gpus))):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("asked", "gpus", "kind", "count"),
    [
        ({}, 0, "cpu", 1),
        ({}, 2, "cuda", 2),
        ({"PILOTLIGHT_WORKERS": "1"}, 2, "cuda", 1),
        ({"PILOTLIGHT_WORKERS": "3"}, 2, "cpu", 3),
        ({"PILOTLIGHT_WORKERS": "0"}, 2, "cpu", 0),
        ({"PILOTLIGHT_WORKERS": ""}, 1, "cuda", 1),
        ({"PILOTLIGHT_WORKER_KIND": "cpu"}, 2, "cpu", 1),
        ({"PILOTLIGHT_WORKER_KIND": "cuda"}, 0, "cuda", 1),
        ({"PILOTLIGHT_WORKER_KIND": "sim", "PILOTLIGHT_WORKERS": "9"}, 0, "sim", 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 2, "cuda", 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, "cpu", 1),
    ],
)
def test_what_there_will_be(
    asked: dict[str, str], gpus: int, kind: str, count: int, tmp_path: Path
) -> None:
    assert workers_ahead.guessed(asked, devices(tmp_path / "dev", gpus)) == (kind, count)


def test_what_is_written_down_twice_is_the_same() -> None:
    fields = LoaderSettings.model_fields
    assert str(fields["state_dir"].default) == STATE_DIR
    assert str(fields["log_dir"].default) == LOG_DIR


def test_little_is_imported_before_workers_begin() -> None:
    program = """
import sys
import pilotlight.loader.__main__
print([one for one in ("asyncio", "msgspec", "pydantic", "structlog") if one in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.anyio
async def test_a_worker_is_told_what_was_not_known(variables: dict[str, str]) -> None:
    secret = {END_WITH_PARENT: "1", "HF_TOKEN": "hf"}
    ahead = WorkersAhead.of(variables | secret)
    (name,) = ahead.names
    assert name == f"{node_id_of(Path(variables['PILOTLIGHT_STATE_DIR']))}-w0"
    known = ahead._begun[name].environment
    assert not {*secret} & {*known}
    pid = ahead.take(name, {**known, "PILOTLIGHT_DEVICE": "cuda"})
    assert pid is not None
    assert ahead.take(name, known) is None, "once"
    log = Path(variables["PILOTLIGHT_LOG_DIR"]) / "worker-0.log"
    told = json.dumps({"PILOTLIGHT_DEVICE": "cuda"})
    await until(says(log, f"told {told}"))
    process = Process.begun(pid)
    process.kill_session()
    await process.ended()


def test_a_worker_that_lives_is_not_begun_again(variables: dict[str, str]) -> None:
    path = pid_path_of(Path(variables["PILOTLIGHT_STATE_DIR"]), 0)
    path.parent.mkdir(parents=True)
    ProcessFile(path).write(Process.begun(os.getpid()).record)
    assert WorkersAhead.of(variables).names == frozenset()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": "x", "start_ticks": 1}'])
def test_a_file_that_names_no_process_is_no_worker(content: str, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(content)
    assert not workers_ahead._lives(tmp_path / "0.json")


@pytest.mark.parametrize(
    "wrong", [{"PILOTLIGHT_WORKERS": "two"}, {"PILOTLIGHT_STATE_DIR": "/proc/1"}]
)
def test_settings_that_are_wrong_begin_nothing(
    wrong: dict[str, str], variables: dict[str, str]
) -> None:
    assert WorkersAhead.of(variables | wrong).names == frozenset()


class Beginning:
    """Workers that have begun, and who supervises them."""

    def __init__(self, folder: Path) -> None:
        self.plan = WorkerPlan(
            worker_id=WORKER,
            command=command_of("print('another', flush=True)\nimport signal; signal.pause()"),
            environment={**os.environ, "WHO": "worker"},
            log_path=folder / "logs" / "worker-0.log",
            pid_path=folder / "workers" / "0.json",
        )
        self.ahead = WorkersAhead()
        self._background = Background()

    def begin(self, name: WorkerId = WORKER) -> int:
        self.ahead.begin(name, self.plan.environment, self.plan.log_path)
        return self.ahead._begun[name].pid

    def supervisor(self, *, handover: bool = False) -> WorkerSupervisor:
        return WorkerSupervisor(
            plans=[self.plan],
            handover=handover,
            changes=Changes(),
            metrics=LoaderMetrics(CollectorRegistry()),
            clock=SystemClock(),
            background=self._background,
            ahead=self.ahead,
            terminate_s=0.2,
            backoff=Backoff(first_s=0.001, limit_s=0.01),
        )

    @property
    def pid(self) -> int:
        record = ProcessFile(self.plan.pid_path).read()
        return record.pid if record is not None else 0


@pytest.mark.anyio
async def test_the_worker_that_has_begun_is_the_first_one(tmp_path: Path) -> None:
    beginning = Beginning(tmp_path)
    pid = beginning.begin()
    supervisor = beginning.supervisor()
    await supervisor.start()
    await until(lambda: beginning.pid == pid)
    os.kill(pid, 9)
    await until(lambda: beginning.pid not in (0, pid))
    await until(says(beginning.plan.log_path, "another"))
    await supervisor.stop()


@pytest.mark.anyio
async def test_one_that_has_ended_is_replaced_at_once(tmp_path: Path) -> None:
    beginning = Beginning(tmp_path)
    pid = beginning.begin()
    os.kill(pid, 9)
    await until(lambda: not alive(pid))
    supervisor = beginning.supervisor()
    await supervisor.start()
    await until(lambda: beginning.pid not in (0, pid))
    await until(lambda: look_at(pid) is None)
    await supervisor.stop()


@pytest.mark.anyio
async def test_those_that_nobody_wants_end(tmp_path: Path) -> None:
    beginning = Beginning(tmp_path)
    first = beginning.supervisor(handover=True)
    await first.start()
    await until(lambda: beginning.pid != 0)
    adopted = beginning.pid
    await first.stop()
    unwanted = [beginning.begin(), beginning.begin(WorkerId("node-1-w9"))]
    second = beginning.supervisor()
    await second.start()
    for pid in unwanted:
        await until(lambda pid=pid: look_at(pid) is None)
    assert beginning.pid == adopted
    assert beginning.ahead.names == frozenset()
    await second.stop()


def test_workers_end_when_their_loader_does_before_they_are_told(
    variables: dict[str, str], tmp_path: Path
) -> None:
    program = f"""
import os
from pilotlight.loader import workers_ahead
workers_ahead.COMMAND = {command_of(TELLS)!r}
ahead = workers_ahead.WorkersAhead.of(os.environ)
print(*[one.pid for one in ahead._begun.values()], flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pid = int(done.stdout)
    asyncio.run(until(lambda: not alive(pid)))
