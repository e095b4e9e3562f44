"""A bus whose server ends, freezes, loses what it stored, or is not there."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from bus_messages import Answer, Ask, Number, echo
from structlog.testing import capture_logs

from pilotlight.cli.embedded import NatsServer
from pilotlight.common import nats_bus
from pilotlight.common.buckets import jetstream
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.nats_streams import events_stream
from pilotlight.common.natsconf import StreamSettings, ensure_streams, server_config
from pilotlight.common.settings import BusSettings
from pilotlight.common.testing import until

pytestmark = pytest.mark.anyio
DEADLINE_S = 10.0


@pytest.fixture
async def own_server(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[NatsServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = NatsServer(tmp_path / "nats", port, server_config({}))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_everything_resumes_after_a_restart(own_server: NatsServer, killed: bool) -> None:
    settings = StreamSettings(nats_url=own_server.url, events_bytes=1 << 20)
    await ensure_streams(settings)
    bus = await NatsBus.connect(settings, user="gateway", name="gateway")
    heard: asyncio.Queue[Number] = asyncio.Queue()
    changes: asyncio.Queue[tuple[str, Number | None]] = asyncio.Queue()
    resynced = asyncio.Event()

    async def on_change(key: str, value: Number | None) -> None:
        changes.put_nowait((key, value))

    async def resync() -> None:
        resynced.set()

    bus.on_reconnect(resync)
    await bus.serve("v1.echo", Ask, echo)
    await bus.subscribe("v1.note", Number, heard.put)
    bucket = await bus.bucket("numbers")
    await bucket.put("a", Number(number=1))
    watching = asyncio.create_task(bucket.watch(Number, on_change))
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("a", Number(number=1))

    pid = own_server.pid
    if killed and pid is not None:
        os.kill(pid, signal.SIGKILL)
        await own_server.wait()
    else:
        await own_server.stop()
    await until(lambda: not bus.connected)
    with pytest.raises(BusUnavailable):
        await bus.request("v1.echo", Ask(), Answer, deadline_s=0.05)
    asking = asyncio.create_task(
        bus.request("v1.echo", Ask(text="waits"), Answer, deadline_s=DEADLINE_S)
    )
    await own_server.start()

    assert await asking == Answer(text="waits")
    async with asyncio.timeout(DEADLINE_S):
        await resynced.wait()
    await bus.publish("v1.note", Number(number=5))
    assert await asyncio.wait_for(heard.get(), DEADLINE_S) == Number(number=5)
    started_s = asyncio.get_running_loop().time()
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("a", Number(number=1))
    await bucket.put("a", Number(number=2))
    while await asyncio.wait_for(changes.get(), DEADLINE_S) != ("a", Number(number=2)):
        pass
    assert asyncio.get_running_loop().time() - started_s < 2.0
    watching.cancel()
    await asyncio.wait({watching})
    await bus.close()


async def test_a_watch_survives_the_loss_of_its_bucket(own_server: NatsServer) -> None:
    bus = await NatsBus.connect(
        BusSettings(nats_url=own_server.url), user="gateway", name="gateway"
    )
    changes: asyncio.Queue[tuple[str, Number | None]] = asyncio.Queue()

    async def on_change(key: str, value: Number | None) -> None:
        changes.put_nowait((key, value))

    bucket = await bus.bucket("numbers")
    watching = asyncio.create_task(bucket.watch(Number, on_change))
    await bucket.put("a", Number(number=1))
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("a", Number(number=1))
    stream = jetstream(bus.client)
    await own_server.stop()
    await own_server.start()
    await until(lambda: bus.connected)
    await stream.delete_stream("KV_numbers")
    fresh = await NatsBus.connect(
        BusSettings(nats_url=own_server.url), user="gateway", name="second"
    )
    await (await fresh.bucket("numbers")).put("b", Number(number=2))
    await own_server.stop()
    await own_server.start()
    while await asyncio.wait_for(changes.get(), DEADLINE_S) != ("b", Number(number=2)):
        pass
    watching.cancel()
    await asyncio.wait({watching})
    await fresh.close()
    await bus.close()


async def test_a_frozen_server_is_noticed_and_nothing_is_lost(own_server: NatsServer) -> None:
    """A stopped process keeps its connections: what was sent to it arrives when it goes on, without
    a new connection.
    """
    bus = await NatsBus.connect(BusSettings(nats_url=own_server.url), user="test", name="frozen")
    received: list[int] = []
    done = asyncio.Event()

    async def on_number(message: Number) -> None:
        received.append(message.number)
        if message.number == 1:
            done.set()

    pid = own_server.pid
    assert pid is not None
    try:
        await bus.subscribe("v1.numbers", Number, on_number)
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not bus.connected, deadline_s=DEADLINE_S)
            # Given up, and answered later all the same: that must not deafen the connection.
            with pytest.raises(BusUnavailable):
                await bus.subscribe("v1.other", Number, on_number)
            await bus.publish("v1.numbers", Number(number=1))
        finally:
            with capture_logs() as logs:
                os.kill(pid, signal.SIGCONT)
                await until(lambda: bus.connected, deadline_s=DEADLINE_S)
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        (told,) = [one for one in logs if one.get("action") == "bus_silent"]
        assert told["seconds"] > 1.0
        assert received == [1]
        assert bus.client.stats["reconnects"] == 0
    finally:
        await bus.close()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_a_connection_that_ends_under_a_question_ends_nothing_else(
    own_server: NatsServer,
) -> None:
    """For one turn of the loop nats-py writes to what is closed already: that is a lost connection
    as any other.
    """
    bus = await NatsBus.connect(BusSettings(nats_url=own_server.url), user="test", name="aborted")
    transport: Any = bus.client._transport
    pulse = bus.task
    assert pulse is not None
    transport._io_writer.transport.abort()
    with pytest.raises(nats.errors.Error):
        await bus._pulse.round_trip(DEADLINE_S)
    await until(
        lambda: bus.connected and bus.client.stats["reconnects"] == 1, deadline_s=DEADLINE_S
    )
    assert not pulse.done()
    await bus.close()
    assert pulse.done()


async def test_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bus, "CONNECT_DEADLINE_S", 0.1)
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:9"):
        await NatsBus.connect(BusSettings(nats_url="nats://127.0.0.1:9"), user="gateway", name="x")


async def test_events_are_kept_as_long_as_settings_say(own_server: NatsServer) -> None:
    """Also for a stream that is there already: settings take effect with the next start."""
    for days, size_bytes in ((7.0, 2 << 20), (1.5, 1 << 20)):
        settings = StreamSettings(
            nats_url=own_server.url, events_keep_days=days, events_bytes=size_bytes
        )
        await ensure_streams(settings)
        bus = await NatsBus.connect(settings, user="gateway", name="gateway")
        config = (await jetstream(bus.client).stream_info(events_stream(""))).config
        await bus.close()
        assert (config.max_age, config.max_bytes) == (days * 24 * 3600, size_bytes)
