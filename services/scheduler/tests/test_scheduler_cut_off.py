"""A scheduler process that NATS is taken from, and that takes the lease all the same."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from resetting_server import Door
from sqlalchemy import func, literal, select, update

from pilotlight.common.buckets import LEADER
from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.messages.hold import LEADING_KEY, Leading
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.settings import BusSettings, DatabaseSettings
from pilotlight.common.testing import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

DEADLINE_S = 60.0
PREFIX = "cut-off."


async def test_a_lease_taken_while_nats_is_away_ends_nothing(
    nats_url: str, database_settings: Callable[[str], DatabaseSettings], tmp_path: Path
) -> None:
    door = Door(urlsplit(nats_url).port or 0)
    settings = database_settings("scheduler")
    database = Database(settings, "scheduler", SystemClock())
    await database.start()
    bus = await NatsBus.connect(
        BusSettings(nats_url=nats_url, prefix=PREFIX), user="test", name="test"
    )
    leader = await bus.bucket(LEADER)

    async def lease() -> tuple[str, int]:
        async with database.unit_of_work() as work:
            row = (
                await work.connection.execute(select(tables.lease.c.holder, tables.lease.c.epoch))
            ).one_or_none()
        return (row.holder, row.epoch) if row is not None else ("", 0)

    async def led() -> int:
        found = await leader.get(LEADING_KEY, Leading)
        return found.value.epoch if found.value is not None else 0

    environment = {
        **os.environ,
        "PILOTLIGHT_NATS_URL": f"nats://127.0.0.1:{door.port}",
        "PILOTLIGHT_PREFIX": PREFIX,
        "PILOTLIGHT_DATABASE_URL": settings.database_url,
        "PILOTLIGHT_RUN_DIR": str(tmp_path / "run"),
        "PILOTLIGHT_OBJECT_STORE_URL": (tmp_path / "objects").as_uri(),
    }
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pilotlight.scheduler", env=environment, stdout=log, stderr=log
        )
    try:
        await until(led, deadline_s=DEADLINE_S)
        door.shut()
        # Another takes the lease and is gone: the process has it again while it cannot be heard.
        expiry = func.clock_timestamp() + literal(timedelta(seconds=1.0))
        async with database.unit_of_work() as work:
            taken = update(tables.lease).values(
                holder="another", epoch=tables.lease.c.epoch + 1, expires_at=expiry
            )
            await work.connection.execute(taken)
        (_, others) = await lease()

        async def retaken() -> bool:
            holder, epoch = await lease()
            # More than once: it does not lead for the first time it tries.
            return process.returncode is not None or (holder != "another" and epoch > others + 1)

        await until(retaken, deadline_s=DEADLINE_S)
        assert process.returncode is None, (tmp_path / "log").read_text()
        door.open()

        async def announced() -> bool:
            return await led() > others

        await until(announced, deadline_s=DEADLINE_S)
        assert process.returncode is None
        door.shut()
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.returncode is not None, deadline_s=DEADLINE_S)
        assert process.returncode == 0, (tmp_path / "log").read_text()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        door.close()
        await bus.close()
        await database.stop()
