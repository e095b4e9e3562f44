import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from pilotlight.common.errors import BadRequest
from pilotlight.common.health import HealthServer

pytestmark = pytest.mark.anyio


@dataclass
class Parts:
    """A bus and an application, as far as health asks them."""

    connected: bool = True
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
