"""What keys and projects have used of their budgets, on a real PostgreSQL."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from sqlalchemy import Insert, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import STATEMENT_TIMEOUT_S, Database
from pilotlight.common.testing import MakeContext
from pilotlight.gateway.admin.testing import AdminWorld, admin_world
from pilotlight.gateway.limits import budgets
from pilotlight.gateway.limits.budgets import READ_S, SETTLING_LOOKS, BudgetBook
from pilotlight.gateway.records.usage import IDLE_S
from pilotlight.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(
    make_context: MakeContext, emptied_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AdminWorld]:
    """A gateway that nobody has used."""
    monkeypatch.setattr(budgets, "LEARN_DEADLINE_S", 60.0)
    async with admin_world(make_context("gateway", emptied_settings)) as made:
        async with made.database.unit_of_work() as work:
            await work.connection.execute(delete(tables.usage))
        yield made


class Calendar(SystemClock):
    """A clock just before a month begins."""

    now = datetime(2031, 1, 31, 23, 59, 59, tzinfo=UTC)

    def wall(self) -> datetime:
        return self.now


async def make(world: AdminWorld) -> str:
    """A new key's id."""
    answer = await world.http.post("/keys", json={"label": "one"})
    assert answer.status_code == 201, answer.text
    return answer.json()["key_id"]


def row_of(key_id: str, at: datetime, tokens: int) -> Insert:
    return insert(tables.usage).values(
        at=at,
        model="fox",
        key_id=key_id,
        request_id=f"{key_id}-{at}",
        prompt_tokens=tokens - 1,
        output_tokens=1,
        status="ok",
    )


async def store(world: AdminWorld, key_id: str, at: datetime, tokens: int) -> None:
    async with world.database.unit_of_work() as work:
        await work.connection.execute(row_of(key_id, at, tokens))


async def test_budgets_are_what_usage_says(world: AdminWorld) -> None:
    """Of this month, of the key and of all keys of its project, and what runs besides."""
    clock, one, other = world.context.clock, await make(world), await make(world)
    now = clock.wall()
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    key, project = f"key/{one}", "project/default/default"
    book = BudgetBook(world.database, clock, world.context.background)
    await store(world, one, month, 100)
    await store(world, one, month - timedelta(minutes=1), 5000)
    await store(world, other, now, 30)
    assert not book.knows(key)
    for subject in (key, project):
        await book.learn(subject)
    assert (book.used(key), book.used(project)) == (100, 130)
    book.begin(key, 50)
    assert book.used(key) == 150
    book.end(key, 50, 7)
    assert book.used(key) == 107
    # Its row is written; it does not count twice.
    await store(world, one, now, 7)
    await book.read()
    await book.read()
    assert (book.used(key), book.used(project)) == (107, 137)


async def test_a_budget_begins_anew_with_the_month(world: AdminWorld) -> None:
    calendar = Calendar()
    book = BudgetBook(world.database, calendar, world.context.background)
    await store(world, "key-1", calendar.now, 10)
    await book.learn("key/key-1")
    assert book.used("key/key-1") == 10
    calendar.now = datetime(2031, 2, 1, tzinfo=UTC)
    assert book.used("key/key-1") == 0
    await book.read()
    assert book.used("key/key-1") == 0


async def test_a_row_that_is_committed_after_later_ones_is_counted(world: AdminWorld) -> None:
    clock = world.context.clock
    book = BudgetBook(world.database, clock, world.context.background)
    await book.learn("key/one")
    await book.learn("key/two")
    async with world.database.unit_of_work() as work:
        await work.connection.execute(row_of("one", clock.wall(), 3))
        await store(world, "two", clock.wall(), 40)
        for _ in range(SETTLING_LOOKS):
            await book.read()
        assert (book.used("key/one"), book.used("key/two")) == (0, 40)
    for _ in range(2 * SETTLING_LOOKS):
        await book.read()
        assert (book.used("key/one"), book.used("key/two")) == (3, 40)


async def test_what_is_settled_is_not_added_up_again(world: AdminWorld) -> None:
    """Nor missed, where retention has deleted it."""
    clock = world.context.clock
    book = BudgetBook(world.database, clock, world.context.background)
    await book.learn("key/one")
    await store(world, "one", clock.wall(), 30)
    for _ in range(SETTLING_LOOKS + 1):
        await book.read()
    async with world.database.unit_of_work() as work:
        await work.connection.execute(delete(tables.usage))
    await store(world, "one", clock.wall(), 4)
    await book.read()
    assert book.used("key/one") == 34


def test_whoever_drew_a_number_has_ended_when_it_is_settled() -> None:
    assert SETTLING_LOOKS * READ_S > 2 * STATEMENT_TIMEOUT_S + IDLE_S


async def test_a_month_is_added_up_again_when_it_begins(world: AdminWorld) -> None:
    """Its rows may have been settled before this gateway was asked for the new month."""

    calendar = Calendar()
    book = BudgetBook(world.database, calendar, world.context.background)
    await book.learn("key/one")
    await store(world, "one", datetime(2031, 2, 1, tzinfo=UTC), 10)
    await store(world, "one", calendar.now, 500)
    for _ in range(SETTLING_LOOKS + 2):
        await book.read()
    calendar.now = datetime(2031, 2, 1, 0, 0, 1, tzinfo=UTC)
    assert book.used("key/one") == 0
    await book.read()
    assert book.used("key/one") == 10


@pytest.mark.parametrize("begins", ["behind", "before"])
async def test_a_book_that_does_not_fit_its_rows_begins_anew(
    world: AdminWorld, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """After a time without the database, or with one that went back to an earlier state."""
    clock = world.context.clock
    book = BudgetBook(world.database, clock, world.context.background)
    await store(world, "one", clock.wall(), 30)
    await book.learn("key/one")
    for _ in range(SETTLING_LOOKS + 1):
        await book.read()
    if begins == "behind":
        monkeypatch.setattr(budgets, "MOST_BEHIND_IDS", 1)
        for _ in range(3):
            await store(world, "one", clock.wall(), 2)
        said = 36
    else:
        async with world.database.unit_of_work() as work:
            await work.connection.execute(delete(tables.usage))
        said = 0
    await book.read()
    assert book.used("key/one") == said
    await store(world, "one", clock.wall(), 1)
    for _ in range(SETTLING_LOOKS + 2):
        await book.read()
        assert book.used("key/one") == said + 1


class Gated:
    """A database of which one reading is held up until the next one has ended."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.hold = False
        self.held, self.gate = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[AsyncConnection]:
        hold, self.hold = self.hold, False
        async with self._database.reading() as connection:
            yield connection
        if hold:
            self.held.set()
            await self.gate.wait()


@pytest.mark.parametrize("held", ["read", "learn"])
async def test_a_subject_is_met_while_the_settled_row_moves(world: AdminWorld, held: str) -> None:
    clock = world.context.clock
    gated = Gated(world.database)
    book = BudgetBook(cast("Database", gated), clock, world.context.background)
    await book.learn("key/one")
    await store(world, "two", clock.wall(), 7)
    for _ in range(SETTLING_LOOKS):
        await book.read()
    doing = {"read": book.read, "learn": lambda: book.learn("key/two")}
    gated.hold = True
    first = asyncio.create_task(doing.pop(held)())
    await gated.held.wait()
    (second,) = doing.values()
    await second()
    gated.gate.set()
    await first
    for _ in range(SETTLING_LOOKS + 2):
        assert book.used("key/two") == 7
        await book.read()


@pytest.mark.parametrize("seed", range(3))
async def test_a_book_says_what_the_rows_say_whatever_comes_between(
    world: AdminWorld, seed: int
) -> None:
    """Subjects are met while others are followed, and rows are written while both go on."""
    rng, clock = random.Random(seed), world.context.clock
    keys = [await make(world) for _ in range(3)]
    subjects = [*(f"key/{key_id}" for key_id in keys), "project/default/default"]
    writers = [*keys, "a key that is not there"]
    book = BudgetBook(world.database, clock, world.context.background)
    met = set[str]()
    for _ in range(40):
        doing = [store(world, rng.choice(writers), clock.wall(), rng.randrange(1, 99))]
        if rng.random() < 0.7:
            doing.append(book.read())
        if rng.random() < 0.3:
            subject = rng.choice(subjects)
            met.add(subject)
            doing.append(book.learn(subject))
        rng.shuffle(doing)
        await asyncio.gather(*doing)
        await book.read()
        async with world.database.reading() as connection:
            rows = (await connection.execute(select(tables.usage))).all()
        for subject in met:
            kind, _, name = subject.partition("/")
            said = sum(
                row.prompt_tokens + row.output_tokens
                for row in rows
                if (row.key_id in keys if kind == "project" else row.key_id == name)
            )
            assert book.used(subject) == said
    assert met
