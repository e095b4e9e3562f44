"""Whether NATS stores what is written is seen by the writer, and told."""

import asyncio
import json
from pathlib import Path

import pytest

from pilotlight.cli.embedded import NatsServer
from pilotlight.cli.nats_health import write_error
from pilotlight.cli.system import free_port
from pilotlight.common.buckets import HEALTH
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import ADMIN, StreamSettings, ensure_streams, server_config
from pilotlight.common.settings import BusSettings
from pilotlight.common.testing import until
from pilotlight.common.waiting import cancel_all

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DEADLINE_S = 30.0
PASSWORDS = {ADMIN: "a", "gateway": "b"}


def secrets_of(folder: Path) -> Path:
    for user, password in PASSWORDS.items():
        (folder / f"nats-{user}").write_text(password)
    return folder


async def test_a_server_without_room_is_told_of_until_it_has_some(tmp_path: Path) -> None:
    """As one is that was started on a full disk without a limit of its own: it answers, and refuses
    every write.
    """
    port = free_port()
    narrow = NatsServer(tmp_path / "nats", port, server_config(PASSWORDS, store_bytes=1))
    wide = NatsServer(tmp_path / "nats", port, server_config(PASSWORDS))
    settings = BusSettings(nats_url=wide.url, secrets_dir=secrets_of(tmp_path))
    await wide.start()
    await ensure_streams(
        StreamSettings(nats_url=wide.url, secrets_dir=tmp_path, events_bytes=1 << 20)
    )
    bus = await NatsBus.connect(settings, user="gateway", name="gateway")
    # Something is stored, so that the server has no room when it may store less.
    await (await bus.bucket(HEALTH)).put("gateway", None)
    checking = asyncio.create_task(bus.check_writes())
    try:
        await wide.stop()
        await narrow.start()
        await until(lambda: bus.unwritable, deadline_s=DEADLINE_S)
        assert "insufficient resources" in (bus.unwritable or "")
        assert bus.connected
        assert "insufficient resources" in (await write_error(narrow.url, PASSWORDS[ADMIN]) or "")
        await narrow.stop()
        await wide.start()
        await until(lambda: bus.connected and bus.unwritable is None, deadline_s=DEADLINE_S)
        assert await write_error(wide.url, PASSWORDS[ADMIN]) is None
    finally:
        await cancel_all((checking,))
        await bus.close()
        await narrow.stop()
        await wide.stop()


async def test_users_of_an_earlier_release_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    config = json.loads(server_config(PASSWORDS))
    for user in config["authorization"]["users"]:
        if "permissions" in user:
            allowed = user["permissions"]["publish"]
            allowed["allow"] = [subject for subject in allowed["allow"] if HEALTH not in subject]
    server = NatsServer(tmp_path / "nats", free_port(), json.dumps(config))
    await server.start()
    try:
        settings = BusSettings(nats_url=server.url, secrets_dir=secrets_of(tmp_path))
        bus = await NatsBus.connect(settings, user="gateway", name="gateway")
        async with asyncio.timeout(DEADLINE_S):
            await bus.check_writes()
        assert bus.unwritable is None
        await bus.close()
    finally:
        await server.stop()
