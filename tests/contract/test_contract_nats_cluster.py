"""Three NATS servers as one, as the pages of operations have it: what was stored and what is said
gets through when one of them dies.
"""

import asyncio
import signal
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from pilotlight.cli.binaries import nats_binary
from pilotlight.cli.system import free_port
from pilotlight.common.buckets import INSTANCES
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.messages.events import Event, event_subject
from pilotlight.common.messages.reports import GatewayInfo
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import RIGHTS, StreamSettings, ensure_streams, server_config
from pilotlight.common.testing import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DEADLINE_S = 60.0
SERVERS = ("a", "b", "c")


class Cluster:
    """Servers on one host."""

    def __init__(self, folder: Path) -> None:
        self.ports = {name: free_port() for name in SERVERS}
        routes = {name: free_port() for name in SERVERS}
        secrets = folder / "secrets"
        secrets.mkdir()
        passwords = {user: f"of-{user}" for user in ("admin", *RIGHTS)}
        for user, password in passwords.items():
            (secrets / f"nats-{user}").write_text(password)
        config = folder / "nats.conf"
        config.write_text(server_config(passwords))
        self.settings = StreamSettings(
            nats_url=",".join(f"nats://127.0.0.1:{port}" for port in self.ports.values()),
            secrets_dir=secrets,
            nats_replicas=3,
        )
        everyone = ",".join(f"nats://127.0.0.1:{port}" for port in routes.values())
        self.processes = {
            name: subprocess.Popen(
                [
                    nats_binary(),
                    *("-c", config, "-n", name, "-a", "127.0.0.1", "-p", str(self.ports[name])),
                    *("-sd", folder / name, "-l", folder / f"{name}.log"),
                    *("--cluster_name", "pilotlight", "--routes", everyone),
                    *("--cluster", f"nats://127.0.0.1:{routes[name]}"),
                ]
            )
            for name in SERVERS
        }

    async def ready(self) -> None:
        """Streams can be made as soon as the servers have found one another."""

        async def made() -> bool:
            try:
                await ensure_streams(self.settings)
            except BusUnavailable:
                return False
            return True

        await until(made, deadline_s=DEADLINE_S)
        bus = await NatsBus.connect(self.settings, user="admin", name="test")

        async def replicated() -> bool:
            for name in ("EVENTS", f"KV_{INSTANCES}"):
                cluster = (await bus.client.jetstream().stream_info(name)).cluster
                others = (cluster and cluster.replicas) or []
                if len(others) != 2 or not all(one.current for one in others):
                    return False
            return True

        await until(replicated, deadline_s=DEADLINE_S)
        await bus.close()

    def kill(self, port: int) -> None:
        name = next(name for name, one in self.ports.items() if one == port)
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
async def cluster(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[Cluster]:
    made = Cluster(tmp_path)
    try:
        await made.ready()
        yield made
    finally:
        made.stop()


async def test_a_cluster_of_three_loses_one_server_and_nothing_else(cluster: Cluster) -> None:
    scheduler = await NatsBus.connect(cluster.settings, user="scheduler", name="scheduler")
    gateway = await NatsBus.connect(cluster.settings, user="gateway", name="gateway")
    bucket = await scheduler.bucket(INSTANCES)
    await bucket.put("i", GatewayInfo(gateway_id="before", url=""))
    url = scheduler.client.connected_url
    assert url is not None
    assert url.port is not None
    cluster.kill(url.port)
    seen = list[str]()

    async def on_value(key: str, value: GatewayInfo | None) -> None:
        seen.append(value.gateway_id if value is not None else "")

    async def write() -> bool:
        try:
            await bucket.put("i", GatewayInfo(gateway_id="after", url=""))
        except BusUnavailable:
            return False
        return True

    await until(write, deadline_s=DEADLINE_S)
    watching = asyncio.create_task((await gateway.bucket(INSTANCES)).watch(GatewayInfo, on_value))
    await until(lambda: seen and seen[-1] == "after", deadline_s=DEADLINE_S)
    event = Event(event_id="ev-1", kind="started", entity="e", at="2026-01-01T00:00:00+00:00")

    async def told() -> bool:
        try:
            await scheduler.publish_event(
                event_subject("scheduler", "started"), event.event_id, event
            )
        except BusUnavailable:
            return False
        return True

    await until(told, deadline_s=DEADLINE_S)
    watching.cancel()
    await asyncio.wait([watching])
    for bus in (scheduler, gateway):
        await bus.close()
