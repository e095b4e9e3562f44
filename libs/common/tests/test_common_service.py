"""A service process: starts in order, tells that it is ready, stops in reverse, ends when one of
its tasks dies.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from pilotlight.common.errors import NoRoom
from pilotlight.common.service import LOOKS_FOR_GARBAGE, Application, Background, run_service
from pilotlight.common.settings import ServiceSettings

DEADLINE_S = 30.0
SERVICE = """
import gc
import sys
from pilotlight.common.service import Application, run_service
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.waiting import pause

class Part:
    def __init__(self, name): self.name = name
    async def start(self): print("start", self.name, flush=True)
    async def stop(self):
        print("stop", self.name, *gc.get_threshold(), flush=True)
        if self.name == "b": raise RuntimeError("must not keep a from stopping")

async def build(context):
    async def die():
        await pause(0.05)
        raise RuntimeError("died")
    if "die" in sys.argv: context.background.spawn("dying", die())
    return Application(components=[Part("a"), Part("b")], ready=lambda: "never")

sys.exit(run_service("probe", ServiceSettings, build))
"""


@pytest.fixture
def notified(tmp_path: Path) -> Generator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(DEADLINE_S)
        yield receiver


def start(tmp_path: Path, nats_url: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PILOTLIGHT_NATS_URL": nats_url,
        "PILOTLIGHT_RUN_DIR": str(tmp_path / "run"),
        "PILOTLIGHT_OBJECT_STORE_URL": "memory://",
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
    }
    command = [sys.executable, "-c", SERVICE, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_service_lives_and_ends_in_order(
    tmp_path: Path, nats_url: str, notified: socket.socket
) -> None:
    process = start(tmp_path, nats_url)
    assert notified.recv(100) == b"READY=1"
    (health,) = (tmp_path / "run").iterdir()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(health))
        client.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
        assert client.recv(1000).endswith(b"never\n")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_S)
    looks = " ".join(map(str, LOOKS_FOR_GARBAGE))
    stops = [f"stop b {looks}", f"stop a {looks}"]
    assert output.split("\n")[:-1] == ["start a", "start b", *stops]
    assert process.returncode == 0
    assert notified.recv(100) == b"STOPPING=1"
    assert not health.exists()


@pytest.mark.slow
def test_a_dead_task_ends_the_process(tmp_path: Path, nats_url: str) -> None:
    process = start(tmp_path, nats_url, "die")
    output, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "task_died" in log
    assert [line[:6] for line in output.split("\n")[-3:-1]] == ["stop b", "stop a"]


def test_wrong_settings_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def build(_: object) -> Application:
        raise AssertionError

    monkeypatch.setenv("PILOTLIGHT_TRACE_SAMPLE_RATIO", "2")
    assert run_service("probe", ServiceSettings, build) == 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NoRoom("no room"), '"code":"no_room","error":"no room"'),
        (ZeroDivisionError("a bug"), '"code":"internal","error":"ZeroDivisionError(\'a bug\')"'),
    ],
)
def test_a_service_that_cannot_start_says_why(
    error: Exception,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    nats_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def build(_: object) -> Application:
        raise error

    monkeypatch.setenv("PILOTLIGHT_NATS_URL", nats_url)
    monkeypatch.setenv("PILOTLIGHT_OBJECT_STORE_URL", "memory://")
    assert run_service("probe", ServiceSettings, build) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert '"action":"start_failed",' + told in last


@pytest.mark.anyio
async def test_background_tasks_are_ended() -> None:
    import asyncio

    background = Background()
    task = background.spawn("waits", asyncio.Event().wait())
    await background.stop()
    assert task.cancelled()
    assert not background.failed.done()


@pytest.mark.anyio
async def test_a_task_that_was_begun_before_ends_the_process_too() -> None:
    import asyncio

    async def fails() -> None:
        raise KeyError("gone")

    background = Background()
    background.own(asyncio.create_task(fails(), name="early"))
    assert await asyncio.wait_for(background.failed, 5.0) == "early: KeyError('gone')"
