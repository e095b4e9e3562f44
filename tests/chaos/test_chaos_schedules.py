"""Seeded schedules of faults on the bus, and of parts that die, against a whole system: nothing is
lost, nothing is wrong, nothing stays.

``make test-chaos`` goes through 500, ``make test-e2e`` through the first 20. A failure names the
command that runs its schedule again; ``PILOTLIGHT_CHAOS_LOG=1`` adds a line for each schedule,
``PILOTLIGHT_CHAOS_LOG=all`` every service's log.
"""

import asyncio
import os
import random
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import structlog
from chaos_tally import Tally
from faulty_clients import Result, asks_of, run
from faulty_system import HOLD_TIMEOUT_S, MODELS, WORKERS, FaultySystem
from kept_log import kept, recent
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import NullPool
from system_parts import Surroundings
from system_standing import standing_of

from pilotlight.common.clock import SystemClock
from pilotlight.common.db.session import service_url
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.fault_schedule import FaultRates
from pilotlight.common.settings import BusSettings, DatabaseSettings
from pilotlight.common.testing import until
from pilotlight.common.waiting import pause
from pilotlight.gateway.texts.model_text import ModelText, facts_of
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_level_json
from pilotlight.text.tokenizer import TextTokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.chaos]

SEEDS = os.environ.get("PILOTLIGHT_CHAOS_SEEDS", "")
"""One seed, or the first and the last, instead of all."""
FAST = 20
"""Schedules that are part of ``make test-e2e`` as well."""
SCHEDULES = 500
SHARD = 120
"""Schedules of one test: some minutes on a slow machine."""
SYSTEMS = 4
"""That go through schedules at the same time, in one event loop: more would wait for the processor,
not for one another."""
REQUESTS = 6
SPREAD_S = 0.8
STREAM_DEADLINE_S = 20.0
"""For the first token of a schedule."""
REQUEST_DEADLINE_S = HOLD_TIMEOUT_S + 20.0
"""For every request of a schedule to have ended: beyond the time that a request may be held."""
SLOW_S = 45.0
"""A schedule that takes longer stands still: what it waits for is written down, for the case that
it fails."""
EMPTY_DEADLINE_S = 90.0
"""For the system to have let go of everything: beyond the lease of a grant."""
BILLED_DEADLINE_S = 30.0
"""For all rows of usage to be in the database, which a gateway writes behind its answers."""


def shards() -> list[object]:
    """Ranges of seeds, each with its marks."""
    if SEEDS:
        first, _, last = SEEDS.partition("-")
        return [pytest.param(range(int(first), int(last or first) + 1), id=SEEDS)]
    starts = [0, *range(FAST, SCHEDULES, SHARD)]
    ranges = [
        range(start, end) for start, end in zip(starts, [*starts[1:], SCHEDULES], strict=True)
    ]
    return [
        pytest.param(
            seeds, id=f"{seeds[0]}-{seeds[-1]}", marks=[pytest.mark.e2e] if seeds[-1] < FAST else []
        )
        for seeds in ranges
    ]


def rates_of(rng: random.Random) -> FaultRates:
    """How bad this schedule's bus is."""
    return FaultRates(
        lost=rng.choice((0.0, 0.02, 0.1)),
        late=rng.choice((0.0, 0.05, 0.2)),
        twice=rng.choice((0.0, 0.05, 0.2)),
        overtaken=rng.choice((0.0, 0.05, 0.2)),
        max_late_s=rng.choice((0.02, 0.1, 0.3)),
    )


# What befalls a system beside its bus.


async def nothing(system: FaultySystem, rng: random.Random) -> None:
    """The bus is bad enough."""


def victim(system: FaultySystem, rng: random.Random) -> int:
    """A worker that has tokens under way, if there is one."""
    return rng.choice(sorted(system.streaming) or range(WORKERS))


async def engine_dies(system: FaultySystem, rng: random.Random) -> None:
    await system.worker(victim(system, rng)).core.engine.kill("the schedule says so")


async def worker_dies(system: FaultySystem, rng: random.Random) -> None:
    index = victim(system, rng)
    await system.parts[f"worker-{index}"].kill()
    await pause(rng.uniform(0, 0.3))
    await system.start_worker(index)


async def connection_breaks(system: FaultySystem, rng: random.Random) -> None:
    part = system.parts[
        rng.choice(("gateway", "scheduler", "cache", "loader", "worker-0", "worker-1"))
    ]
    async with part.bus.breaking_off():
        await pause(rng.uniform(0.05, 1.5))


async def scheduler_dies(system: FaultySystem, rng: random.Random) -> None:
    await system.parts["scheduler"].kill()
    await system.start_scheduler()


async def cache_dies(system: FaultySystem, rng: random.Random) -> None:
    await system.parts["cache"].kill()
    await system.start_cache()


EVENTS = (
    nothing,
    nothing,
    engine_dies,
    engine_dies,
    worker_dies,
    worker_dies,
    connection_breaks,
    connection_breaks,
    scheduler_dies,
    cache_dies,
)


async def befall(system: FaultySystem, rng: random.Random) -> str:
    """Something happens at some time, every other time to a system in which tokens flow."""
    event, streaming, after_s = rng.choice(EVENTS), rng.random() < 0.5, rng.uniform(0, SPREAD_S)
    if streaming:
        with suppress(DeadlineExceeded):
            await until(lambda: system.streaming, deadline_s=STREAM_DEADLINE_S)
        # A stream takes some tenths of a second.
        after_s /= 10
    await pause(after_s)
    await event(system, rng)
    return f"{event.__name__}{' in mid-stream' if streaming else ''}"


async def go_through(system: FaultySystem, model_text: ModelText, seed: int, tally: Tally) -> None:
    """One schedule, and everything that must hold after it."""
    rng = random.Random(seed)
    rates = rates_of(rng)
    asks = asks_of(rng, MODELS, model_text, system.around.vocab_size, REQUESTS, SPREAD_S)
    problems = tally.failures.setdefault(seed, [])
    system.watch.wrong.clear()
    system.watch.seen.clear()
    system.schedule.begin(seed, rates)
    clock = SystemClock()
    began_s = clock.monotonic_s()
    running = [
        asyncio.create_task(run(system, model_text, ask), name=ask.request_id) for ask in asks
    ]
    event = await befall(system, rng)
    done, late = await asyncio.wait(running, timeout=SLOW_S)
    standing = [*standing_of(system), *recent()] if late else []
    if late:
        done, late = await asyncio.wait(running, timeout=REQUEST_DEADLINE_S - SLOW_S)
    system.schedule.calm()
    answered_s = clock.monotonic_s()
    for task in late:
        task.cancel()
    tally.lost += len(late)
    problems += [f"{task.get_name()} has not ended" for task in late]
    results = [task.result() for task in done]
    judge(results, tally, problems)
    problems += system.watch.wrong + system.died()
    problems += await left_over(system)
    problems += await billed(system, results)
    tally.schedules += 1
    if os.environ.get("PILOTLIGHT_CHAOS_LOG"):
        errors = [
            f"{result.ask.request_id} {result.ask.model} {result.error}"
            for result in results
            if result.error
        ]
        took = f"answered in {answered_s - began_s:.1f} s, empty after {clock.monotonic_s() - answered_s:.1f} s"
        system_of = structlog.contextvars.get_contextvars()
        print(
            f"seed {seed} {system_of}: {event}, {took}, {errors}, {problems}, {rates}",
            file=sys.__stderr__,
        )
    tally.faults.update(system.schedule.counts)
    tally.seen.update(system.watch.seen)
    if not problems:
        del tally.failures[seed]
    else:
        problems.insert(0, f"{event}, {rates}")
        problems += standing


def judge(results: list[Result], tally: Tally, problems: list[str]) -> None:
    for result in results:
        tally.requests += 1
        tally.left += result.left
        if result.error:
            # There is nothing in a schedule that justifies one: its system can always serve, sooner
            # or later.
            tally.errors[result.error] += 1
            tally.lost += 1
            problems.append(
                f"{result.ask.request_id} ({result.ask.kind}) of {result.ask.model}: {result.error}"
            )
        if result.wrong:
            tally.wrong += 1
            problems.append(f"{result.ask.request_id} ({result.ask.kind}): {result.wrong}")


async def left_over(system: FaultySystem) -> list[str]:
    """Nothing is, some time after the last request."""
    try:
        await until(lambda: _empty(system), deadline_s=EMPTY_DEADLINE_S)
    except DeadlineExceeded:
        return await system.left()
    return []


async def _empty(system: FaultySystem) -> bool:
    await pause(0.05)
    return not await system.left()


async def billed(system: FaultySystem, results: list[Result]) -> list[str]:
    """One row for each request, whatever became of it."""
    ids = [result.ask.request_id for result in results]

    async def all_there() -> bool:
        await pause(0.05)
        return len(await system.usage_rows(ids)) >= len(ids)

    with suppress(DeadlineExceeded):
        await until(all_there, deadline_s=BILLED_DEADLINE_S)
    counts = Counter(row.request_id for row in await system.usage_rows(ids))
    return [f"{key} is billed {counts[key]} times" for key in ids if counts[key] != 1]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def quiet() -> Iterator[None]:
    """To print the log costs more than what is tested; of thousands of faults each has its line."""
    if os.environ.get("PILOTLIGHT_CHAOS_LOG") == "all":
        yield
    else:
        with kept():
            yield


@contextmanager
def own_database(
    postgres_url: str, secrets_dir: Path
) -> Iterator[Callable[[str], DatabaseSettings]]:
    """A fresh, migrated database: settings of each service for it, and of its owner."""
    owner = make_url(postgres_url).set(drivername="postgresql+psycopg")
    name = f"chaos_{secrets.token_hex(6)}"
    engine = create_engine(
        owner.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )

    def settings_of(service: str) -> DatabaseSettings:
        if service == "owner":
            url = owner.set(database=name, drivername="postgresql")
        else:
            bare = URL.create(
                "postgresql", host=owner.host, port=owner.port, database=name, query=owner.query
            )
            settings = DatabaseSettings(
                database_url=bare.render_as_string(), secrets_dir=secrets_dir
            )
            url = service_url(settings, service).set(drivername="postgresql")
        return DatabaseSettings(database_url=url.render_as_string(hide_password=False))

    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {owner.database}"))
    try:
        yield settings_of
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        engine.dispose()


@pytest.mark.parametrize("seeds", shards())
async def test_schedules(
    seeds: range,
    nats_url: str,
    postgres_url: str,
    postgres_secrets: Path,
    tmp_path: Path,
    quiet: None,
    record_property: Callable[[str, object], None],
) -> None:
    bundle = TextBundle(tokenizer_json=byte_level_json(), chat_template="", special_tokens={})
    model_text = ModelText.of(facts_of(bundle, TextTokenizer(bundle), SystemClock()))
    waiting = iter(seeds)
    tally = Tally()
    with ExitStack() as databases:
        async with AsyncExitStack() as stack:
            systems: list[FaultySystem] = []
            for index in range(min(SYSTEMS, len(seeds))):
                folder = tmp_path / str(index)
                folder.mkdir()
                around = Surroundings(
                    bus_settings=BusSettings(
                        nats_url=nats_url, prefix=f"c{secrets.token_hex(6)}.", secrets_dir=None
                    ),
                    folder=folder,
                    database_settings=databases.enter_context(
                        own_database(postgres_url, postgres_secrets)
                    ),
                    vocab_size=model_text.tokenizer.vocab_size,
                )
                systems.append(FaultySystem(around))
                stack.push_async_callback(systems[-1].stop)

            async def work(number: int, system: FaultySystem) -> None:
                # Every line of its log says which system it is of.
                structlog.contextvars.bind_contextvars(system=number)
                await system.start()
                for seed in waiting:
                    await go_through(system, model_text, seed, tally)

            await asyncio.gather(*(work(number, system) for number, system in enumerate(systems)))
    record_property("chaos", tally.counts())
    print(tally.line())
    if tally.failures:
        pytest.fail(tally.failed(__file__), pytrace=False)
    assert (tally.schedules, tally.lost, tally.wrong) == (len(seeds), 0, 0)
