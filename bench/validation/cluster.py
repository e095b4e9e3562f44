"""A small real cluster for a validation: the services in one namespace, each node in another.

::

    control    NATS, PostgreSQL, services, the client of the bench      as fast as the machine
    store      models                                                  as fast as the machine
    node 0..   a loader and its workers                                 behind a link of its own rate
"""

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from children import Child
from model_store import BUCKET, CREDENTIALS, HIDDEN_SIZE
from netns import Host

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.cli.home import Home
from pilotlight.cli.plan import Endpoints, SystemOptions, child_specs
from pilotlight.cli.supervisor import ChildSpec, Supervisor
from pilotlight.cli.system import free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.natsconf import StreamSettings, ensure_streams, server_config
from pilotlight.common.waiting import cancel_all, pause

READY_S = 120.0
PIECE_BYTES = 64 * 1024
SEEN_S = 20.0
"""A decision or a record can be read so long after it was made, at the latest."""


class Unanswered(Exception):
    """A request had no tokens; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a cluster consists of."""

    control: Host
    store: Host
    nodes: Sequence[Host]
    rates: Sequence[str]
    """Of the nodes' links, as ``tc`` and Pilotlight take them."""
    workers: int
    """Of each node."""
    worker_kind: str
    environment: Mapping[str, str]
    """Of every process, beside what it is given anyway."""
    of_nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of loaders and workers alone: a gateway's settings may have the same names."""


@dataclass(slots=True)
class Cluster:
    """It runs."""

    url: str
    http: httpx2.AsyncClient
    store: Child
    clock: SystemClock = field(default_factory=SystemClock)

    async def register(
        self,
        name: str,
        layers: int,
        slo: Mapping[str, float],
        *,
        hidden_size: int = HIDDEN_SIZE,
        **more: float,
    ) -> int:
        """Put a model into the store and tell the system of it; its bytes.

        Args:
            name: The model's.
            layers: How large it is.
            slo: In milliseconds.
            hidden_size: How wide it is.
            more: Of what the system is told of it.
        """
        self.store.tell("put", name=name, layers=layers, hidden_size=hidden_size)
        size_bytes = (await asyncio.to_thread(self.store.heard))["bytes"]
        body = {"name": name, "uri": f"s3://{BUCKET}/{name}", "slo": dict(slo), **more}
        answer = await self.http.post("/admin/v1/models", json=body)
        if answer.status_code != 201:
            raise SystemExit(f"{name} is not registered: {answer.text}")
        return size_bytes

    async def unregister(self, name: str) -> None:
        """Have the system forget a model; what it learned of the name stays."""
        await self.evict(name)
        answer = await self.http.delete(f"/admin/v1/models/{name}")
        if answer.status_code >= 300:
            raise SystemExit(f"{name} is not removed: {answer.text}")

    async def ask(self, model: str, prompt: str, max_tokens: int) -> tuple[float, float]:
        """Seconds to the first token and to the last one.

        Raises:
            Unanswered: there is none.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began_s, first_s = self.clock.monotonic_s(), 0.0
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise Unanswered(f"{model}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    raise Unanswered(f"{model}: {line}")
                if not first_s and line.startswith("data: {"):
                    first_s = self.clock.monotonic_s()
        if not first_s:
            raise Unanswered(f"{model}: the stream ended without a token")
        return first_s - began_s, self.clock.monotonic_s() - began_s

    async def get(self, path: str) -> Any:
        """What the admin API says."""
        return (await self.http.get(f"/admin/v1{path}")).json()

    async def start_of(self, model: str, seen: frozenset[str]) -> dict[str, Any] | None:
        """The decision of a model's newest start that is not among those seen."""
        until_s = self.clock.monotonic_s() + SEEN_S
        while self.clock.monotonic_s() < until_s:
            found = (await self.get(f"/decisions?model={model}&limit=50"))["decisions"]
            for one in found:
                if one["kind"] == "cold_start" and one["decision_id"] not in seen:
                    return one
            await pause(0.2)
        return None

    async def evict(self, model: str) -> None:
        """Have no worker hold a model."""
        await self.http.post(f"/admin/v1/models/{model}/evict")
        until_s = self.clock.monotonic_s() + SEEN_S
        while self.clock.monotonic_s() < until_s:
            workers = (await self.get("/workers"))["workers"]
            if not any(held["model"] == model for one in workers for held in one["held"]):
                return
            await pause(0.1)


@asynccontextmanager
async def running(folder: Path, site: Site, log: Path) -> AsyncGenerator[Cluster]:
    """Start a cluster, hand it out when all workers are ready, stop it.

    The calling process is within the namespace ``site.control``.
    """
    home = Home(folder / "home")
    home.prepare()
    stack = contextlib.AsyncExitStack()
    async with stack:
        sink = stack.enter_context(log.open("wb"))
        script = str(Path(__file__).with_name("model_store.py"))
        store = Child("the store", site.store.inside(sys.executable, script), sink)
        stack.callback(store.stop)
        store.heard()
        store.tell("where")
        endpoint = f"http://{site.store.address}:{store.heard()['port']}"
        passwords = server_config(home.nats_passwords())
        nats = NatsServer(home.root / "nats", free_port(), passwords)
        postgres = PostgresServer(home.root / "postgres", home.secret("postgres-owner"))
        for server in (nats, postgres):
            await server.start()
            stack.push_async_callback(server.stop)
        settings = MigrateSettings(database_url=postgres.owner_url, secrets_dir=home.secrets)
        await asyncio.to_thread(migrate, settings)
        await ensure_streams(StreamSettings(nats_url=nats.url, secrets_dir=home.secrets))
        relay = await asyncio.start_server(
            lambda reader, writer: _relay(reader, writer, nats.port), site.control.address, 0
        )
        stack.push_async_callback(relay.wait_closed)
        stack.callback(relay.close)
        environment = {
            **{key: value for key, value in os.environ.items() if "PILOTLIGHT" not in key},
            **CREDENTIALS,
            "PILOTLIGHT_S3_ENDPOINT": endpoint,
            "PILOTLIGHT_S3_ALLOW_HTTP": "true",
            "PILOTLIGHT_MODEL_ROOTS": f"s3://{BUCKET}",
            **site.environment,
        }
        endpoints = Endpoints(
            nats_url=nats.url,
            database_url=postgres.url,
            object_store_url=home.objects.as_uri(),
        )
        options = SystemOptions(
            port=free_port(), workers=site.workers, worker_kind=site.worker_kind
        )
        supervisor = Supervisor(home.run_dir, SystemClock(), lambda _, __: None, set)
        stack.push_async_callback(supervisor.stop)
        outside = f"nats://{site.control.address}:{relay.sockets[0].getsockname()[1]}"
        specs = list(_specs(child_specs(home, options, endpoints, environment), site, outside))
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(supervisor.start(spec))
        keys = home.admin_key.read_text().strip(), home.api_key.read_text().strip()
        http = httpx2.AsyncClient(
            base_url=options.url, timeout=READY_S, auth=_Keys(*keys), trust_env=False
        )
        await stack.enter_async_context(http)
        cluster = Cluster(options.url, http, store)
        await _ready(cluster, site)
        yield cluster


class _Keys(httpx2.Auth):
    """The admin key for the admin API, the other one elsewhere."""

    def __init__(self, admin: str, api: str) -> None:
        self._admin, self._api = admin, api

    def auth_flow(self, request: Any) -> Any:
        key = self._admin if request.url.path.startswith("/admin") else self._api
        request.headers["Authorization"] = f"Bearer {key}"
        yield request


def _specs(specs: Sequence[ChildSpec], site: Site, nats_url: str) -> list[ChildSpec]:
    """The services, and in the place of the one loader one in each node's namespace."""
    found: list[ChildSpec] = []
    for spec in specs:
        if spec.name != "loader":
            found.append(spec)
            continue
        for at, (host, rate) in enumerate(zip(site.nodes, site.rates, strict=True)):
            folder = Path(spec.environment["PILOTLIGHT_STATE_DIR"]).parent / f"node-{at}"
            for name in ("run", "state", "logs"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            environment = {
                **spec.environment,
                **site.of_nodes,
                "PILOTLIGHT_NATS_URL": nats_url,
                "PILOTLIGHT_RUN_DIR": str(folder / "run"),
                "PILOTLIGHT_STATE_DIR": str(folder / "state"),
                "PILOTLIGHT_LOG_DIR": str(folder / "logs"),
                "PILOTLIGHT_POOL_PATH": f"/dev/shm/pilotlight-{host.name}.pool",
                "PILOTLIGHT_NIC_BANDWIDTH": rate,
                "PILOTLIGHT_DATAPLANE_HOST": host.address,
            }
            found.append(
                replace(
                    spec,
                    name=f"loader-{at}",
                    argv=tuple(host.inside(*spec.argv)),
                    environment=environment,
                    log_path=folder / "logs" / "loader.log",
                )
            )
    return found


async def _ready(cluster: Cluster, site: Site) -> None:
    until_s = cluster.clock.monotonic_s() + READY_S
    wanted = len(site.nodes) * site.workers
    while cluster.clock.monotonic_s() < until_s:
        workers = (await cluster.get("/workers")).get("workers", [])
        if sum(one["engine_up"] and one["liveness"] == "alive" for one in workers) == wanted:
            return
        await pause(0.2)
    raise SystemExit(f"of {wanted} workers some are not ready within {READY_S:g} s")


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Both ways, until one side ends: NATS listens on the loopback interface alone."""
    inner, outer = await asyncio.open_connection("127.0.0.1", port)
    tasks = [asyncio.create_task(_copy(inner, writer)), asyncio.create_task(_copy(reader, outer))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
        outer.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """In an order that a seed gives."""
    order = list(names)
    random.Random(seed).shuffle(order)
    return order
