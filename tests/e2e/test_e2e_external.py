"""Servers of one's own in the place of the embedded ones."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import free_port, running

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.common.natsconf import server_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


def test_own_servers_replace_the_embedded_ones(folder: Path) -> None:
    """A NATS server with one user of its own, a PostgreSQL owner, a folder as object store: nothing
    embedded is started.
    """
    nats = NatsServer(folder / "nats", free_port(), server_config({"admin": "secret word"}))
    postgres = PostgresServer(folder / "postgres", "owner's password")
    asyncio.run(nats.start())
    asyncio.run(postgres.start())
    environment = {
        "PILOTLIGHT_NATS_URL": nats.url.replace("nats://", "nats://admin:secret%20word@"),
        "PILOTLIGHT_DATABASE_URL": postgres.owner_url,
        "PILOTLIGHT_OBJECT_STORE_URL": (folder / "store").as_uri(),
    }
    try:
        with running(
            folder / "home", "--worker-kind", "sim", "--with-demo-model", environment=environment
        ) as system:
            with system.openai() as client:
                reply = client.completions.create(
                    model="ember-7m", prompt="Once upon a time", max_tokens=4
                )
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 4
        assert nats.pid is not None
        assert postgres.pid is not None
        assert not (folder / "home" / "nats").exists()
        assert not (folder / "home" / "postgres").exists()
        assert list((folder / "store").rglob("*.json"))
    finally:
        asyncio.run(postgres.stop())
        asyncio.run(nats.stop())
