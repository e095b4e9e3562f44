"""An embedded system, from nothing to ready and back: servers, migrations, services, one node."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import IO

import httpx2
import structlog
from sqlalchemy.engine import make_url

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.cli.home import SERVICES_WITH_DATABASE, Home
from pilotlight.cli.plan import Endpoints, SystemOptions, child_specs
from pilotlight.cli.supervisor import Supervisor
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.migrate import migrate
from pilotlight.common.errors import Conflict, DeadlineExceeded
from pilotlight.common.natsconf import ensure_streams, server_config
from pilotlight.common.waiting import pause

log = structlog.get_logger()

READY_DEADLINE_S = 120.0

Progress = Callable[[str], None]


class System:
    """One running system on one state folder."""

    def __init__(self, home: Home, options: SystemOptions, progress: Progress) -> None:
        self._home = home
        self._options = options
        self._progress = progress
        self._clock = SystemClock()
        self._supervisor = Supervisor(home.run_dir, self._clock, self._on_change)
        self._nats: NatsServer | None = None
        self._postgres: PostgresServer | None = None
        self._lock: IO[str] | None = None

    async def __aenter__(self) -> "System":
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and return when a request can be served.

        Raises:
            HomeUnusable, Conflict: the state folder or the port cannot be had.
            ChildFailed: a process did not start.
        """
        self._home.prepare()
        self._lock = self._home.lock()
        _check_port(self._options)
        self._supervisor.adopt_orphans()
        endpoints = await self._start_servers()
        specs = child_specs(self._home, self._options, endpoints, os.environ)
        self._progress("services")
        # All at once: each waits by itself for what it needs, and readiness of all is readiness of the system.
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(self._supervisor.start(spec))
        self._progress("workers")
        await self._until_workers_are_warm()
        self._home.announce(self._options.url)

    async def stop(self) -> None:
        """Stop everything in reverse order; twice does no harm."""
        self._home.withdraw()
        await self._supervisor.stop()
        if self._postgres is not None:
            await self._postgres.stop()
            self._postgres = None
        if self._nats is not None:
            await self._nats.stop()
            self._nats = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _start_servers(self) -> Endpoints:
        self._progress("NATS and PostgreSQL")
        nats_url = os.environ.get("PILOTLIGHT_NATS_URL")
        owner_url = os.environ.get("PILOTLIGHT_DATABASE_URL")
        if nats_url is None:
            self._nats = NatsServer(self._home.root / "nats", self._home.logs, self._home.secrets)
            await self._nats.start()
            nats_url = self._nats.url
        if owner_url is None:
            self._postgres = PostgresServer(self._home.root / "postgres", self._home.run_dir, self._home.logs, self._home.secrets)
            await self._postgres.start()
            owner_url = self._postgres.owner_url
        self._progress("migrations")
        await migrate(owner_url, self._home.secrets)
        await ensure_streams(nats_url, self._home.secrets)
        urls = {service: _as_role(owner_url, service, self._home) for service in SERVICES_WITH_DATABASE}
        store_url = os.environ.get("PILOTLIGHT_OBJECT_STORE_URL") or self._home.objects.as_uri()
        return Endpoints(nats_url=nats_url, database_urls=urls, object_store_url=store_url)

    async def _until_workers_are_warm(self) -> None:
        key = self._home.admin_key.read_text().strip()
        deadline_s = self._clock.monotonic_s() + READY_DEADLINE_S
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(base_url=self._options.url, headers=headers, timeout=5.0) as http:
            while self._clock.monotonic_s() < deadline_s:
                workers = (await http.get("/admin/v1/workers")).json().get("workers", [])
                if sum(1 for worker in workers if worker["engine_up"]) >= self._options.workers:
                    return
                await pause(0.1)
        raise DeadlineExceeded(
            f"{self._options.workers} workers were not up within {READY_DEADLINE_S:g} s; their logs are in {self._home.logs}"
        )

    async def _on_change(self, name: str, state: str) -> None:
        self._progress(f"{name}: {state}")


async def until_signalled() -> None:
    """Return at Ctrl-C or SIGTERM."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await stopping.wait()
