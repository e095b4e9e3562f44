"""A system whose processes run the code of different releases, and are replaced one by one."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psycopg
from embedded_system import DEMO_FOLDER
from releases import Code

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.cli.home import Home
from pilotlight.cli.plan import Endpoints, SystemOptions, child_specs
from pilotlight.cli.supervisor import ChildSpec, Supervisor
from pilotlight.cli.system import free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.natsconf import StreamSettings, ensure_streams, server_config
from pilotlight.common.testing import until

GATEWAYS = ("gateway", "gateway-2")
"""Each with a port of its own, as behind a balancer."""
PROCESSES = ("cache", "scheduler", "materializer", "loader", *GATEWAYS)
POOL_BYTES = 256 * 2**20
WORKERS = 2
DEADLINE_S = 60.0
PROMPT = "Tell me a short story about a fox."
OUTPUT_TOKENS = 40


class Refused(Exception):
    """A gateway did not take the request: a balancer asks another one."""


class MixedSystem:
    """Servers and schema are this release's, as in an upgrade; what runs on them is as the test
    says.
    """

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.ports = {name: free_port() for name in GATEWAYS}
        self._clock = SystemClock()
        self._running: dict[str, Supervisor] = {}
        self._endpoints: Endpoints | None = None
        self._servers: list[NatsServer | PostgresServer] = []
        self._owner_url = ""

    async def start(self, codes: Mapping[str, Code], *, handover: bool = False) -> None:
        """Start servers, migrate with this release, start every process with the code that it is
        given.

        ``handover``: the loader leaves its workers to the next one.
        """
        self.home.prepare()
        nats = NatsServer(
            self.home.root / "nats",
            free_port(),
            server_config(self.home.nats_passwords()),
            log_file=self.home.logs / "nats-server.log",
        )
        postgres = PostgresServer(
            self.home.root / "postgres",
            self.home.secret("postgres-owner"),
            log_file=self.home.logs / "postgres.log",
        )
        self._servers = [nats, postgres]
        for server in self._servers:
            await server.start()
        self._owner_url = postgres.owner_url
        await asyncio.to_thread(
            migrate, MigrateSettings(database_url=postgres.owner_url, secrets_dir=self.home.secrets)
        )
        await ensure_streams(StreamSettings(nats_url=nats.url, secrets_dir=self.home.secrets))
        store_url = self.home.objects.as_uri()
        self._endpoints = Endpoints(
            nats_url=nats.url, database_url=postgres.url, object_store_url=store_url
        )
        async with asyncio.TaskGroup() as group:
            for name in PROCESSES:
                group.create_task(self.launch(name, codes[name], handover=handover))
        await until(self._workers_up, deadline_s=DEADLINE_S)

    async def stop(self) -> None:
        for name in reversed(PROCESSES):
            await self.end(name)
        for server in reversed(self._servers):
            await server.stop()

    async def launch(self, name: str, code: Code, *, key: str = "", handover: bool = False) -> None:
        """Start a process; ``key`` names it where another of its name still runs."""
        key = key or name
        spec = self._spec(name)
        environment = {
            **spec.environment,
            **code.environment,
            "PILOTLIGHT_HANDOVER": str(handover).lower(),
        }
        supervisor = Supervisor(self.home.run_dir, self._clock, lambda _, __: None, set)
        self._running[key] = supervisor
        await supervisor.start(
            replace(spec, name=key, environment=environment, log_path=self.home.logs / f"{key}.log")
        )

    async def end(self, name: str) -> None:
        """Stop a process in order."""
        supervisor = self._running.pop(name, None)
        if supervisor is not None:
            await supervisor.stop()

    async def replace(self, name: str, code: Code, *, handover: bool = False) -> None:
        """Stop a process and start its successor."""
        await self.end(name)
        await self.launch(name, code, handover=handover)

    async def relieve(self, name: str, code: Code) -> None:
        """Start the successor first: as a standby, which takes over when its predecessor ends."""
        await self.launch(name, code, key=f"{name}-next")
        await self.end(name)
        self._running[name] = self._running.pop(f"{name}-next")

    async def renew_workers(self) -> None:
        """End one worker after the other, in order: the loader starts it anew, with its own
        code.
        """
        for path in sorted((self.home.state / "workers").glob("*.json")):
            before = _pid_of(path)
            assert before is not None
            os.kill(before, signal.SIGTERM)
            await until(
                lambda path=path, before=before: _pid_of(path) not in (None, before),
                deadline_s=DEADLINE_S,
            )
            await until(self._workers_up, deadline_s=DEADLINE_S)

    # What clients do.

    async def register(self, name: str) -> None:
        body = {
            "name": name,
            "uri": DEMO_FOLDER.as_uri(),
            # So that a request that goes on elsewhere, in other batches, gives the very same
            # tokens.
            "dtype": "float32",
            "slo": {"ttft_ms": 20000, "tpot_ms": 1000},
            "keep_alive_s": 600,
        }
        answer = await self.admin("POST", "/models", json=body)
        assert answer.status_code == 201, answer.text

    async def evict(self, name: str) -> None:
        """Unload a model, so that the next request is a cold start."""
        answer = await self.admin("POST", f"/models/{name}/evict")
        assert answer.status_code == 202, answer.text
        await until(self._nothing_held, deadline_s=DEADLINE_S)

    async def admin(self, method: str, path: str, **options: Any) -> httpx2.Response:
        key = self.home.admin_key.read_text().strip()
        for port in self._ports():
            async with httpx2.AsyncClient(
                timeout=DEADLINE_S, headers={"Authorization": f"Bearer {key}"}
            ) as http:
                with contextlib.suppress(httpx2.TransportError):
                    return await http.request(
                        method, f"http://127.0.0.1:{port}/admin/v1{path}", **options
                    )
        raise Refused(path)

    async def chat(self, model: str) -> str:
        """One streamed chat, through whichever gateway takes it; its text.

        Fails the test when an answer that has begun does not come to its end.
        """
        refusals: list[str] = []
        for port in self._ports():
            try:
                return await self._chat_at(port, model)
            except Refused as refused:
                refusals.append(str(refused))
        raise AssertionError(f"no gateway took the request: {refusals}")

    async def _chat_at(self, port: int, model: str) -> str:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {self.home.api_key.read_text().strip()}"}
        text, done = "", False
        async with httpx2.AsyncClient(timeout=DEADLINE_S, headers=headers) as http:
            try:
                async with http.stream(
                    "POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body
                ) as answer:
                    if answer.status_code != 200:
                        raise Refused(f"{answer.status_code}: {(await answer.aread()).decode()}")
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: "):
                            continue
                        if line == "data: [DONE]":
                            done = True
                            break
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event and not text:
                            raise Refused(str(event["error"]))
                        assert "error" not in event, event
                        text += "".join(
                            choice["delta"].get("content") or "" for choice in event["choices"]
                        )
            except httpx2.TransportError as error:
                if text:
                    raise AssertionError(f"the answer broke off: {error!r}") from error
                raise Refused(repr(error)) from error
        assert done, "the answer ended without its end"
        return text

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows, read as the database's owner."""
        async with await psycopg.AsyncConnection.connect(
            self._owner_url, autocommit=True, connect_timeout=5
        ) as connection:
            return await (await connection.execute(statement, parameters)).fetchall()

    def complaints(self) -> list[str]:
        """Lines of the logs that say that one release did not understand another."""
        return [
            f"{path.name}: {line}"
            for path in sorted(self.home.logs.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if any(
                sign in line
                for sign in (
                    "bus_undecodable",
                    "message_undecodable",
                    "Traceback",
                    "UndefinedColumn",
                    "PermissionDenied",
                )
            )
        ]

    # Views.

    async def _workers_up(self) -> bool:
        with contextlib.suppress(Refused):
            workers = (await self.admin("GET", "/workers")).json().get("workers", [])
            return (
                sum(
                    1 for worker in workers if worker["engine_up"] and worker["liveness"] == "alive"
                )
                == WORKERS
            )
        return False

    async def _nothing_held(self) -> bool:
        workers = (await self.admin("GET", "/workers")).json()["workers"]
        return not any(worker["held"] for worker in workers)

    def _ports(self) -> list[int]:
        return random.sample(list(self.ports.values()), len(self.ports))

    def _spec(self, name: str) -> ChildSpec:
        assert self._endpoints is not None
        options = SystemOptions(
            port=self.ports.get(name, 1),
            workers=WORKERS,
            pool_bytes=POOL_BYTES,
            model_roots=(DEMO_FOLDER.parent,),
        )
        service = name.removesuffix("-2")
        return next(
            spec
            for spec in child_specs(self.home, options, self._endpoints, os.environ)
            if spec.name == service
        )


def _pid_of(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None


@asynccontextmanager
async def mixed_system(
    folder: Path, codes: Mapping[str, Code], *, handover: bool = False
) -> AsyncGenerator[MixedSystem]:
    """Start, hand out, stop."""
    system = MixedSystem(folder)
    try:
        await system.start(codes, handover=handover)
        yield system
    finally:
        await system.stop()
