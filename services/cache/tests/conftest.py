"""A cache on real NATS and PostgreSQL, with a worker and a loader that the test plays."""

from pathlib import Path

import pytest
from sqlalchemy import delete

from pilotlight.cache.app import build
from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.testing import Peers, answers, start, stop
from pilotlight.common.bus import Bus
from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until


@pytest.fixture
async def peers(bus: Bus) -> Peers:
    peers = Peers(bus)
    await peers.start()
    return peers


@pytest.fixture
async def settings(database_settings: DatabaseSettingsOf, tmp_path: Path) -> CacheSettings:
    """The database is the module's; its grants are each test's own."""
    url = database_settings("cache").database_url
    settings = CacheSettings(database_url=url, run_dir=tmp_path, min_residency_s=0.0)
    database = Database(settings, "cache", SystemClock())
    async with database.unit_of_work() as work:
        await work.connection.execute(delete(tables.grants))
    await database.stop()
    return settings


@pytest.fixture
async def cache(settings: CacheSettings, make_context: MakeContext, bus: Bus, peers: Peers):
    application = await build(make_context("cache", settings))
    await start(application)
    await until(lambda: answers(bus))
    yield application
    await stop(application)
