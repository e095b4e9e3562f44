"""What a gateway keeps in its schema beside models and keys: its view of the models, usage,
spans.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import URL, select
from structlog.testing import capture_logs

from pilotlight.common.db import tables
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.session import Database, UnitOfWork
from pilotlight.common.errors import ControlPlaneUnavailable, DatabaseUnavailable
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch, SpanRecord
from pilotlight.common.store import text_key
from pilotlight.common.testing import until
from pilotlight.gateway.admin.testing import (
    AdminWorld,
    checkpoint_files,
    database_away,
    write_folder,
)
from pilotlight.gateway.models.catalog import Catalog
from pilotlight.gateway.records import spans as span_module
from pilotlight.gateway.records import usage as usage_module
from pilotlight.gateway.records.spans import MAX_ATTRIBUTES_BYTES, SpanStore
from pilotlight.gateway.records.usage import UsageRecorder
from pilotlight.gateway.testing import RESERVED_HELPERS
from pilotlight.gateway.texts.texts import build_texts

pytestmark = pytest.mark.anyio
TRACE = "ab" * 16
NOW_S = datetime.now(UTC).timestamp()


@pytest.fixture
def world(fresh_admin: AdminWorld) -> AdminWorld:
    return fresh_admin


# The view of the models.


@pytest.fixture
async def other(world: AdminWorld) -> AsyncIterator[Catalog]:
    """The view of another gateway, which hears of changes but does not look by itself."""
    texts = build_texts(world.context, RESERVED_HELPERS)
    await texts.start()
    catalog = Catalog(world.database, world.context, texts, refresh_interval_s=3600)
    await catalog.start()
    await catalog.start()
    yield catalog
    await catalog.stop()
    await catalog.stop()
    await texts.stop()


async def test_a_change_by_another_gateway_is_heard(world: AdminWorld, other: Catalog) -> None:
    outbox = Outbox(world.database, world.context)
    await outbox.start()
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    await until(lambda: other.names() == ("tiny",))
    await world.http.patch("/models/tiny", json={"pinned": True})
    await until(lambda: (entry := other.get("tiny")) is not None and entry.model.pinned)
    await world.http.delete("/models/tiny")
    await until(lambda: other.names() == ())
    await outbox.stop()


async def test_a_model_that_another_gateway_registered_is_found_at_once(
    world: AdminWorld, other: Catalog
) -> None:
    """The client has its 201: whichever gateway gets the request, it knows the model, before any
    event.
    """
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    assert other.get("tiny") is None
    found = await other.find("tiny")
    assert found is not None
    assert found.model.name == "tiny"
    assert other.get("tiny") is not None
    for unknown in ("nobody", "no\0body", "n" * 10_000):
        assert await other.find(unknown) is None


async def test_a_model_that_may_be_registered_elsewhere_is_not_denied(
    world: AdminWorld, other: Catalog, module_database: URL
) -> None:
    """A client does not ask again for what is not there: that is said only by a database that
    answers.
    """
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    with database_away(module_database), pytest.raises(ControlPlaneUnavailable, match="tiny"):
        await other.find("tiny")
    with database_away(module_database):
        # What cannot be a name is known without the database.
        for wrong in ("é" * 40, "a b", "../../etc", "tiny\n", "a" * 129):
            assert await other.find(wrong) is None
    assert await other.find("tiny") is not None


async def test_a_change_that_nobody_told_of_is_found(world: AdminWorld) -> None:
    catalog = Catalog(world.database, world.context, world.texts, refresh_interval_s=0.01)
    await catalog.start()
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    await until(lambda: catalog.names() == ("tiny",))
    await catalog.stop()


async def test_the_view_outlives_the_database_and_follows_again(
    world: AdminWorld, module_database: URL
) -> None:
    await world.register(write_folder(world.models / "tiny", checkpoint_files()))
    catalog = Catalog(world.database, world.context, world.texts, refresh_interval_s=0.01)
    await catalog.start()
    with capture_logs() as logs, database_away(module_database):
        await until(lambda: any(line.get("action") == "catalog_deferred" for line in logs))
        assert catalog.names() == ("tiny",)
    await world.http.delete("/models/tiny")
    await until(lambda: catalog.names() == ())
    await catalog.stop()


async def test_one_models_missing_text_hides_no_other(world: AdminWorld, other: Catalog) -> None:
    folder = write_folder(world.models / "tiny", checkpoint_files())
    await world.register(folder)
    broken = write_folder(
        world.models / "broken",
        {**checkpoint_files(), "tokenizer_config.json": b'{"chat_template": "x"}'},
    )
    key = text_key((await world.register(broken, "broken")).json()["text_digest"])
    bundle = await world.context.store.get(key)
    await world.context.store.delete(key)
    await other.refresh()
    assert other.names() == ("tiny",)
    await world.context.store.put_if_absent(key, bundle)
    await other.refresh()
    assert other.names() == ("broken", "tiny")


# Usage.


def _record(usage: UsageRecorder, number: int) -> None:
    usage.record(
        model="m",
        key_id="k",
        request_id=f"r{number}",
        prompt_tokens=1,
        output_tokens=2,
        status="ok",
    )


async def _requests(database: Database) -> list[str]:
    async with database.reading() as connection:
        return list(
            (
                await connection.execute(
                    select(tables.usage.c.request_id).order_by(tables.usage.c.id)
                )
            ).scalars()
        )


async def test_usage_is_written_in_order_at_the_latest_at_stop(world: AdminWorld) -> None:
    usage = UsageRecorder(world.database, world.context.clock, world.context.background)
    await usage.start()
    for number in range(3):
        _record(usage, number)
    await usage.stop()
    await usage.stop()
    assert await _requests(world.database) == ["r0", "r1", "r2"]


async def test_usage_survives_an_outage(
    world: AdminWorld, module_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(usage_module, "MAX_BATCH_ROWS", 2)
    usage = UsageRecorder(world.database, world.context.clock, world.context.background)
    with capture_logs() as logs, database_away(module_database):
        await usage.start()
        for number in range(5):
            _record(usage, number)
        await until(lambda: any(line.get("action") == "usage_deferred" for line in logs))
        _record(usage, 5)

    async def written() -> bool:
        return await _requests(world.database) == [f"r{number}" for number in range(6)]

    await until(written)
    await usage.stop()
    assert await _requests(world.database) == [f"r{number}" for number in range(6)]


class LosesAnswers:
    """A database that commits, and whose word of it is lost, as when it is killed at that
    moment.
    """

    def __init__(self, database: Database, times: int) -> None:
        self._database = database
        self._times = times

    @asynccontextmanager
    async def unit_of_work(self) -> AsyncGenerator[UnitOfWork]:
        async with self._database.unit_of_work() as work:
            yield work
        if self._times > 0:
            self._times -= 1
            raise DatabaseUnavailable("the answer was lost")


async def test_usage_is_written_once_when_an_answer_is_lost(world: AdminWorld) -> None:
    losing: Any = LosesAnswers(world.database, times=2)
    usage = UsageRecorder(losing, world.context.clock, world.context.background)
    for number in range(2):
        _record(usage, number)
        # Written, and not known to be: the next one goes out together with it.
        await usage.stop()
    assert await _requests(world.database) == ["r0", "r1"]
    _record(usage, 2)
    await usage.stop()
    await usage.stop()
    assert await _requests(world.database) == ["r0", "r1", "r2"]


async def test_usage_is_bounded_and_says_what_it_lost(
    world: AdminWorld, module_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "MAX_BUFFERED_ROWS", 4)
    usage = UsageRecorder(world.database, world.context.clock, world.context.background)
    with database_away(module_database):
        for number in range(7):
            _record(usage, number)
        await usage.stop()
    with capture_logs() as logs:
        await usage.stop()
    assert await _requests(world.database) == ["r3", "r4", "r5", "r6"]
    assert [(line["action"], line["rows"]) for line in logs] == [("usage_dropped", 3)]


async def test_stopping_does_not_cut_off_a_batch(
    world: AdminWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "FLUSH_INTERVAL_S", 0.0)
    usage = UsageRecorder(world.database, world.context.clock, world.context.background)
    await usage.start()
    for number in range(200):
        _record(usage, number)
        if number % 20 == 0:
            await asyncio.sleep(0)
    await usage.stop()
    assert await _requests(world.database) == [f"r{number}" for number in range(200)]


# Spans.


def span(number: int, **changes: object) -> SpanRecord:
    values: dict[str, object] = {
        "trace_id": TRACE,
        "span_id": f"{number:016x}",
        "name": f"span {number}",
        "service": "worker",
        "start_at_s": NOW_S + number,
        "end_at_s": NOW_S + number + 0.5,
    }
    return SpanRecord(**{**values, **changes})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are written as soon as they are there."""
    monkeypatch.setattr(span_module, "FLUSH_INTERVAL_S", 0.005)


async def _store(world: AdminWorld, *spans: SpanRecord, kept: int) -> SpanStore:
    """Send one batch, of which a number is kept, and return the store, stopped."""
    store = SpanStore(world.database, world.context)
    await store.start()
    await store.start()
    await world.context.bus.publish(SPANS_SUBJECT, SpanBatch(spans=spans))

    async def written() -> bool:
        return len(await _span_ids(world)) == kept

    await until(written)
    await store.stop()
    return store


async def _span_ids(world: AdminWorld) -> list[int]:
    async with world.database.reading() as connection:
        found = await connection.execute(
            select(tables.spans.c.span_id).order_by(tables.spans.c.span_id)
        )
        return [int(span_id, 16) for span_id in found.scalars()]


@pytest.mark.usefixtures("quick")
async def test_spans_are_found_by_their_trace(world: AdminWorld) -> None:
    await _store(
        world,
        span(2, parent_id=f"{1:016x}", attributes={"tokens": 3}, status="worker_lost"),
        span(1),
        span(1),
        span(3, trace_id="cd" * 16),
        kept=3,
    )
    trace = (await world.http.get(f"/traces/{TRACE}")).json()
    assert [found["name"] for found in trace["spans"]] == ["span 1", "span 2"]
    assert trace["cold_starts"] == []
    found = trace["spans"][1]
    assert (found["parent_id"], found["status"], found["attributes"]) == (
        f"{1:016x}",
        "worker_lost",
        {"tokens": 3},
    )
    assert datetime.fromisoformat(found["end_at"]).timestamp() == pytest.approx(
        NOW_S + 2.5, abs=1e-3
    )


@pytest.mark.usefixtures("quick")
async def test_odd_spans_cost_no_others(world: AdminWorld) -> None:
    with capture_logs() as logs:
        await _store(
            world,
            span(1),
            span(2, start_at_s=1e300),
            span(3, name="a\0b", attributes={"text": "a\0b"}),
            span(4, attributes={"text": "x" * MAX_ATTRIBUTES_BYTES}),
            span(5, name="n" * 10_000),
            span(6, end_at_s=-1e18),
            kept=4,
        )
    assert [line["spans"] for line in logs if line["action"] == "spans_dropped"] == [2]
    trace = (await world.http.get(f"/traces/{TRACE}")).json()["spans"]
    assert [found["span_id"][-1] for found in trace] == ["1", "3", "4", "5"]
    assert trace[1]["name"] == "ab"
    assert "dropped" in trace[1]["attributes"]
    assert "dropped" in trace[2]["attributes"]
    assert len(trace[3]["name"]) <= 300


@pytest.mark.usefixtures("quick")
async def test_spans_that_come_too_fast_are_dropped(
    world: AdminWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_module, "MAX_BUFFERED_SPANS", 3)
    with capture_logs() as logs:
        await _store(world, *(span(number) for number in range(5)), kept=3)
    assert await _span_ids(world) == [0, 1, 2]
    assert [line["spans"] for line in logs if line["action"] == "spans_dropped"] == [2]


@pytest.mark.usefixtures("quick")
async def test_spans_are_dropped_while_the_database_is_away(
    world: AdminWorld, module_database: URL
) -> None:
    store = SpanStore(world.database, world.context)
    await store.start()
    with capture_logs() as logs, database_away(module_database):
        await world.context.bus.publish(SPANS_SUBJECT, SpanBatch(spans=(span(1),)))
        await until(lambda: any(line.get("action") == "spans_dropped" for line in logs))
    await store.stop()
    await _store(world, span(2), kept=1)
    assert await _span_ids(world) == [2]
