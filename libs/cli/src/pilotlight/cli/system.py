"""An embedded system, from nothing to ready and back: servers, migrations, services, one node."""

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import IO, Any

import httpx2
import structlog
from sqlalchemy.engine import make_url

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.cli.home import Home
from pilotlight.cli.nats_health import has_room, write_error
from pilotlight.cli.plan import Endpoints, SystemOptions, child_specs
from pilotlight.cli.preflight import looks
from pilotlight.cli.server_process import Server
from pilotlight.cli.supervisor import ChildFailed, Supervisor
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.errors import PilotlightError
from pilotlight.common.fitness import check_port
from pilotlight.common.natsconf import ADMIN, StreamSettings, ensure_streams, server_config
from pilotlight.common.waiting import Backoff, cancel_all, every, pause

log = structlog.get_logger()

READY_DEADLINE_S = 120.0
LOOK_AT_NATS_S = 2.0
LOOKS = 2
"""In a row that must find streams unwritable: one write may be slow."""
STABLE_AFTER_S = 10.0
"""A server that lived this long starts its next restart without a delay."""
RESTART_BACKOFF = Backoff(first_s=0.2, limit_s=3.0)
MENDED_AFTER_S = 120.0
MENDING_BACKOFF = Backoff(first_s=1.0, limit_s=60.0)
"""Between two restarts of a nats-server that does not store: should they not help, they must not be
all that it does."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Progress = Callable[[str], None]


class System:
    """One running system on one state folder."""

    def __init__(self, home: Home, options: SystemOptions, progress: Progress) -> None:
        self._home = home
        self._options = options
        self._progress = progress
        self._clock = SystemClock()
        self._supervisor = Supervisor(home.run_dir, self._clock, self._on_change, self._server_pids)
        self._servers: list[Server] = []
        self._nats: NatsServer | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._rng = random.Random()
        self._lock: IO[str] | None = None
        self.endpoints: Endpoints | None = None
        """Where NATS and the database are, once started."""

    async def __aenter__(self) -> "System":
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and return when a request can be served.

        Raises:
            MachineUnfit: the machine lacks something, or the state folder or the port cannot be
                had.
            SettingsInvalid: a setting has a value that will not do.
            HomeInUse: another system runs on the state folder.
            ChildFailed: a process did not start, or a worker's engine.
        """
        for look in looks(self._home, self._options, os.environ).values():
            await asyncio.to_thread(look)
        if not self._home.root.exists():
            # No system can be running there, and a folder that is only the lock's would be left.
            check_port(self._options.host, self._options.port)
        # Before anything is made: another process may be restoring a system there.
        self._lock = self._home.lock()
        check_port(self._options.host, self._options.port)
        self._home.prepare()
        endpoints = self.endpoints = await self._start_servers()
        # Not before: while the servers are prepared there are children of ours that the supervisor
        # would take for orphans.
        self._supervisor.adopt_orphans()
        specs = child_specs(self._home, self._options, endpoints, os.environ)
        # Before the gateway answers: a client that sees by its readiness that the system is there
        # must find it.
        self._home.announce(self._options.url)
        self._progress("services")
        # All at once: each waits by itself for what it needs, and readiness of all is readiness of
        # the system.
        await _together(self._supervisor.start(spec) for spec in specs)
        self._progress("workers")
        await self._until_workers_are_warm()

    async def stop(self) -> None:
        """Stop everything in reverse order; twice does no harm."""
        if self._lock is not None:
            # Without the lock the announcement is another system's.
            self._home.withdraw()
        await self._supervisor.stop()
        await cancel_all(self._keepers)
        self._keepers = []
        for server in reversed(self._servers):
            await server.stop()
        self._servers = []
        if self._lock is not None:
            self._home.tidy()
            self._lock.close()
            self._lock = None

    async def _start_servers(self) -> Endpoints:
        nats_url = os.environ.get("PILOTLIGHT_NATS_URL")
        streams = StreamSettings()
        owner_url = os.environ.get("PILOTLIGHT_DATABASE_URL")
        self._progress("NATS and PostgreSQL")
        if nats_url is None:
            nats = NatsServer(
                self._home.root / "nats",
                free_port(),
                server_config(self._home.nats_passwords(), store_bytes=streams.store_bytes),
                log_file=self._home.logs / "nats-server.log",
            )
            nats_url = nats.url
            self._servers.append(nats)
            self._nats = nats
        database_url = owner_url
        if owner_url is None:
            postgres = PostgresServer(
                self._home.root / "postgres",
                self._home.secret("postgres-owner"),
                log_file=self._home.logs / "postgres.log",
            )
            owner_url, database_url = postgres.owner_url, postgres.url
            self._servers.append(postgres)
        await _together(server.start() for server in self._servers)
        self._keepers = [
            asyncio.create_task(self._keep(server), name=f"keep {server.name}")
            for server in self._servers
        ]
        self._progress("migrations")
        settings = MigrateSettings(database_url=owner_url, secrets_dir=self._home.secrets)
        await asyncio.to_thread(migrate, settings)
        await ensure_streams(StreamSettings(nats_url=nats_url, secrets_dir=self._home.secrets))
        # Not before there are streams: that one is missing looks like a full disk.
        if self._nats is not None:
            self._keepers.append(
                asyncio.create_task(self._keep_writable(self._nats), name="keep streams writable")
            )
        store_url = os.environ.get("PILOTLIGHT_OBJECT_STORE_URL") or self._home.objects.as_uri()
        return Endpoints(
            nats_url=nats_url,
            database_url=without_role(database_url or owner_url),
            object_store_url=store_url,
        )

    async def _keep(self, server: Server) -> None:
        """Start a server again when it ends by itself."""
        attempt = 0
        while True:
            since_s = self._clock.monotonic_s()
            status = await server.wait()
            if self._clock.monotonic_s() - since_s > STABLE_AFTER_S:
                attempt = 0
            log.warning(
                "server ended; starting it again",
                action="server_restart",
                server=server.name,
                status=status,
            )
            self._progress(f"{server.name}: restarting")
            while True:
                await pause(RESTART_BACKOFF.delay_s(attempt, self._rng))
                attempt += 1
                try:
                    await server.start()
                except (PilotlightError, OSError) as error:
                    log.error(
                        "server does not start",
                        action="server_restart_failed",
                        server=server.name,
                        error=str(error),
                    )
                    continue
                except Exception:  # whatever it is, without another try the server is down for good
                    log.exception(
                        "server does not start", action="server_restart_failed", server=server.name
                    )
                    continue
                break

    async def _keep_writable(self, nats: NatsServer) -> None:
        """Start nats-server again when its disk was full and has room again: by itself it would
        store nothing for ever.
        """
        password = self._home.nats_passwords()[ADMIN]
        found, restarts, since_s = 0, 0, self._clock.monotonic_s()
        async for _ in every(LOOK_AT_NATS_S):
            reason = await write_error(nats.url, password) if nats.pid is not None else None
            if reason is None:
                found = 0
                continue
            found += 1
            if found < LOOKS:
                continue
            if has_room(nats.folder):
                log.warning(
                    "streams cannot be written; starting nats-server again",
                    action="nats_write_error",
                    error=reason,
                )
                await nats.stop()
                now_s = self._clock.monotonic_s()
                restarts = restarts + 1 if now_s - since_s < MENDED_AFTER_S else 0
                found, since_s = 0, now_s
                await pause(MENDING_BACKOFF.delay_s(restarts, self._rng))
            else:
                log.error(
                    "streams cannot be written",
                    action="nats_full",
                    error=reason,
                    what_to_do=f"Make room on the disk of {nats.folder}; everything goes on by itself then.",
                )

    async def _until_workers_are_warm(self) -> None:
        key = self._home.admin_key.read_text().strip()
        deadline_s = self._clock.monotonic_s() + READY_DEADLINE_S
        headers = {"Authorization": f"Bearer {key}"}
        wanted = (self._options.workers or 1) * self._options.nodes
        async with httpx2.AsyncClient(
            base_url=self._options.url, headers=headers, timeout=5.0
        ) as http:
            while self._clock.monotonic_s() < deadline_s:
                # A gateway that has just been started again may not answer yet.
                with contextlib.suppress(httpx2.TransportError):
                    workers = (await http.get("/admin/v1/workers")).json().get("workers", [])
                    if sum(1 for worker in workers if worker["engine_up"]) >= wanted:
                        return
                await pause(0.1)
        raise ChildFailed(
            f"{wanted} workers were not up within {READY_DEADLINE_S:g} s; their logs are in {self._home.logs}"
        )

    def _on_change(self, name: str, state: str) -> None:
        self._progress(f"{name}: {state}")

    def _server_pids(self) -> set[int]:
        return {server.pid for server in self._servers if server.pid is not None}


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it at once; the first failure cancels the rest, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


def free_port() -> int:
    """A port of the loopback interface that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def without_role(database_url: str) -> str:
    """The URL without user and password, so that every service takes its own."""
    return (
        make_url(database_url)
        ._replace(username=None, password=None)
        .render_as_string(hide_password=False)
    )


def run_stoppable(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end.

    SIGINT and SIGTERM cancel it, once: what it has started is then stopped in order, and the status
    is 130.
    """

    async def run() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            for number in STOP_SIGNALS:
                loop.add_signal_handler(number, _already_stopping)
            task.cancel()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        return 130


def _already_stopping() -> None:
    """A second Ctrl-C must not cut off the orderly stop that the first one began."""


async def until_signalled() -> None:
    """Return at Ctrl-C or SIGTERM."""
    stopping = asyncio.Event()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await stopping.wait()
