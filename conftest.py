"""Starts the real servers that tests share, when the first test asks for one, and loads the
fixtures made from them.
"""

import asyncio
import gc
import secrets
import socket
from collections.abc import Generator
from functools import cache
from pathlib import Path

import httpcore2
import nats
import pytest
from hypothesis import HealthCheck, settings

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.db.tables import OWNERS
from pilotlight.common.natsconf import server_config

pytest_plugins = ["pilotlight.common.testing"]

# How long an example takes says something about the machine, not about the code: a busy one fails
# no property.
settings.register_profile(
    "pilotlight", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("pilotlight")

NOT_DURABLE = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
}


def pytest_collection_finish() -> None:
    """All that the modules of thousands of tests hold stays to the end. A full collection that
    looks through it takes half a second, and some tests ask for one.
    """
    gc.collect()
    gc.freeze()


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Generator[None]:
    """HTTP clients of a process share one: each reads the system's certificates into its own, which
    takes longer than most tests, and tests' servers have none.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A nats-server with JetStream and without authentication."""
    server = NatsServer(tmp_path_factory.mktemp("nats"), free_port(), server_config({}))

    async def start() -> None:
        await server.start()
        # Behind an account's last stream the server removes the folder of its streams, and one that
        # is made at that moment fails ("error creating store for stream"): each test ends with its
        # own. So one stays.
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name="stays", subjects=["stays"])
        await client.close()

    asyncio.run(start())
    try:
        yield server.url
    finally:
        asyncio.run(server.stop())


@pytest.fixture(scope="session")
def postgres_secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The secrets of the database's roles."""
    folder = tmp_path_factory.mktemp("secrets")
    for owner in OWNERS:
        (folder / f"postgres-{owner}").write_text(secrets.token_urlsafe(12))
    return folder


@pytest.fixture(scope="session")
def postgres_url(
    tmp_path_factory: pytest.TempPathFactory, postgres_secrets: Path
) -> Generator[str]:
    """A PostgreSQL whose database is migrated: the URL as its owner.

    Tests change nothing there; they take ``database_settings``.
    """
    server = PostgresServer(
        tmp_path_factory.mktemp("postgres"), secrets.token_urlsafe(12), settings=NOT_DURABLE
    )
    asyncio.run(server.start())
    try:
        migrate(MigrateSettings(database_url=server.owner_url, secrets_dir=postgres_secrets))
        yield server.owner_url
    finally:
        asyncio.run(server.stop())
