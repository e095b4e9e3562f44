"""How many requests kept their model's SLO: counted by gateways, written by the minute, told."""

from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import URL

from pilotlight.common.clock import ManualClock
from pilotlight.gateway.admin.testing import AdminWorld, database_away
from pilotlight.gateway.records import attainment
from pilotlight.gateway.records.attainment import Attainment
from pilotlight.gateway.schema.attained import Attained
from pilotlight.gateway.serving.testing import entries_of

NAMES = ("first_tokens", "first_tokens_met", "answers", "answers_met")


class Gateway:
    """One that counts what a test says, and looks at the time when it is told to."""

    def __init__(self, world: AdminWorld, name: str) -> None:
        self.clock = ManualClock(wall=datetime.now(UTC).replace(second=0, microsecond=0))
        self._counted = defaultdict[str, Attained](Attained)
        self.rows = Attainment(
            world.database, self.clock, world.context.background, name, self._take
        )

    def _take(self) -> dict[str, Attained]:
        taken, self._counted = self._counted, defaultdict(Attained)
        return taken

    async def counts(self, model: str, *values: int) -> None:
        self._counted[model].add(Attained(*values))
        await self.rows.start()
        await self.rows.stop()


async def told(world: AdminWorld, model: str) -> list[tuple[int, ...]]:
    answer = await world.http.get("/activity", params={"model": model})
    return [tuple(row[name] for name in NAMES) for row in answer.json()["minutes"]]


@pytest.mark.anyio
async def test_minutes_of_all_gateways_are_summed(fresh_admin: AdminWorld) -> None:
    one, other = Gateway(fresh_admin, "gw-1"), Gateway(fresh_admin, "gw-2")
    for gateway in (one, other):
        gateway.clock.advance(-120)
    await one.counts("fox", 4, 3, 2, 1)
    await one.counts("fox", 1, 1, 0, 0)
    await other.counts("fox", 10, 0, 10, 10)
    await other.counts("owl", 1, 1, 1, 1)
    one.clock.advance(60)
    await one.counts("fox", 7, 7, 7, 0)
    assert await told(fresh_admin, "fox") == [(15, 4, 12, 11), (7, 7, 7, 0)]
    assert await told(fresh_admin, "owl") == [(1, 1, 1, 1)]


@pytest.mark.anyio
async def test_what_the_database_did_not_take_is_written_later_and_once(
    fresh_admin: AdminWorld, module_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(fresh_admin, "gw-1")
    gateway.clock.advance(-60)
    with database_away(module_database):
        await gateway.counts("fox", 1, 0, 1, 0)
        gateway.clock.advance(60)
        await gateway.counts("fox", 2, 2, 0, 0)
    assert await told(fresh_admin, "fox") == []
    await gateway.counts("fox", 1, 0, 0, 0)
    await gateway.counts("owl", 0, 0, 0, 0)
    assert await told(fresh_admin, "fox") == [(1, 0, 1, 0), (3, 2, 0, 0)]
    monkeypatch.setattr(attainment, "MAX_WAITING", 1)
    with database_away(module_database):
        await gateway.counts("fox", 1, 0, 0, 0)
        await gateway.counts("elk", 5, 5, 0, 0)
    await gateway.counts("elk", 0, 0, 0, 0)
    assert await told(fresh_admin, "fox") == [(1, 0, 1, 0), (3, 2, 0, 0)], (
        "the older row is dropped"
    )
    assert await told(fresh_admin, "elk") == [(5, 5, 0, 0)]


@pytest.mark.anyio
async def test_what_requests_count(world: Any) -> None:
    worker = await world.worker("w0")
    asked = {"model": "fox", "messages": [{"role": "user", "content": "hello"}]}

    async def counts(words: str, **more: Any) -> Attained:
        worker.script = lambda submit: entries_of(submit, world.ids(words))
        with suppress(openai.APIStatusError):
            await world.client.chat.completions.create(**asked, **more)
        return world.measures.attained().get("fox", Attained())

    assert await counts("one of many words") == Attained(1, 1, 1, 1)
    assert await counts("one of many words", n=3) == Attained(3, 3, 1, 1)
    # Nothing comes after the first token, or nothing comes at all.
    assert await counts("o", max_tokens=1) == Attained(1, 1, 0, 0)
    assert await counts("x", max_tokens=-1) == Attained()


counted = st.builds(Attained, *(st.integers(0, 100) for _ in NAMES))


@given(st.lists(counted, max_size=8))
def test_counts_are_sums(parts: list[Attained]) -> None:
    whole = Attained()
    for part in parts:
        whole.add(part)
    for name in NAMES:
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)


def test_a_minute_is_where_it_is_looked_at() -> None:
    clock: Any = ManualClock(wall=datetime(2026, 1, 1, 10, 0, 59, tzinfo=UTC))
    counts = {"fox": Attained(1, 1, 1, 1)}
    rows: Any = Attainment(None, clock, None, "gw", lambda: counts)
    rows._take()
    clock.advance(timedelta(seconds=1).total_seconds())
    rows._take()
    assert [(at.minute, model) for at, model in rows._unwritten] == [(0, "fox"), (1, "fox")]
