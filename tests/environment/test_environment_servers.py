"""Servers that refuse, each for real: what is said names the cause and what to do, and the same
start works once it is mended.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psycopg
import pytest
from embedded_system import free_port

from pilotlight.cli.embedded import NatsServer, PostgresServer
from pilotlight.cli.supervisor import ChildSpec, Supervisor
from pilotlight.common.clock import SystemClock
from pilotlight.common.db.migrate import MigrateSettings, migrate
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    BusDenied,
    BusFull,
    DatabaseCrowded,
    DatabaseDenied,
    DatabaseUnavailable,
    SourceDenied,
    SourceUnavailable,
    StoreFull,
)
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import ADMIN, StreamSettings, ensure_streams, server_config
from pilotlight.common.settings import BusSettings, DatabaseSettings, S3Settings
from pilotlight.common.store import ObjectStore

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DEADLINE_S = 60.0
PASSWORD = "the owner's"


@pytest.fixture
async def postgres(tmp_path: Path) -> AsyncGenerator[PostgresServer]:
    limits = {
        "fsync": "off",
        "max_connections": "5",
        "superuser_reserved_connections": "0",
        "autovacuum": "off",
    }
    server = PostgresServer(tmp_path / "postgres", PASSWORD, settings=limits)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def connect(settings: DatabaseSettings) -> None:
    database = Database(settings, "scheduler", SystemClock())
    try:
        await database.start()
    finally:
        await database.stop()


async def test_postgres_refuses(postgres: PostgresServer, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "postgres-scheduler").write_text("right")
    owner = MigrateSettings(database_url=postgres.owner_url, secrets_dir=secrets)
    await asyncio.to_thread(migrate, owner)
    service = DatabaseSettings(database_url=postgres.url, secrets_dir=secrets)
    await connect(service)

    # The wrong password, and none.
    (secrets / "postgres-scheduler").write_text("wrong")
    with pytest.raises(
        DatabaseDenied, match=r'password authentication failed for user "pilotlight_scheduler"'
    ):
        await connect(service)
    with pytest.raises(DatabaseDenied, match="no password supplied"):
        await connect(DatabaseSettings(database_url=postgres.url, secrets_dir=tmp_path))
    with pytest.raises(DatabaseDenied, match="cannot be migrated"):
        await asyncio.to_thread(
            migrate, MigrateSettings(database_url=postgres.owner_url.replace("owner", "thief"))
        )
    assert "postgres-SERVICE" in DatabaseDenied.action
    (secrets / "postgres-scheduler").write_text("right")

    # Every connection is taken.
    taken = [psycopg.connect(postgres.owner_url) for _ in range(5)]
    with pytest.raises(DatabaseCrowded, match="too many clients already"):
        await connect(service)
    with pytest.raises(DatabaseCrowded):
        await asyncio.to_thread(migrate, owner)
    assert "max_connections" in DatabaseCrowded.action
    for connection in taken:
        connection.close()

    # Rejected by address.
    rules = tmp_path / "postgres" / "data" / "pg_hba.conf"
    before = rules.read_text()
    with psycopg.connect(postgres.owner_url, autocommit=True) as connection:
        rules.write_text("local all pilotlight_scheduler reject\n" + before)
        connection.execute("SELECT pg_reload_conf()")
        with pytest.raises(DatabaseDenied, match=r"pg_hba\.conf"):
            await until_refused(service)
        rules.write_text(before)
        connection.execute("SELECT pg_reload_conf()")

    # Stopped, and there again.
    await postgres.stop()
    with pytest.raises(DatabaseUnavailable, match="the database failed") as stopped:
        await connect(service)
    assert type(stopped.value) is DatabaseUnavailable
    assert "PILOTLIGHT_DATABASE_URL" in stopped.value.action
    await postgres.start()
    await connect(service)


async def until_refused(settings: DatabaseSettings) -> None:
    """A reloaded configuration is read a moment later."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await connect(settings)


async def test_the_embedded_postgres_of_another_password(tmp_path: Path) -> None:
    """At once, not when the deadline for its start has passed; and the folder is as good as
    before.
    """
    first = PostgresServer(tmp_path / "postgres", PASSWORD, settings={"fsync": "off"})
    await first.start()
    await first.stop()
    other = PostgresServer(tmp_path / "postgres", "lost", settings={"fsync": "off"})
    with pytest.raises(DatabaseDenied, match="secrets/postgres-owner"):
        await other.start()
    assert other.pid is None
    await first.start()
    await first.stop()


async def test_nats_refuses(tmp_path: Path) -> None:
    server = NatsServer(
        tmp_path / "nats", free_port(), server_config({ADMIN: "a", "gateway": "right"})
    )
    await server.start()
    try:
        (tmp_path / "nats-gateway").write_text("wrong")
        settings = BusSettings(nats_url=server.url, secrets_dir=tmp_path)
        with pytest.raises(
            BusDenied, match=r"refuses a connection as gateway with the password of nats-gateway"
        ):
            await NatsBus.connect(settings, user="gateway", name="x")
        with pytest.raises(BusDenied, match="as gateway without a password"):
            await NatsBus.connect(
                BusSettings(nats_url=server.url, secrets_dir=None), user="gateway", name="x"
            )
        named = server.url.replace("nats://", "nats://stranger:word@")
        with pytest.raises(BusDenied, match="as stranger, whom PILOTLIGHT_NATS_URL names"):
            await NatsBus.connect(BusSettings(nats_url=named), user="gateway", name="x")
        (tmp_path / "nats-gateway").write_text("right")
        await (await NatsBus.connect(settings, user="gateway", name="x")).close()
        # A stream for which there is no room.
        (tmp_path / f"nats-{ADMIN}").write_text("a")
        with pytest.raises(BusFull, match="PILOTLIGHT_EVENTS_BYTES"):
            await ensure_streams(
                StreamSettings(nats_url=server.url, secrets_dir=tmp_path, events_bytes=1 << 60)
            )
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "InvalidAccessKeyId", SourceDenied, "403 InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch", SourceDenied, "403 SignatureDoesNotMatch"),
        (403, "RequestTimeTooSkewed", SourceUnavailable, "clock is wrong"),
        (507, "XMinioStorageFull", StoreFull, "507"),
    ],
)
async def test_an_object_store_refuses(
    status: int,
    code: str,
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    for name in ("s3-access-key", "s3-secret-key"):
        (tmp_path / name).write_text("wrong")
    settings = S3Settings(
        s3_endpoint=f"http://127.0.0.1:{server.server_port}",
        s3_allow_http=True,
        secrets_dir=tmp_path,
    )
    try:
        with pytest.raises(kind, match=words) as caught:
            await ObjectStore.from_url("s3://bucket", settings).put_if_absent("k", b"v")
        assert type(caught.value) is kind
    finally:
        server.shutdown()
        server.server_close()


async def test_a_service_that_cannot_start_speaks_through_its_supervisor(
    tmp_path: Path, nats_url: str
) -> None:
    """The user sees the cause, not the name of a log in which it might be found."""
    supervisor = Supervisor(tmp_path, SystemClock(), lambda _, __: None, set)
    environment = {
        **os.environ,
        "PILOTLIGHT_NATS_URL": nats_url,
        "PILOTLIGHT_RUN_DIR": str(tmp_path / "run"),
        "PILOTLIGHT_OBJECT_STORE_URL": "memory://",
        "PILOTLIGHT_DATABASE_URL": f"postgresql:///pilotlight?host={tmp_path}",
    }
    spec = ChildSpec(
        name="cache",
        argv=(sys.executable, "-m", "pilotlight.cache"),
        environment=environment,
        log_path=tmp_path / "cache.log",
    )
    try:
        with pytest.raises(
            DatabaseUnavailable, match=r"^cache cannot start: the database failed: .*No such file"
        ):
            await supervisor.start(spec)
    finally:
        await supervisor.stop()


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    program = "from pilotlight.common.telemetry import configure_logging; import structlog, logging; configure_logging('x'); "
    program += "[structlog.get_logger().error('lost') for _ in range(99)]; logging.getLogger('y').error('lost'); print('alive')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.stdout == "alive\n"


async def test_a_service_whose_folders_are_read_only(tmp_path: Path, nats_url: str) -> None:
    for variable, folder in (
        ("PILOTLIGHT_RUN_DIR", "/proc/nowhere"),
        ("PILOTLIGHT_STATE_DIR", "/proc/nowhere"),
    ):
        environment = {
            **os.environ,
            "PILOTLIGHT_NATS_URL": nats_url,
            "PILOTLIGHT_RUN_DIR": str(tmp_path),
            "PILOTLIGHT_OBJECT_STORE_URL": "memory://",
            variable: folder,
        }
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "pilotlight.loader"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        told = [json.loads(line) for line in done.stderr.splitlines() if '"start_failed"' in line]
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        (last,) = told
        assert last["code"] == "folder_unusable"
        assert f"{folder} ({variable})" in last["error"]
