"""Single records and what happened lately, over the admin API and as the pages list them."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, delete, insert
from sqlalchemy.pool import NullPool

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.testing import MakeContext
from pilotlight.gateway.admin.testing import AdminWorld, admin_world
from pilotlight.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio


class Rows:
    """Writes what other services write, as the database's owner."""

    def __init__(self, url: URL, clock: ManualClock) -> None:
        self._engine = create_engine(url, poolclass=NullPool)
        self.now = clock.wall()
        for table in (tables.cold_starts, tables.decisions, tables.evictions):
            self._run(delete(table))

    def cold_start(self, name: str, *, ago_s: float = 0.0, status: str = "done") -> None:
        at = self.now - timedelta(seconds=ago_s)
        self._run(
            insert(tables.cold_starts).values(
                instance_id=name,
                model="m",
                decision_id="dec-0",
                trace_id="t" * 32,
                status=status,
                demand_seen_at=at,
                phases=[],
                created_at=at,
            )
        )

    def decision(self, name: str, *, ago_s: float = 0.0) -> None:
        self._run(
            insert(tables.decisions).values(
                decision_id=name,
                kind="cold_start",
                model="m",
                epoch=1,
                at=self.now - timedelta(seconds=ago_s),
                inputs={"large": 1},
                outcome={"scheme": None},
                reasons=["1 request waits"],
            )
        )

    def eviction(self, subject: str, model: str = "m") -> None:
        self._run(
            insert(tables.evictions).values(
                at=self.now,
                kind="copy",
                subject=subject,
                node_id="n",
                reason="room",
                inputs={"model": model},
            )
        )

    def usage(self, status: str, *, ago_s: float, model: str = "m") -> None:
        self._run(
            insert(tables.usage).values(
                at=self.now - timedelta(seconds=ago_s),
                model=model,
                key_id="key",
                request_id="req",
                prompt_tokens=3,
                output_tokens=5,
                status=status,
            )
        )

    def _run(self, statement: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(statement)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings, clock: ManualClock
) -> AsyncIterator[AdminWorld]:
    async with admin_world(make_context("gateway", emptied_settings, clock=clock)) as made:
        yield made


@pytest.fixture
def rows(world: AdminWorld, module_database: URL, clock: ManualClock) -> Rows:
    return Rows(module_database, clock)


async def test_one_record_is_shown_whole(world: AdminWorld, rows: Rows) -> None:
    rows.cold_start("inst-1", status="open")
    rows.decision("dec-1")
    start = (await world.http.get("/cold-starts/inst-1")).json()
    assert (start["status"], start["phases"], start["ttft_s"]) == ("open", [], None)
    decision = (await world.http.get("/decisions/dec-1")).json()
    assert (decision["inputs"], decision["reasons"]) == ({"large": 1}, ["1 request waits"])
    for path in ("/cold-starts/inst-2", "/decisions/dec-2"):
        answer = await world.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_requests_are_counted_by_the_minute(world: AdminWorld, rows: Rows) -> None:
    for status, ago_s in (("ok", 1), ("cancelled", 1), ("worker_lost", 1), ("ok", 600)):
        rows.usage(status, ago_s=ago_s)
    rows.usage("ok", ago_s=1, model="other")
    rows.usage("ok", ago_s=4000)
    minutes = (await world.http.get("/activity?model=m")).json()["minutes"]
    assert [(one["requests"], one["failed"]) for one in minutes] == [(1, 0), (3, 1)]
    assert (minutes[1]["prompt_tokens"], minutes[1]["output_tokens"]) == (9, 15)
    everything = (await world.http.get("/activity?minutes=120")).json()["minutes"]
    assert sum(one["requests"] for one in everything) == 6
    assert (await world.http.get("/activity?minutes=0")).status_code == 422


async def test_evictions_are_listed_page_by_page(world: AdminWorld, rows: Rows) -> None:
    for number in range(5):
        rows.eviction(f"copy-{number}")
    first = (await world.http.get("/evictions?limit=3")).json()
    assert [one["subject"] for one in first["evictions"]] == ["copy-4", "copy-3", "copy-2"]
    rest = (await world.http.get(f"/evictions?limit=3&before={first['next_before']}")).json()
    assert [one["subject"] for one in rest["evictions"]] == ["copy-1", "copy-0"]
    assert rest["next_before"] is None


async def test_evictions_of_one_model_say_why_it_went(world: AdminWorld, rows: Rows) -> None:
    for model in ("m", "org/name", "m"):
        rows.eviction(f"copy-of-{model}", model=model)
    found = (await world.http.get("/evictions?model=org/name")).json()["evictions"]
    assert [(one["subject"], one["inputs"]["model"]) for one in found] == [
        ("copy-of-org/name", "org/name")
    ]
    assert (await world.http.get("/evictions?model=none")).json()["evictions"] == []
    assert (await world.http.get("/evictions?model=a%20b")).status_code == 422


async def test_decisions_are_listed_page_by_page_without_their_inputs(
    world: AdminWorld, rows: Rows
) -> None:
    # Two of one moment: their order is by id, and none is lost between two pages.
    for name, ago_s in (("dec-a", 9), ("dec-b", 5), ("dec-c", 5), ("dec-d", 1)):
        rows.decision(name, ago_s=ago_s)
    recent = world.parts.recent
    first = await recent.decisions(2, None)
    assert [one["decision_id"] for one in first] == ["dec-d", "dec-c"]
    assert [one["decision_id"] for one in await recent.decisions(2, "dec-c")] == ["dec-b", "dec-a"]
    assert "inputs" not in first[0]
    assert await recent.decisions(2, "none") == []


async def test_the_newest_cold_starts_come_without_phases(world: AdminWorld, rows: Rows) -> None:
    for number in range(3):
        rows.cold_start(f"inst-{number}", ago_s=10 - number)
    found = await world.parts.recent.cold_starts()
    assert [row.key for row in found] == ["inst-2", "inst-1", "inst-0"]
    assert (found[0].status, found[0].ttft_s, found[0].finished_at) == ("done", None, None)


async def test_a_request_without_a_trace_is_not_found(world: AdminWorld) -> None:
    answer = await world.http.get("/traces?request_id=req-none")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "trace_not_found")
    assert (await world.http.get("/traces")).status_code == 422


async def test_the_stream_names_its_topics(world: AdminWorld) -> None:
    for query in ("", "?topic=", "?topic=secrets", "?topic=nodes" + "&topic=nodes" * 6):
        assert (await world.http.get(f"/stream{query}")).status_code == 422, query
