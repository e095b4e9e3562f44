"""A system under test, with what it answers when nothing disturbs it."""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import psycopg
from embedded_system import DEMO_FOLDER, RunningSystem, running

from chaos.clients import ASKS, Answer, Ask, Running, ended
from chaos.processes import MARK, Processes
from pilotlight.cli.embedded import PostgresServer
from pilotlight.cli.home import Home

LINK = "60mbit"
"""Fetching the demo model takes two seconds: long enough to be hit half-way."""
FAULTS = "step=0.02"
"""A stream of eighty tokens takes two seconds."""
WORKERS = 2
WARM_MODEL = "warm"
CALM_DEADLINE_S = 60.0
KEEP_ALIVE_S = 600.0


class ChaosSystem:
    """One ``pilotlight up``, used for many cells."""

    def __init__(
        self,
        *arguments: str,
        workers: int = WORKERS,
        link: str = LINK,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it.

        Args:
            arguments: more of ``pilotlight up``.
            workers: of each node.
            link: of each node.
            environment: more of it.
        """
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self.folder = Path(tempfile.mkdtemp(prefix="pilotlight-chaos-"))
        os.chmod(self.folder, 0o711)
        mark = secrets.token_hex(8)
        # Set here as well: a process without a parent of ours is known by it.
        variables = {MARK: mark, "PILOTLIGHT_FAULTS": FAULTS, **environment}
        started = running(
            self.folder / "home",
            "--workers",
            str(workers),
            "--link",
            link,
            *arguments,
            environment=variables,
        )
        try:
            self.running: RunningSystem = self._stack.enter_context(started)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.home = Home(self.running.home)
        self.processes = Processes(self.running.process.pid, mark)
        self.references: dict[tuple[str, float, int | None], Answer] = {}
        self.census: Counter[str] = Counter()
        self.asked: list[Running] = []
        """Every request that was ever sent to it."""
        self.spoiled = False
        self._owner_url = PostgresServer(
            self.home.root / "postgres", self.home.secret("postgres-owner")
        ).owner_url

    def close(self) -> None:
        """Stop it; what it leaves is kept when a test failed on it."""
        self._stack.close()
        if not self.spoiled:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def calm_down(self) -> None:
        """Register the warm model and note what undisturbed requests give.

        Every answer of the same question must be the same.
        """
        await self.register(WARM_MODEL)
        for _ in range(2):
            calm = [self.ask(index, WARM_MODEL) for index in range(len(ASKS))]
            assert not await ended(calm, CALM_DEADLINE_S), "an undisturbed request did not end"
            for one in calm:
                assert one.answer.complete, str(one.answer)
                before = self.references.setdefault(one.ask.reference, one.answer)
                assert one.answer.same_as(before), f"undisturbed, and yet {before} and {one.answer}"
        self.census = self.processes.census()

    def ask(self, index: int, model: str) -> Running:
        """Begin one of ``ASKS``."""
        return self.begin(ASKS[index], model)

    def begin(self, ask: Ask, model: str) -> Running:
        """Send a request."""
        request = Running(ask, model, self.running.url, self.running.key("api"))
        self.asked.append(request)
        return request

    def reference(self, request: Running) -> Answer:
        return self.references[request.ask.reference]

    # Models.

    def new_name(self, what: str) -> str:
        return f"{what}-{next(self._numbers)}"

    def copy_model(self, name: str) -> Path:
        """A copy of the demo model with a digest of its own, so that nothing of it lies in the host
        pool.
        """
        folder = self.home.models / name
        shutil.copytree(DEMO_FOLDER, folder, copy_function=shutil.copy)
        return folder

    def registration(self, name: str, folder: Path) -> dict[str, Any]:
        return {
            "name": name,
            "uri": folder.as_uri(),
            # In float32, so that a request that is resumed elsewhere, in other batches, gives the
            # very same tokens.
            "dtype": "float32",
            "slo": {"ttft_ms": 20000, "tpot_ms": 1000},
            "keep_alive_s": KEEP_ALIVE_S,
        }

    async def register(self, name: str) -> None:
        answer = await self.admin(
            "POST", "/models", json=self.registration(name, self.copy_model(name))
        )
        assert answer.status_code == 201, answer.text

    async def forget(self, name: str) -> None:
        """Delete a model and its files."""
        await self.admin("DELETE", f"/models/{name}")
        shutil.rmtree(self.home.models / name, ignore_errors=True)

    # Views.

    async def admin(self, method: str, path: str, **options: Any) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {self.running.key('admin')}"}
        async with httpx2.AsyncClient(
            base_url=f"{self.running.url}/admin/v1", headers=headers, timeout=20.0
        ) as http:
            return await http.request(method, path, **options)

    async def view(self, what: str) -> list[dict[str, Any]]:
        """``nodes``, ``workers``, ``instances`` or ``models`` as the admin API shows them."""
        answer = await self.admin("GET", f"/{what}")
        assert answer.status_code == 200, answer.text
        return answer.json()[what]

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows, read as the database's owner."""
        async with await psycopg.AsyncConnection.connect(
            self._owner_url, autocommit=True, connect_timeout=5
        ) as connection:
            return await (await connection.execute(statement, parameters)).fetchall()

    def stage_loads(self) -> Counter[str]:
        """How often each instance was loaded by any worker, by the workers' logs."""
        return Counter(one["instance_id"] for one in self.logged("worker-*.log", "stage_loading"))

    def logged(self, files: str, action: str) -> Iterator[dict[str, Any]]:
        """Lines of an action in some logs."""
        for path in self.home.logs.rglob(files):
            for line in path.read_text(errors="replace").splitlines():
                if action in line:
                    with contextlib.suppress(json.JSONDecodeError):
                        yield json.loads(line)

    async def lead_of(self, model: str) -> str | None:
        """The worker that leads a model's instance."""
        rows = await self.query(
            "SELECT body->'placements'->0->>'worker_id' FROM scheduler.instances"
            " WHERE model = %s AND state NOT IN ('gone', 'failed') ORDER BY created_at DESC LIMIT 1",
            model,
        )
        return rows[0][0] if rows else None

    async def socket_says(self, name: str, pid: int) -> str | None:
        """What is wrong with a service by its own socket; None when it is ready."""
        transport = httpx2.AsyncHTTPTransport(uds=str(self.home.run_dir / f"{name}-{pid}.sock"))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://local", timeout=2.0
        ) as http:
            try:
                answer = await http.get("/readyz")
            except httpx2.HTTPError as error:
                return f"{name} {pid} does not answer: {error!r}"
        return None if answer.status_code == 200 else f"{name} {pid}: {answer.text.strip()}"


class Keeper:
    """Keeps one system for all cells; a new one after a cell that failed."""

    def __init__(self) -> None:
        self._system: ChaosSystem | None = None

    def system(self) -> ChaosSystem:
        if self._system is not None and self._system.spoiled:
            self.close()
        if self._system is None:
            self._system = ChaosSystem()
            try:
                asyncio.run(self._system.calm_down())
            except BaseException:
                self._system.spoiled = True
                raise
        return self._system

    def close(self) -> None:
        if self._system is not None:
            self._system.close()
            self._system = None
