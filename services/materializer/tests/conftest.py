"""A materializer that runs."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from builds_rig import MODEL, Rig
from sqlalchemy import URL, create_engine, delete, insert, text
from sqlalchemy.pool import NullPool

from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.service import Application, Context
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.materializer.app import build
from pilotlight.materializer.coordination import Upkeep
from pilotlight.materializer.settings import MaterializerSettings

Running = Callable[[], AbstractAsyncContextManager[tuple[Context, Application]]]


@pytest.fixture
def running(
    make_context: MakeContext, database_settings: DatabaseSettingsOf, tmp_path: Path
) -> Running:
    """Starts one, and stops it at the end; its upkeep comes when it is told to."""

    @asynccontextmanager
    async def run() -> AsyncIterator[tuple[Context, Application]]:
        (tmp_path / "cluster-key").write_text("the cluster's key")
        settings = MaterializerSettings(
            database_url=database_settings("materializer").database_url,
            secrets_dir=tmp_path,
            artifact_upkeep_interval_s=3600.0,
        )
        context = make_context("materializer", settings)
        application = await build(context)
        for component in application.components:
            await component.start()
        yield context, application
        for component in reversed(application.components):
            await component.stop()

    return run


@pytest.fixture
def owner(module_database: URL) -> Any:
    """The database, as its owner."""
    engine = create_engine(module_database, poolclass=NullPool)
    with engine.begin() as connection:
        names = ("artifacts", "builds", "wants", "profiles", "outbox")
        connection.execute(text("TRUNCATE " + ", ".join(f"materializer.{one}" for one in names)))
        connection.execute(delete(tables.models))
        connection.execute(
            insert(tables.models).values(
                name=MODEL.name,
                digest=MODEL.digest,
                body=to_row_json(MODEL),
                created_at=text("now()"),
                updated_at=text("now()"),
            )
        )
    yield engine
    engine.dispose()


@pytest.fixture
async def rig(running: Any, owner: Any) -> AsyncIterator[Rig]:
    async with running() as (context, application):
        (database,) = [one for one in application.components if isinstance(one, Database)]
        (upkeep,) = [one for one in application.components if isinstance(one, Upkeep)]
        yield Rig(bus=context.bus, store=context.store, database=database, upkeep=upkeep)
