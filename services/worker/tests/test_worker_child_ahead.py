"""What variables say of a worker's engine before its settings are read, and a worker that begins
before its loader knows what it will be.
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.common.procfs import look_at
from pilotlight.common.testing import until
from pilotlight.worker.engine_child import child
from pilotlight.worker.engines.child_ahead import (
    ENV_PREFIX,
    LOG_DIR,
    ChildAhead,
    engine_ahead,
    options_ahead,
)
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.options import child_options, worker_name
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.settings import WorkerSettings

AHEAD = (sys.executable, "-m", "pilotlight.worker", "--ahead")
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NODE_ID": "node-1", "WORKERS": "2", "LOG_LEVEL": "debug", "LOG_DIR": "-"},
        {"WORKER_ID": "node-1-w7", "DEVICE": "cuda", "LOG_DIR": "logs", "FAULTS": "load=0.2"},
        {"THREADS": "3", "STEP_TOKENS": "64", "DEVICE_BYTES": "1000000"},
        {"WORKERS": "1000"},
        {"STATE_DIR": "state", "NODE_ID": "node-2", "DEVICE": "cuda"},
    ],
)
def test_variables_say_what_settings_say(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(ENV_PREFIX + name, value)
    settings = WorkerSettings()
    assert options_ahead(os.environ) == child_options(settings, worker_name(settings))


def test_what_is_written_down_twice_is_the_same() -> None:
    assert str(WorkerSettings.model_fields["log_dir"].default) == LOG_DIR
    assert WorkerSettings.model_config.get("env_prefix") == ENV_PREFIX


@pytest.mark.parametrize(
    "variables", [{"DEVICE": "sim"}, {"DEVICE": "tpu"}, {"WORKERS": "two"}, {"THREADS": "many"}]
)
def test_no_engine_begins_where_there_is_none_or_settings_are_wrong(
    variables: dict[str, str],
) -> None:
    assert engine_ahead({ENV_PREFIX + name: value for name, value in variables.items()}) is None


def test_a_child_that_is_promoted_is_shown_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    child._show(())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1", "it was shown one when it started"
    child._show(("GPU-7",))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_child_that_was_started_with_other_options_is_not_taken(tmp_path: Path) -> None:
    options = ChildOptions(threads=1, log_path=tmp_path / "engine.log")
    ahead = ChildAhead(replace(options, threads=2))
    assert ahead.fits(replace(options, threads=2, cuda_devices=("GPU-7",)))
    engine = ProcessEngine(options, ahead=ahead)
    up = await engine.start()
    assert up.pid != ahead.pid
    assert look_at(ahead.pid) is None
    await engine.stop()


def ended(pid: int) -> bool:
    found = look_at(pid)
    return found is None or found.state == "Z"


def engines_of(pid: int) -> list[int]:
    told = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in told.read_text().split()] if told.exists() else []


@pytest.mark.slow
def test_a_worker_that_nobody_wants_ends_with_its_engine(tmp_path: Path) -> None:
    variables = {**os.environ, "PILOTLIGHT_LOG_DIR": str(tmp_path)}
    with subprocess.Popen(AHEAD, stdin=subprocess.PIPE, env=variables) as worker:
        asyncio.run(until(lambda: engines_of(worker.pid) != [], deadline_s=DEADLINE_S))
        (engine,) = engines_of(worker.pid)
        worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 0
    asyncio.run(until(lambda: ended(engine), deadline_s=DEADLINE_S))


@pytest.mark.slow
def test_a_worker_is_told_its_variables(tmp_path: Path) -> None:
    """Settings that are wrong show that they were read."""
    told = json.dumps({"PILOTLIGHT_DEVICE": "tpu", "PILOTLIGHT_LOG_DIR": str(tmp_path)})
    done = subprocess.run(
        AHEAD, input=told, text=True, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2
    assert "PILOTLIGHT_DEVICE" in done.stdout + done.stderr


def test_little_is_imported_before_an_engine_begins() -> None:
    program = """
import sys
import pilotlight.worker.engines.child_ahead
print([one for one in ("asyncio", "msgspec", "pydantic", "structlog") if one in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
