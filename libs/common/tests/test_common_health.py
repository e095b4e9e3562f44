import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from pilotlight.common import health
from pilotlight.common.errors import BadRequest
from pilotlight.common.health import HealthServer
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff

pytestmark = pytest.mark.anyio


@dataclass
class Parts:
    """A bus and an application, as far as health asks them."""

    connected: bool = True
    unwritable: str | None = None
    reason: str | None = None

    def ready(self) -> str | None:
        return self.reason


async def ask(path: Path, request: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    return (int(answer.split()[1]) if answer else 0), answer.partition("\r\n\r\n")[2]


def get(path: str) -> str:
    return f"GET {path} HTTP/1.1\r\nHost: local\r\n\r\n"


async def test_three_questions(tmp_path: Path) -> None:
    metrics = CollectorRegistry()
    Counter("requests", "x", registry=metrics).inc(3)
    parts = Parts()
    server = HealthServer(tmp_path / "run" / "x.sock", metrics, parts, parts)
    await server.start()
    await server.start()
    assert await ask(server.path, get("/healthz")) == (200, "ok\n")
    assert await ask(server.path, get("/readyz?verbose")) == (200, "ready\n")
    parts.reason = "no leader"
    assert await ask(server.path, get("/readyz")) == (503, "no leader\n")
    parts.unwritable = "NATS stores nothing"
    assert await ask(server.path, get("/readyz")) == (503, "NATS stores nothing\n")
    parts.connected = False
    assert await ask(server.path, get("/readyz")) == (503, "NATS cannot be reached\n")
    assert (await ask(server.path, get("/healthz")))[0] == 200
    status, body = await ask(server.path, get("/metrics"))
    assert status == 200
    assert "requests_total 3.0" in body
    assert (await ask(server.path, get("/other")))[0] == 404
    assert (await ask(server.path, "POST /healthz HTTP/1.1\r\n\r\n"))[0] == 405
    assert server.path.stat().st_mode & 0o777 == 0o600
    await server.stop()
    await server.stop()
    assert not server.path.exists()


async def test_noise_is_no_trouble(tmp_path: Path) -> None:
    parts = Parts()
    server = HealthServer(tmp_path / "x.sock", CollectorRegistry(), parts, parts)
    await server.start()
    assert (await ask(server.path, "x" * 20_000))[0] == 0
    assert (await ask(server.path, "\r\n\r\n"))[0] == 405
    assert (await ask(server.path, get("/healthz")))[0] == 200
    await server.stop()


async def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    parts = Parts()
    (tmp_path / "x.sock").write_text("left by a process that was killed")
    server = HealthServer(tmp_path / "x.sock", CollectorRegistry(), parts, parts)
    await server.start()
    assert (await ask(server.path, get("/healthz")))[0] == 200
    await server.stop()


async def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    parts = Parts()
    server = HealthServer(tmp_path / ("x" * 120), CollectorRegistry(), parts, parts)
    with pytest.raises(BadRequest, match="PILOTLIGHT_RUN_DIR"):
        await server.start()


LISTENER = """
import signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(1)
print("up", flush=True)
signal.pause()
"""


def listening(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "up\n"
    return process


def old(path: Path) -> Path:
    os.utime(path, (1, 1))
    return path


async def test_sockets_of_killed_processes_go_and_those_of_others_stay(tmp_path: Path) -> None:
    parts = Parts()
    dead, stopped, young = (tmp_path / f"worker-{number}.sock" for number in (os.getpid(), 12, 13))
    (tmp_path / "notes").touch()
    processes = [
        listening(dead),
        listening(stopped),
        listening(young),
        listening(tmp_path / "pool.sock"),
    ]
    try:
        processes[1].send_signal(signal.SIGSTOP)
        for process in (processes[0], *processes[2:]):
            process.kill()
            process.wait()
        for path in (dead, stopped, tmp_path / "pool.sock"):
            old(path)
        server = HealthServer(tmp_path / "loader-14.sock", CollectorRegistry(), parts, parts)
        await server.start()
        assert not dead.exists(), "whatever process has its process id now"
        assert stopped.exists()
        assert young.exists(), "it may be about to listen"
        assert (tmp_path / "pool.sock").exists(), "no process's own"
        assert (await ask(server.path, get("/healthz")))[0] == 200
        await server.stop()
        assert sorted(os.listdir(tmp_path)) == [
            "notes",
            "pool.sock",
            "worker-12.sock",
            "worker-13.sock",
        ]
    finally:
        processes[1].kill()
        for process in processes:
            process.wait()


async def test_a_socket_that_cannot_be_made_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_BACKOFF", Backoff(first_s=0.01, limit_s=0.01))
    (tmp_path / "run").touch()
    parts = Parts()
    server = HealthServer(tmp_path / "run" / "x-1.sock", CollectorRegistry(), parts, parts)
    await server.start()
    assert server.not_ready() is None
    (tmp_path / "run").unlink()
    await until(server.path.exists)
    assert (await ask(server.path, get("/healthz")))[0] == 200
    await server.stop()
    assert not server.path.exists()
