"""Servers of the user's own are looked at before anything is started: they answer, or the message
names the cause.
"""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import quote

import pytest
from embedded_system import free_port
from standin_s3 import ACCESS_KEY, SECRET_KEY, running_s3

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.cli.home import Home
from pilotlight.cli.own_servers import look_at_bus, look_at_database, look_at_store, server_looks
from pilotlight.common.errors import (
    BusDenied,
    BusUnavailable,
    DatabaseDenied,
    DatabaseUnavailable,
    SettingsInvalid,
    SourceDenied,
    SourceUnavailable,
)
from pilotlight.common.natsconf import ADMIN, server_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PASSWORD = "an owner's 100 % / @:#+"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home" / "secrets").mkdir(parents=True)
    return Home(tmp_path / "home")


@pytest.fixture
async def postgres(tmp_path: Path) -> AsyncGenerator[PostgresServer]:
    server = PostgresServer(tmp_path / "postgres", PASSWORD, settings={"fsync": "off"})
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_a_database(postgres: PostgresServer) -> None:
    """Its password may hold any character, and is shown nowhere."""
    told = await asyncio.to_thread(look_at_database, postgres.owner_url)
    assert told.endswith("answers")
    assert quote(PASSWORD, safe="") not in told
    for wrong, kind, words in (
        (
            postgres.owner_url.replace("owner", "thief", 1),
            DatabaseDenied,
            "password authentication failed",
        ),
        (postgres.owner_url + "&no_such_option=1", SettingsInvalid, "no_such_option"),
        ("postgresql://owner:hush@127.0.0.1:port/x", SettingsInvalid, "not the URL of a database"),
        (f"postgresql://owner:hush@127.0.0.1:{free_port()}/x", DatabaseUnavailable, "refused"),
    ):
        with pytest.raises(kind, match=words) as caught:
            await asyncio.to_thread(look_at_database, wrong)
        assert type(caught.value) is kind
        assert quote(PASSWORD, safe="") not in str(caught.value)
        assert "hush" not in str(caught.value)


async def test_nats(home: Home, tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", free_port(), server_config({ADMIN: "right"}))
    await server.start()
    try:
        (home.secrets / f"nats-{ADMIN}").write_text("wrong")
        with pytest.raises(BusDenied):
            await look_at_bus(home, server.url)
        (home.secrets / f"nats-{ADMIN}").write_text("right")
        assert (await look_at_bus(home, server.url)).endswith("answers")
    finally:
        await server.stop()
    with pytest.raises(BusUnavailable):
        await look_at_bus(home, server.url)


async def test_an_object_store(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_S3_ALLOW_HTTP", "true")
    with running_s3("mine") as server:
        monkeypatch.setenv("PILOTLIGHT_S3_ENDPOINT", server.url)
        for name, secret in (("s3-access-key", "wrong"), ("s3-secret-key", SECRET_KEY)):
            (home.secrets / name).write_text(secret)
        with pytest.raises(SourceDenied):
            await look_at_store(home, "s3://mine")
        (home.secrets / "s3-access-key").write_text(ACCESS_KEY)
        assert await look_at_store(home, "s3://mine") == "s3://mine answers"
    with pytest.raises(SourceUnavailable):
        await look_at_store(home, "s3://mine")


def test_only_what_is_named_is_looked_at(home: Home) -> None:
    assert server_looks(home, {}) == {}
    named = {
        "PILOTLIGHT_DATABASE_URL": "postgresql://x/y",
        "PILOTLIGHT_NATS_URL": "nats://x",
        "PILOTLIGHT_OBJECT_STORE_URL": "s3://bucket",
    }
    assert sorted(server_looks(home, named)) == ["NATS", "database", "object store"]
    # Before the first start there are no passwords that the user's server could know, unless its
    # URL names one.
    home.secrets.rmdir()
    assert "NATS" not in server_looks(home, named)
    assert "NATS" in server_looks(home, named | {"PILOTLIGHT_NATS_URL": "nats://me:word@x"})
