"""Large answers of the admin API: bounded, page by page, and without stopping the gateway's event
loop.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from time import thread_time
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, insert, text
from sqlalchemy.pool import NullPool

from pilotlight.common.db import tables
from pilotlight.common.waiting import every
from pilotlight.gateway.admin.testing import AdminWorld
from pilotlight.gateway.records.display import MAX_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROWS = 400
NOW = datetime.now(UTC)


@pytest.fixture
def world(fresh_admin: AdminWorld) -> AdminWorld:
    return fresh_admin


@pytest.fixture
def decisions(module_database: URL) -> None:
    worker = {
        "worker_id": "w",
        "held": [{"model": "m" * 20, "stage": [0, 4], "bytes": number} for number in range(10)],
    }
    inputs: dict[str, Any] = {"workers": [worker] * 100}
    engine = create_engine(module_database, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE scheduler.decisions"))
        row = {
            "kind": "cold_start",
            "model": "m",
            "epoch": 1,
            "inputs": inputs,
            "outcome": {},
            "reasons": ["because"],
        }
        for number in range(ROWS):
            values = {**row, "decision_id": f"{number:04}", "at": NOW - timedelta(seconds=number)}
            connection.execute(insert(tables.decisions).values(**values))
    engine.dispose()


async def longest_stall_s(asking: Any) -> tuple[Any, float]:
    """What is asked for, and the longest computation between two turns of the event loop.

    Time without a processor is none.
    """
    longest = 0.0
    task = asyncio.create_task(asking)
    last_s = thread_time()
    async for _ in every(0.001):
        now_s = thread_time()
        longest, last_s = max(longest, now_s - last_s), now_s
        if task.done():
            break
    return task.result(), longest


@pytest.mark.usefixtures("decisions")
async def test_many_decisions_stop_nobody(world: AdminWorld) -> None:
    """These are 24 MB; decoded and encoded on the event loop they stopped it for seconds."""
    answer, stalled_s = await longest_stall_s(world.http.get("/decisions", params={"limit": ROWS}))
    assert answer.status_code == 200
    assert stalled_s < 1.0
    assert len(answer.content) < MAX_BYTES + 2**20
    found = answer.json()
    assert 1 < len(found["decisions"]) < ROWS
    assert found["decisions"][0]["inputs"]["workers"][0]["worker_id"] == "w"
    assert found["decisions"][0]["reasons"] == ["because"]
    assert found["decisions"][0]["at"] == NOW.isoformat()


@pytest.mark.usefixtures("decisions")
async def test_pages_join_without_gap_or_repetition(world: AdminWorld) -> None:
    seen: list[str] = []
    before: str | None = None
    while True:
        parameters = {"limit": 120, "model": "m"} | (
            {"before": before} if before is not None else {}
        )
        page = (await world.http.get("/decisions", params=parameters)).json()
        seen += [one["decision_id"] for one in page["decisions"]]
        before = page["next_before"]
        if before is None:
            break
    assert seen == [f"{number:04}" for number in range(ROWS)]


@pytest.mark.usefixtures("decisions")
async def test_a_page_after_what_is_gone_is_refused(world: AdminWorld) -> None:
    answer = await world.http.get("/decisions", params={"before": "pruned"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "before")
    assert (await world.http.get("/decisions", params={"limit": 3, "model": "other"})).json() == {
        "decisions": [],
        "next_before": None,
    }
    page = (await world.http.get("/decisions", params={"limit": 3})).json()
    assert page["next_before"] == "0002"
