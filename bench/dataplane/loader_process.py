"""One fetch by a real loader, as a worker meets it: a lease asked for at the loader's socket, until
every part is there.

A NATS server and ``python -m pilotlight.loader`` are started for it, with an empty pool. Beside
seconds and the loader's processor time it tells how long the first byte took, and how long it was
from the last byte to the end, both as the system counts the loader's reads.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bare_loader import MIB, SHARED_MEMORY, bytes_of, model_of

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.manifest import encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.cli.embedded import NatsServer
from pilotlight.common.clock import SystemClock
from pilotlight.common.natsconf import server_config
from pilotlight.common.store import manifest_key
from pilotlight.common.waiting import pause
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.policy.ids import InstanceId, WorkerId
from pilotlight.policy.model import Model

START_S = 60.0
AHEAD_S = 120.0
STOP_S = 30.0
LOOK_S = 0.0005
FIRST_BYTES = MIB // 4
"""Read so much, and the first bytes are there."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Watched:
    """What the system counts of another process, looked at all the time by a thread."""

    pid: int
    clock: SystemClock = field(default_factory=SystemClock)
    reads: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When how many bytes were read, where that had changed."""
    _stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def read_bytes(self) -> int:
        """What it has read from files and sockets."""
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return int(lines[0].removeprefix("rchar:"))

    @property
    def cpu_s(self) -> float:
        """Processor time of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    @contextmanager
    def followed(self) -> Generator[None]:
        """Note in ``reads`` what is read meanwhile."""
        before = self.read_bytes

        def follow() -> None:
            seen = 0
            while not self._stopping.wait(LOOK_S):
                now = self.read_bytes - before
                if now != seen:
                    self.reads.append((self.clock.monotonic_s(), now))
                    seen = now

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()


def register(folder: Path, objects: Path) -> tuple[Model, int]:
    """What the gateway does for a model's first start; the model, and the bytes of its parts."""
    checkpoint = read_checkpoint(FolderSource(folder))
    path = objects / manifest_key(checkpoint.manifest.digest())
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(checkpoint.manifest))
    model = model_of(folder.as_uri(), checkpoint.manifest, checkpoint.source_version)
    return model, bytes_of(checkpoint.manifest)


@contextmanager
def loader(home: Path, environment: dict[str, str]) -> Generator[subprocess.Popen[bytes]]:
    """A loader whose socket is there; it is stopped at the end, and its pool is gone."""
    with (home / "loader.log").open("wb") as log:
        command = [sys.executable, "-m", "pilotlight.loader"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(home: Path, pool: Path, pool_bytes: int) -> bool:
    """Whether the loader listens, and its pool has at least ``pool_bytes`` of memory."""
    return (home / "run" / "pool.sock").exists() and pool.stat().st_blocks * 512 >= pool_bytes


async def wait_for(process: subprocess.Popen[bytes], home: Path, pool: Path, *, ahead: int) -> None:
    """Return when the loader listens, and its pool has its memory.

    Args:
        process: The loader's.
        home: Its folder.
        pool: Its pool's file.
        ahead: Bytes of memory that the pool is to have.

    Raises:
        SystemExit: it has ended, or takes too long.
    """
    clock = SystemClock()
    until_s = clock.monotonic_s() + START_S + (AHEAD_S if ahead else 0.0)
    while clock.monotonic_s() < until_s and process.poll() is None:
        if await asyncio.to_thread(is_ready, home, pool, ahead):
            return
        await pause(0.05)
    raise SystemExit(f"the loader is not ready: {(home / 'loader.log').read_text()[-1500:]}")


async def fetch(folder: Path, home: Path, pool: Path, *, ahead: bool) -> dict[str, float]:
    """Start everything, take the lease, and stop everything."""
    model, total_bytes = register(folder, home / "objects")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    nats = NatsServer(home / "nats", port, server_config({}))
    await nats.start()
    pool_bytes = total_bytes + 256 * MIB
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PILOTLIGHT_")},
        "PILOTLIGHT_NATS_URL": nats.url,
        "PILOTLIGHT_RUN_DIR": str(home / "run"),
        "PILOTLIGHT_STATE_DIR": str(home / "state"),
        "PILOTLIGHT_LOG_DIR": str(home / "logs"),
        "PILOTLIGHT_POOL_PATH": str(pool),
        "PILOTLIGHT_POOL_BYTES": str(pool_bytes),
        "PILOTLIGHT_POOL_AHEAD": str(ahead).lower(),
        "PILOTLIGHT_OBJECT_STORE_URL": (home / "objects").as_uri(),
        "PILOTLIGHT_MODEL_ROOTS": str(folder),
        "PILOTLIGHT_WORKERS": "0",
    }
    try:
        with loader(home, environment) as process:
            await wait_for(process, home, pool, ahead=pool_bytes - 2 * MIB if ahead else 0)
            watched, clock = Watched(process.pid), SystemClock()
            client = PoolClient(home / "run" / "pool.sock", clock, grace_s=5)
            began_cpu_s = watched.cpu_s
            with watched.followed():
                began_s = clock.monotonic_s()
                parts = tuple(range(len(model.spec.part_bytes)))
                lease = await client.lease(WorkerId("w"), InstanceId("bench"), model, parts)
                async with lease:
                    granted_s = clock.monotonic_s()
                    ready_s = [clock.monotonic_s() async for _ in lease]
            reads = watched.reads
            first_s = next(at_s for at_s, count in reads if count >= FIRST_BYTES)
            last_s = next(at_s for at_s, count in reads if count >= reads[-1][1] - MIB)
            return {
                "seconds": ready_s[-1] - began_s,
                "cpu_s": watched.cpu_s - began_cpu_s,
                "bytes": float(total_bytes),
                "granted_ms": 1e3 * (granted_s - began_s),
                "first_byte_ms": 1e3 * (first_s - began_s),
                "first_part_ms": 1e3 * (ready_s[0] - began_s),
                "after_last_byte_ms": 1e3 * (ready_s[-1] - last_s),
            }
    finally:
        await nats.stop()


def main() -> None:
    """One fetch; its figures as one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the model")
    parser.add_argument("--ahead", action="store_true", help="into a pool that has its memory")
    options = parser.parse_args()
    pool = SHARED_MEMORY / f"pilotlight-bench-{secrets.token_hex(4)}.pool"
    try:
        with tempfile.TemporaryDirectory() as home:
            figures = asyncio.run(fetch(options.folder, Path(home), pool, ahead=options.ahead))
        print(json.dumps(figures))
    finally:
        pool.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
