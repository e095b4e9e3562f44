"""Fixtures for tests: a prefix on the real nats-server for each test, a database on the real
PostgreSQL for each module.

A pytest plugin, loaded by the root ``conftest.py``, which also starts the two servers
(``nats_url``, ``postgres_url``, one of each for the whole run). There is no in-memory twin of
either: it would be a second semantics.
"""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from inspect import isawaitable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import NullPool

from pilotlight.common.buckets import jetstream
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.db.session import service_url
from pilotlight.common.ids import new_incarnation
from pilotlight.common.nats_bus import NatsBus, bucket_name
from pilotlight.common.nats_streams import ensure_events
from pilotlight.common.service import Background, Context
from pilotlight.common.settings import BusSettings, DatabaseSettings, ServiceSettings
from pilotlight.common.store import ObjectStore
from pilotlight.common.waiting import pause, within

S = TypeVar("S", bound=ServiceSettings)

EVENTS_BYTES = 4 * 1024 * 1024
DROP_DEADLINE_S = 30
ConnectBus = Callable[[str], Awaitable[NatsBus]]
DatabaseSettingsOf = Callable[[str], DatabaseSettings]


class MakeContext(Protocol):
    """Builds a service's context on the test's bus, with an object store in memory."""

    def __call__(
        self, service: str, settings: S, *, clock: Clock | None = None, bus: Bus | None = None
    ) -> Context[S]: ...


async def until(
    condition: Callable[[], object | Awaitable[object]], *, deadline_s: float = 10.0
) -> None:
    """Return as soon as a condition holds that no event tells of.

    Raises:
        DeadlineExceeded: it did not hold in time.
    """

    async def holds() -> None:
        while True:
            held = condition()
            if await held if isawaitable(held) else held:
                return
            await pause(0.002)

    await within(deadline_s, holds(), "a condition")


class ReconnectingBus:
    """A bus that reconnects when a test says so: every listener for that is called."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._callbacks: list[Callable[[], Awaitable[None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """As ``Bus.on_reconnect``."""
        self._callbacks.append(callback)

    async def reconnect(self) -> None:
        """Call them all."""
        for callback in self._callbacks:
            await callback()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked ``anyio`` run on asyncio alone."""
    return "asyncio"


@pytest.fixture
def bus_settings(nats_url: str) -> BusSettings:
    """The nats-server, with a prefix of this test's own."""
    return BusSettings(nats_url=nats_url, prefix=f"t{secrets.token_hex(6)}.", secrets_dir=None)


@pytest.fixture
async def connect_bus(bus_settings: BusSettings, anyio_backend: str) -> AsyncGenerator[ConnectBus]:
    """Connects further buses of this test, one for each process that it plays."""
    connected: list[NatsBus] = []

    async def connect(user: str) -> NatsBus:
        bus = await NatsBus.connect(bus_settings, user=user, name=f"test-{user}")
        connected.append(bus)
        return bus

    try:
        yield connect
        if connected:
            await _remove_streams(connected[0], bus_settings.prefix)
    finally:
        for bus in connected:
            await bus.close()


@pytest.fixture
async def bus(connect_bus: ConnectBus, bus_settings: BusSettings) -> NatsBus:
    """A bus of this test's own, with the stream of events."""
    connected = await connect_bus("test")
    await ensure_events(connected.client, bus_settings.prefix, EVENTS_BYTES)
    return connected


@pytest.fixture
async def make_context(bus: NatsBus, anyio_backend: str) -> AsyncGenerator[MakeContext]:
    """Builds contexts; their background tasks end with the test, which fails when one of them
    died.
    """
    backgrounds: list[Background] = []
    bus_of_test: Bus = bus

    def make(
        service: str, settings: S, *, clock: Clock | None = None, bus: Bus | None = None
    ) -> Context[S]:
        background = Background()
        backgrounds.append(background)
        return Context(
            service=service,
            settings=settings,
            clock=clock or SystemClock(),
            bus=bus or bus_of_test,
            store=ObjectStore.from_url("memory://"),
            background=background,
            metrics=CollectorRegistry(),
            incarnation=new_incarnation(),
        )

    yield make
    for background in backgrounds:
        await background.stop()
        assert not background.failed.done(), background.failed.result()


@pytest.fixture(scope="module")
def module_database(postgres_url: str) -> Generator[URL]:
    """A fresh, migrated database for the tests of one module: its URL as the owner."""
    owner = make_url(postgres_url).set(drivername="postgresql+psycopg")
    name = f"test_{secrets.token_hex(6)}"
    engine = create_engine(
        owner.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {owner.database}"))
    try:
        yield owner.set(database=name)
    finally:
        with engine.connect() as connection:
            # A connection that was left in the middle of its handshake holds it up for as long as
            # the server waits for the rest of it.
            connection.execute(text(f"SET statement_timeout = '{DROP_DEADLINE_S}s'"))
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        engine.dispose()


@pytest.fixture(scope="module")
def database_settings(module_database: URL, postgres_secrets: Path) -> DatabaseSettingsOf:
    """Settings of a service for the module's database, with the service's own role."""

    def settings_of(service: str) -> DatabaseSettings:
        server = module_database
        anonymous = URL.create(
            "postgresql",
            host=server.host,
            port=server.port,
            database=server.database,
            query=server.query,
        )
        settings = DatabaseSettings(
            database_url=anonymous.render_as_string(), secrets_dir=postgres_secrets
        )
        url = service_url(settings, service).set(drivername="postgresql")
        return settings.model_copy(
            update={"database_url": url.render_as_string(hide_password=False)}
        )

    return settings_of


async def _remove_streams(bus: NatsBus, prefix: str) -> None:
    stream = jetstream(bus.client)
    mark = bucket_name(prefix, "")
    for info in await stream.streams_info():
        if info.config.name.startswith((mark, f"KV_{mark}")):
            await stream.delete_stream(info.config.name)
