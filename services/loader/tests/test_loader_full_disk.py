"""A real loader with two real workers whose node has not a byte left on its disk."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confined import confined, fill, inside

from pilotlight.common.messages.reports import LOADER_REPORTS, LoaderReport
from pilotlight.common.testing import until
from pilotlight.loader.processes import ProcessRecord

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DEADLINE_S = 60.0
WORKERS = 2


class Node:
    """Everything that it keeps lies on a disk of two megabytes, which only it has."""

    def __init__(self, disk: Path, pool: Path, nats_url: str, prefix: str) -> None:
        self.disk = disk
        self.environment = {
            **os.environ,
            "PILOTLIGHT_NATS_URL": nats_url,
            "PILOTLIGHT_PREFIX": prefix,
            "PILOTLIGHT_OBJECT_STORE_URL": (disk / "objects").as_uri(),
            "PILOTLIGHT_STATE_DIR": str(disk / "state"),
            "PILOTLIGHT_LOG_DIR": str(disk / "logs"),
            "PILOTLIGHT_RUN_DIR": str(disk / "run"),
            "PILOTLIGHT_POOL_PATH": str(pool),
            "PILOTLIGHT_POOL_BYTES": str(8 << 20),
            "PILOTLIGHT_WORKER_KIND": "sim",
            "PILOTLIGHT_WORKERS": str(WORKERS),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.last: LoaderReport | None = None
        self.news = asyncio.Event()

    def start(self) -> None:
        command = confined([sys.executable, "-m", "pilotlight.loader"], {self.disk: "2m"})
        self.process = subprocess.Popen(command, env=self.environment)

    @property
    def place(self) -> Path:
        """The disk, as it sees it."""
        assert self.process is not None
        return inside(self.process.pid, self.disk)

    async def on_report(self, report: LoaderReport) -> None:
        self.last = report

    def workers(self) -> set[int]:
        """Process ids of what the loader started, and of what it started that lost it."""
        assert self.process is not None
        found: set[int] = set()
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            found.update(int(pid) for pid in (thread / "children").read_text().split())
        return {
            pid
            for pid in found
            if "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        }

    def connected(self, workers: set[int]) -> Callable[[], bool]:
        """All of these, and no others, are there, and say so."""

        def holds() -> bool:
            return (
                self.workers() == workers and self.last is not None and self.last.dead_workers == ()
            )

        return holds

    def recorded(self) -> set[int]:
        """Process ids that are written down."""
        files = (self.place / "state" / "workers").glob("*.json")
        return {msgspec.json.decode(file.read_bytes(), type=ProcessRecord).pid for file in files}


@contextmanager
def kept_full(folder: Path) -> Iterator[None]:
    """What is given back while others run, as by a file that is removed, is taken at once."""
    ended = threading.Event()

    def keep_full() -> None:
        while not ended.wait(0.001):
            fill(folder)

    fillers = fill(folder)
    keeper = threading.Thread(target=keep_full)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        for filler in fillers:
            filler.unlink()


async def test_what_is_warm_goes_on_and_what_died_comes_back(
    nats_url: str, connect_bus: Any, bus_settings: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    bus = await connect_bus("scheduler")
    node = Node(disk, tmp_path / "pool", nats_url, bus_settings.prefix)
    await bus.subscribe(LOADER_REPORTS, LoaderReport, node.on_report)
    node.start()
    assert node.process is not None
    try:
        await until(
            lambda: len(list((node.place / "run").glob("worker-*.sock"))) == WORKERS,
            deadline_s=DEADLINE_S,
        )
        first = node.workers()
        await until(node.connected(first), deadline_s=DEADLINE_S)
        assert (len(first), node.recorded()) == (WORKERS, first)

        killed, left = sorted(first)
        with kept_full(node.place):
            os.kill(killed, signal.SIGKILL)
            await until(lambda: node.workers() - first, deadline_s=DEADLINE_S)
            (second,) = node.workers() - first
            await until(
                lambda: (node.place / "run" / f"worker-{second}.sock").exists(),
                deadline_s=DEADLINE_S,
            )
            await until(node.connected({left, second}), deadline_s=DEADLINE_S)
            assert node.process.poll() is None, "the loader goes on"
            assert node.recorded() == {left}
        await until(lambda: node.recorded() == {left, second}, deadline_s=DEADLINE_S)
        assert node.workers() == {left, second}
    finally:
        node.process.terminate()
        node.process.wait(DEADLINE_S)
