"""A control plane with nodes that are played to it, for ``control_live.py``: started, looked at,
stopped.
"""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psycopg
from control_nodes import FIGURES_SUBJECT, AskFigures, Figures
from soak_memory import descendants

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.cli.home import Home
from pilotlight.cli.plan import Endpoints, SystemOptions, child_specs
from pilotlight.cli.system import free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import ADMIN, StreamSettings, ensure_streams, server_config
from pilotlight.common.settings import BusSettings
from pilotlight.common.waiting import pause
from pilotlight.policy.testing import model

GIB = 1 << 30
PART_BYTES = GIB // 3
"""Of six parts: a model of 2 GiB."""
KEEP_ALIVE_S = 2.0
SERVICES = ("cache", "scheduler", "scheduler-2", "gateway", "gateway-2")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSize:
    """The cluster, and what is asked of it."""

    nodes: int = 1000
    workers_per_node: int = 8
    models: int = 10_000
    starts_per_s: float = 20.0
    players: int = 2
    rest_s: float = 20.0
    load_s: float = 40.0
    settle_s: float = 120.0
    """To come to rest in, at most."""
    failovers: int = 3


@dataclass(slots=True)
class Process:
    """One that is measured."""

    name: str
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Processor time that it has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def rss_mib(self) -> float:
        """Its resident memory."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


class Live:
    """A running control plane, and the cluster that is played to it."""

    def __init__(self, folder: Path, size: LiveSize) -> None:
        self.home = Home(folder / "home")
        self.size = size
        self.clock = SystemClock()
        self.processes: dict[str, Process] = {}
        self.monitor_port = free_port()
        self.owner_url = ""
        self.bus: NatsBus | None = None
        self._servers: list[NatsServer | PostgresServer] = []
        self._environment = {**os.environ, "PILOTLIGHT_LOG_LEVEL": "warning"}
        self._logs: list[Any] = []
        self._spawned: dict[str, tuple[list[str], Any]] = {}

    async def start(self) -> None:
        """Servers, rows of models, services, nodes."""
        self.home.prepare()
        config = server_config(self.home.nats_passwords(), monitor=f"127.0.0.1:{self.monitor_port}")
        nats = NatsServer(self.home.root / "nats", free_port(), config)
        postgres = PostgresServer(self.home.root / "postgres", self.home.secret("postgres-owner"))
        self._servers = [nats, postgres]
        for server in self._servers:
            await server.start()
        self.owner_url = postgres.owner_url
        secrets_dir = self.home.secrets
        await asyncio.to_thread(
            migrate, MigrateSettings(database_url=postgres.owner_url, secrets_dir=secrets_dir)
        )
        await ensure_streams(StreamSettings(nats_url=nats.url, secrets_dir=secrets_dir))
        await asyncio.to_thread(self._register)
        endpoints = Endpoints(
            nats_url=nats.url,
            database_url=postgres.url,
            object_store_url=self.home.objects.as_uri(),
        )
        options = SystemOptions(port=free_port(), schedulers=2, gateways=2)
        for spec in child_specs(self.home, options, endpoints, self._environment):
            if spec.name in SERVICES:
                self._spawn(spec.name, spec.argv, spec.environment)
        each, rest = divmod(self.size.nodes, self.size.players)
        first = 0
        for player in range(self.size.players):
            count = each + (player < rest)
            arguments = {
                "--nats": nats.url,
                "--secrets": str(secrets_dir),
                "--player": player,
                "--first": first,
                "--count": count,
                "--workers": self.size.workers_per_node,
            }
            command = [sys.executable, str(Path(__file__).with_name("control_nodes.py"))]
            command += [str(word) for pair in arguments.items() for word in pair]
            self._spawn(f"nodes-{player}", command, self._environment)
            first += count
        settings = BusSettings(nats_url=nats.url, secrets_dir=secrets_dir)
        self.bus = await NatsBus.connect(settings, user=ADMIN, name="bench")

    async def stop(self) -> None:
        """End everything."""
        if self.bus is not None:
            await self.bus.close()
        for one in reversed(self.processes.values()):
            one.process.kill()
            one.process.wait()
        for server in reversed(self._servers):
            await server.stop()
        for log in self._logs:
            log.close()

    def _spawn(self, name: str, command: Iterable[str], environment: Any) -> None:
        log = (self.home.logs / f"{name}.log").open("ab")
        self._logs.append(log)
        arguments = list(command)
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log)
        self.processes[name] = Process(name, process)
        self._spawned[name] = arguments, environment

    async def start_anew(self, name: str, deadline_s: float) -> bool:
        """Start a service that has ended once more; whether it answers in time."""
        self.processes[name].process.wait()
        self._spawn(name, *self._spawned[name])
        until_s = self.clock.monotonic_s() + deadline_s
        while self.clock.monotonic_s() < until_s:
            with suppress(httpx2.TransportError):
                await self.metrics(name)
                return True
            await pause(0.1)
        return False

    def _register(self) -> None:
        rows = (
            model(
                f"m{index:05}",
                part_bytes=PART_BYTES,
                keep_alive_s=KEEP_ALIVE_S,
            )
            for index in range(self.size.models)
        )
        with (
            psycopg.connect(self.owner_url) as connection,
            connection.cursor() as cursor,
            cursor.copy(
                "COPY gateway.models (name, digest, body, created_at, updated_at) FROM STDIN"
            ) as copy,
        ):
            now = self.clock.wall()
            for one in rows:
                body = json.dumps(to_row_json(one))
                copy.write_row((one.name, one.digest, body, now, now))

    # What is looked at.

    def server_pids(self) -> dict[str, int]:
        """NATS and PostgreSQL."""
        return {one.name: one.pid for one in self._servers if one.pid is not None}

    async def metrics(self, name: str) -> dict[str, float]:
        """A service's figures by name and labels."""
        pid = self.processes[name].process.pid
        service = name.partition("-")[0]
        transport = httpx2.AsyncHTTPTransport(uds=str(self.home.run_dir / f"{service}-{pid}.sock"))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://local", timeout=5.0
        ) as http:
            page = (await http.get("/metrics")).text
        lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
        return {key: float(value) for key, _, value in lines}

    async def leader(self) -> str | None:
        """Which scheduler leads."""
        for name in ("scheduler", "scheduler-2"):
            if self.processes[name].process.poll() is not None:
                continue
            try:
                if (await self.metrics(name)).get("pilotlight_scheduler_leader"):
                    return name
            except httpx2.TransportError:
                continue
        return None

    def varz(self) -> dict[str, Any]:
        """What the NATS server says of itself."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.monitor_port}/varz", timeout=5
        ) as answer:
            return json.load(answer)

    async def figures(self) -> list[Figures]:
        """What the nodes have met."""
        assert self.bus is not None
        return [
            await self.bus.request(
                f"{FIGURES_SUBJECT}.{player}", AskFigures(player=player), Figures, deadline_s=20.0
            )
            for player in range(self.size.players)
        ]

    def log_bytes(self) -> int:
        """What decision logs take on the disk."""
        return sum(one.stat().st_size for one in (self.home.state / "decisions").glob("*"))

    async def decision_rows(self) -> int:
        """Decisions that were written down, starts and others."""
        async with await psycopg.AsyncConnection.connect(self.owner_url) as connection:
            rows = await connection.execute("SELECT count(*) FROM scheduler.decisions")
            found = await rows.fetchone()
            return int(found[0]) if found else 0

    async def decided(self) -> dict[str, float]:
        """When each start was decided, in Unix seconds, by instance."""
        async with await psycopg.AsyncConnection.connect(self.owner_url) as connection:
            rows = await connection.execute(
                "SELECT instance_id, extract(epoch FROM at) FROM scheduler.decisions WHERE instance_id IS NOT NULL AND kind <> 'drain'"
            )
            return {row[0]: float(row[1]) for row in await rows.fetchall()}


@dataclass(slots=True)
class Window:
    """Processor time and messages between two moments."""

    live: Live
    began_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    varz: dict[str, Any] = field(default_factory=dict[str, Any])
    log_bytes: int = 0

    def begin(self) -> None:
        """From now on."""
        self.began_s = self.live.clock.monotonic_s()
        self.cpu_s = self._cpu()
        self.varz = self.live.varz()
        self.log_bytes = self.live.log_bytes()

    def end(self) -> dict[str, float]:
        """Shares of a core by process, messages and bytes of the decision log a second."""
        seconds = self.live.clock.monotonic_s() - self.began_s
        now, varz = self._cpu(), self.live.varz()
        figures = {
            f"cores_{name}": (now[name] - before) / seconds
            for name, before in self.cpu_s.items()
            if name in now
        }
        for key, said in (("in_msgs", "published_per_s"), ("out_msgs", "delivered_per_s")):
            figures[said] = (varz[key] - self.varz[key]) / seconds
        figures["nats_mib_per_s_out"] = (
            (varz["out_bytes"] - self.varz["out_bytes"]) / seconds / (1 << 20)
        )
        written = self.live.log_bytes() - self.log_bytes
        figures["decision_log_bytes_per_s"] = written / seconds
        return {name: round(value, 3) for name, value in figures.items()}

    def _cpu(self) -> dict[str, float]:
        found = {
            name: one.cpu_s()
            for name, one in self.live.processes.items()
            if one.process.poll() is None
        }
        pids = self.live.server_pids()
        found["nats"] = _cpu_of(pids["nats-server"])
        found["postgres"] = sum(_cpu_of(pid) for pid in _family(pids["postgres"]))
        return found


def _cpu_of(pid: int) -> float:
    """Of a process, and of its children that have ended; nothing of one that has just ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(one) for one in fields[11:15]) / TICKS_PER_S
    return 0.0


def _family(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


@asynccontextmanager
async def live(folder: Path, size: LiveSize) -> AsyncGenerator[Live]:
    """Start, hand out, stop."""
    system = Live(folder, size)
    try:
        await system.start()
        yield system
    finally:
        await system.stop()
