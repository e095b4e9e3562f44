"""How often rows of usage are written."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import func, select

from pilotlight.common.db import tables
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.testing import until
from pilotlight.gateway.admin.testing import AdminWorld
from pilotlight.gateway.records import usage as usage_module
from pilotlight.gateway.records.usage import UsageRecorder

pytestmark = pytest.mark.anyio


def _record(usage: UsageRecorder, number: int) -> None:
    usage.record(
        model="m",
        key_id="k",
        request_id=f"r{number}",
        prompt_tokens=1,
        output_tokens=2,
        status="ok",
    )


class RecordsMore:
    """A database during whose next transactions other requests end, one in each."""

    def __init__(self, database: Database, did: list[str]) -> None:
        self._database, self._did = database, did
        self.left = 5
        self.usage: UsageRecorder

    @asynccontextmanager
    async def unit_of_work(self) -> AsyncGenerator[UnitOfWork]:
        self._did.append("write")
        if self.left:
            self.left -= 1
            _record(self.usage, self.left)
        async with self._database.unit_of_work() as work:
            yield work


async def test_usage_that_comes_meanwhile_waits_for_the_next_time_but_not_at_the_end(
    fresh_admin: AdminWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    async def short_pause(_: float) -> None:
        did.append("pause")
        await asyncio.sleep(0)

    monkeypatch.setattr(usage_module, "pause", short_pause)
    busy: Any = RecordsMore(fresh_admin.database, did)
    usage = busy.usage = UsageRecorder(
        busy, fresh_admin.context.clock, fresh_admin.context.background
    )
    _record(usage, 9)
    await usage.start()
    await until(lambda: did.count("write") == 6)
    assert ("write", "write") not in pairwise(did)
    busy.left = 2
    _record(usage, 9)
    await usage.stop()
    async with fresh_admin.database.reading() as connection:
        rows = await connection.execute(select(func.count()).select_from(tables.usage))
    assert rows.scalar_one() == 9
