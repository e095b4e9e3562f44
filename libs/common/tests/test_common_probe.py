import asyncio
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.common.health import HealthServer
from pilotlight.common.probe import not_ready

pytestmark = pytest.mark.anyio


@dataclass
class Parts:
    """A bus and an application, as far as health asks them."""

    connected: bool = True
    unwritable: str | None = None
    reason: str | None = None

    def ready(self) -> str | None:
        return self.reason


async def answered(run_dir: Path, service: str) -> str | None:
    return await asyncio.to_thread(not_ready, run_dir, service)


async def test_ready_when_one_process_is(tmp_path: Path) -> None:
    parts = Parts()
    server = HealthServer(tmp_path / "cache-7.sock", CollectorRegistry(), parts, parts)
    await server.start()
    # What a killed process left.
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "cache-6.sock"))
    left.close()
    assert await answered(tmp_path, "cache") is None
    parts.reason = "there is no lock"
    told = await answered(tmp_path, "cache")
    assert told is not None
    assert "there is no lock" in told
    await server.stop()
    told = await answered(tmp_path, "cache")
    assert told is not None
    assert "cache-6.sock does not answer" in told


async def test_not_started(tmp_path: Path) -> None:
    assert await answered(tmp_path, "cache") == "cache: it has not started"


async def test_as_a_command_it_imports_the_standard_library_alone(tmp_path: Path) -> None:
    parts = Parts()
    server = HealthServer(tmp_path / "loader-7.sock", CollectorRegistry(), parts, parts)
    await server.start()

    def asked(*services: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "pilotlight.common.probe", *services],
            env={"PILOTLIGHT_RUN_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    well, ill = await asyncio.gather(
        asyncio.to_thread(asked, "loader"), asyncio.to_thread(asked, "loader", "worker")
    )
    assert (well.returncode, well.stdout) == (0, "ready\n")
    assert (ill.returncode, ill.stdout) == (1, "worker: it has not started\n")
    assert not [
        name
        for name in ("asyncio", "pydantic", "prometheus_client", "structlog")
        if f" {name}" in well.stderr
    ]
    await server.stop()
