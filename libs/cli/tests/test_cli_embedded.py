"""The real servers of embedded mode: started, killed, started again, and gone with their parent."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psycopg
import pytest

from pilotlight.cli.embedded import MAX_SOCKET_PATH_BYTES, NatsServer, PostgresServer, socket_folder
from pilotlight.common.errors import BusUnavailable, DatabaseUnavailable
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import server_config
from pilotlight.common.settings import BusSettings

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DEADLINE_S = 30.0
FAST = {"fsync": "off"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_nats_comes_again_on_the_same_folder(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", free_port(), server_config({}))
    await server.start()
    pid = server.pid
    await server.start()
    assert server.pid == pid
    settings = BusSettings(nats_url=server.url)
    bus = await NatsBus.connect(settings, user="gateway", name="x")
    await (await bus.bucket("gateways")).put("key", {"a": 1})
    await bus.close()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    await server.start()
    bus = await NatsBus.connect(settings, user="gateway", name="x")
    found: asyncio.Queue[tuple[str, dict[str, int] | None]] = asyncio.Queue()

    async def on_change(key: str, value: dict[str, int] | None) -> None:
        found.put_nowait((key, value))

    watching = asyncio.create_task((await bus.bucket("gateways")).watch(dict[str, int], on_change))
    assert await asyncio.wait_for(found.get(), DEADLINE_S) == ("key", {"a": 1})
    watching.cancel()
    await asyncio.wait({watching})
    await bus.close()
    await server.stop()
    await server.stop()
    assert server.pid is None
    assert (tmp_path / "nats" / "nats-server.conf").stat().st_mode & 0o777 == 0o600


async def test_a_taken_port_is_told(tmp_path: Path) -> None:
    first = NatsServer(tmp_path / "one", free_port(), server_config({}))
    await first.start()
    second = NatsServer(tmp_path / "two", first.port, server_config({}))
    with pytest.raises(BusUnavailable, match="address already in use"):
        await second.start()
    await first.stop()


async def test_postgres_comes_again_on_the_same_folder(tmp_path: Path) -> None:
    password = f"with : / @ {secrets.token_urlsafe(8)}"
    server = PostgresServer(tmp_path / "postgres", password, settings=FAST)
    await server.start()
    pid = server.pid
    await server.start()
    assert server.pid == pid
    with psycopg.connect(server.owner_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (x int)")
        connection.execute("INSERT INTO kept VALUES (7)")
        # A second server on the folder would be the end of the data.
        other = PostgresServer(tmp_path / "postgres", password, log_file=tmp_path / "other.log")
        with pytest.raises(DatabaseUnavailable, match=r"postmaster\.pid"):
            await other.start()
        assert other.pid is None
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    await server.start()
    with psycopg.connect(server.owner_url) as connection:
        assert connection.execute("SELECT x FROM kept").fetchall() == [(7,)]
    await server.stop()
    await server.stop()
    assert not [name for name in os.listdir(tmp_path / "postgres") if name.startswith("password-")]


async def test_postgres_asks_for_passwords_and_has_no_port(tmp_path: Path) -> None:
    server = PostgresServer(tmp_path / "postgres", "right", settings=FAST)
    await server.start()
    with psycopg.connect(server.owner_url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
    for url in (server.owner_url.replace("right", "wrong"), server.url):
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url.replace("postgresql:///", "postgresql://pilotlight@/"))
    socket_place = Path(server.url.partition("host=")[2].replace("%2F", "/"))
    assert os.stat(socket_place).st_mode & 0o777 == 0o700
    await server.stop()


async def test_a_deep_home_has_a_short_socket_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    server = PostgresServer(deep / "postgres", "right", settings=FAST)
    await server.start()
    with psycopg.connect(server.owner_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    await server.stop()
    assert socket_folder(deep / "postgres" / "socket", ".s.PGSQL.5432.lock").name not in os.listdir(
        "/tmp"
    )
    place = socket_folder(deep, "x.sock")
    assert place == socket_folder(deep, "x.sock") != socket_folder(deep / "y", "x.sock")
    assert len(bytes(place / "x.sock")) <= MAX_SOCKET_PATH_BYTES
    assert socket_folder(Path("/run/x"), "x.sock") == Path("/run/x")


async def test_a_closed_home_is_no_obstacle(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    server = PostgresServer(home / "postgres", "right", settings=FAST)
    await server.start()
    await server.stop()
    assert home.stat().st_mode & 0o777 == 0o700


async def test_servers_end_with_their_parent(tmp_path: Path) -> None:
    program = f"""
        import asyncio, os
        from pathlib import Path
        from pilotlight.cli.embedded import NatsServer, PostgresServer
        from pilotlight.common.natsconf import server_config
        async def main():
            nats = NatsServer(Path({str(tmp_path / "nats")!r}), {free_port()}, server_config({{}}))
            postgres = PostgresServer(Path({str(tmp_path / "postgres")!r}), "right", settings={FAST!r})
            await nats.start()
            await postgres.start()
            print(nats.pid, postgres.pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    ended = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    await parent.wait()
    for descriptor in ended:
        event = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, event.set)
        async with asyncio.timeout(DEADLINE_S):
            await event.wait()
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
