"""A materializer that runs."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pilotlight.common.service import Application, Context
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.materializer.app import build
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
