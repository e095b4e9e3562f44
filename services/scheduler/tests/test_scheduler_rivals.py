"""Schedulers that fight for the lease, on a real PostgreSQL: however they are stopped and go on,
and whatever becomes of their connections, one leads at a time, and what an older leader says or
writes counts for nothing.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import pytest
from sqlalchemy import delete, func, insert, literal, select, text, update
from sqlalchemy.engine import URL

from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, DeadlineExceeded, NotLeader
from pilotlight.common.ids import new_event_id
from pilotlight.common.service import Background
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.testing import until
from pilotlight.common.waiting import pause
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler import election as election_module
from pilotlight.scheduler import lease as lease_module
from pilotlight.scheduler.election import Election
from pilotlight.scheduler.lease import Fence, Lease

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HOLDERS = ("one", "two", "three", "four")
OPERATIONS = 40
LEASE_S = 0.25
FIGHT_S = 2.5
UNHURRIED_S = 60.0
"""A term, and the time for an answer, where a test is of what is decided and not of when."""
ROWS = tables.outboxes["scheduler"]
"""Any table of the scheduler's whose rows are numbered as they are written."""
LOST = (NotLeader, DatabaseUnavailable, DeadlineExceeded)


@pytest.fixture
async def owner(module_database: URL) -> AsyncGenerator[Database]:
    url = module_database.set(drivername="postgresql").render_as_string(hide_password=False)
    owner = Database(DatabaseSettings(database_url=url), "scheduler", SystemClock())
    await owner.start()
    async with owner.unit_of_work() as work:
        await work.connection.execute(delete(tables.lease))
        await work.connection.execute(delete(ROWS))
    yield owner
    await owner.stop()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease expires, and no answer comes too late, because the machine is busy."""
    monkeypatch.setattr(lease_module, "_term", literal(timedelta(seconds=UNHURRIED_S)))
    for name in ("LEASE_S", "IDLE_S", "DEADLINE_S"):
        monkeypatch.setattr(lease_module, name, UNHURRIED_S)


async def cut_all(owner: Database) -> None:
    """What a restart of the database does to its clients."""
    cut = text(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE usename = 'pilotlight_scheduler' AND datname = current_database()"
    )
    async with owner.unit_of_work() as work:
        await work.connection.execute(cut)


async def write(fence: Fence, holder: str, *, slowly: bool = False) -> None:
    async with fence.unit_of_work() as work:
        if slowly:
            await pause(0)
        row = {"event_id": new_event_id(), "kind": holder, "entity": str(fence.epoch), "data": {}}
        await work.connection.execute(insert(ROWS).values(**row, at=func.now(), trace_parent=""))


async def written(owner: Database) -> list[tuple[str, int]]:
    """Which scheduler wrote under which epoch, in order."""
    async with owner.reading() as connection:
        rows = (
            await connection.execute(select(ROWS.c.kind, ROWS.c.entity).order_by(ROWS.c.id))
        ).all()
    return [(row.kind, int(row.entity)) for row in rows]


def check_order(pairs: list[tuple[str, int]]) -> None:
    """Epochs never go back, and each has one holder."""
    epochs = [epoch for _, epoch in pairs]
    assert epochs == sorted(epochs), pairs
    holders: dict[int, str] = {}
    for holder, epoch in pairs:
        assert holders.setdefault(epoch, holder) == holder, f"epoch {epoch} has two holders"


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("seed", range(4))
async def test_every_operation_does_what_the_model_says(
    owner: Database, database_settings: Callable[[str], DatabaseSettings], seed: int
) -> None:
    """One after the other, in any order, each holder believing whatever it did last."""
    rng = random.Random(seed)
    database = Database(database_settings("scheduler"), "scheduler", SystemClock())
    leases = {holder: Lease(database, holder) for holder in HOLDERS}
    believed = {holder: Epoch(0) for holder in HOLDERS}
    held_by, epoch = None, 0
    for _ in range(OPERATIONS):
        holder = rng.choice(HOLDERS)
        match rng.choice(("take", "take", "renew", "write", "write", "give back", "expire", "cut")):
            case "take":
                taken = await leases[holder].take(Epoch(1))
                if held_by in (None, holder):
                    held_by, epoch = holder, epoch + 1
                    assert taken == epoch
                    believed[holder] = Epoch(epoch)
                else:
                    assert taken is None
            case "renew":
                assert await leases[holder].renew(believed[holder]) == (held_by == holder)
            case "write":
                try:
                    await write(Fence(database, holder, believed[holder]), holder)
                    assert held_by == holder
                except NotLeader:
                    assert held_by != holder
            case "give back":
                await leases[holder].give_back(believed[holder])
                held_by = None if held_by == holder else held_by
            case "expire":
                async with owner.unit_of_work() as work:
                    await work.connection.execute(
                        update(tables.lease).values(expires_at=func.clock_timestamp())
                    )
                held_by = None
            case _:
                await cut_all(owner)
    check_order(await written(owner))
    await database.stop()


@pytest.mark.usefixtures("unhurried")
async def test_of_many_that_take_at_once_one_gets_it(
    owner: Database, database_settings: Callable[[str], DatabaseSettings]
) -> None:
    databases = [
        Database(database_settings("scheduler"), "scheduler", SystemClock()) for _ in HOLDERS
    ]
    leases = [Lease(database, holder) for database, holder in zip(databases, HOLDERS, strict=True)]
    for term in range(1, 11):
        taken = await asyncio.gather(*(lease.take(Epoch(1)) for lease in leases))
        assert [epoch for epoch in taken if epoch is not None] == [term]
        winner = next(
            lease for lease, epoch in zip(leases, taken, strict=True) if epoch is not None
        )
        await winner.give_back(Epoch(term))
    for database in databases:
        await database.stop()


class StoppableClock:
    """A scheduler's clock. It stands still while its process's clock is said to."""

    def __init__(self) -> None:
        self._real = SystemClock()
        self._stood_s = 0.0
        self._stopped_at_s: float | None = None

    def monotonic_s(self) -> float:
        now_s = self._stopped_at_s if self._stopped_at_s is not None else self._real.monotonic_s()
        return now_s - self._stood_s

    def stop(self) -> None:
        self._stopped_at_s = self._real.monotonic_s()

    def go_on(self) -> None:
        """From where it stood, as a clock that was never told."""
        if self._stopped_at_s is not None:
            self._stood_s += self._real.monotonic_s() - self._stopped_at_s
            self._stopped_at_s = None


@dataclass
class Receiver:
    """A worker, as far as epochs go: it refuses the older ones."""

    highest: int = 0
    obeyed: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    refused: int = 0

    def command(self, holder: str, epoch: int) -> None:
        if epoch < self.highest:
            self.refused += 1
            return
        self.highest = epoch
        self.obeyed.append((holder, epoch))


class Rival:
    """One scheduler: while it leads it writes and commands.

    It can be stopped, with its clock or without.
    """

    def __init__(self, holder: str, settings: DatabaseSettings, receiver: Receiver) -> None:
        self.holder = holder
        self.clock = StoppableClock()
        self.running = asyncio.Event()
        self.running.set()
        self.believed: list[tuple[float, int]] = []
        """When it was sure to lead, by a clock that all share."""
        self.clock_stood = False
        self._real: Clock = SystemClock()
        self._receiver = receiver
        self._database = Database(settings, "scheduler", SystemClock())
        self._background = Background()
        lease = _StoppableLease(self._database, holder, self.running)
        clock: Clock = self.clock
        self.election = Election(lease, self._lead, lambda: Epoch(0), clock, self._background)

    async def stop(self) -> None:
        self.running.set()
        await self.election.stop()
        await self._background.stop()
        await self._database.stop()
        assert not self._background.failed.done(), self._background.failed.result()

    async def stand_still(self, seconds: float, *, clock_too: bool) -> None:
        self.running.clear()
        if clock_too:
            self.clock_stood = True
            self.clock.stop()
        await pause(seconds)
        self.clock.go_on()
        self.running.set()

    async def _lead(self, epoch: Epoch) -> None:
        fence = Fence(self._database, self.holder, epoch)
        try:
            while True:
                self.election.check(epoch)
                if not self.clock_stood:
                    self.believed.append((self._real.monotonic_s(), epoch))
                self._receiver.command(self.holder, epoch)
                await self.running.wait()
                await write(fence, self.holder, slowly=True)
                await pause(0.005)
        except DatabaseUnavailable as error:
            raise NotLeader(error.message) from error


class _StoppableLease(Lease):
    """Of a process that does nothing while it is stopped."""

    def __init__(self, database: Database, holder: str, running: asyncio.Event) -> None:
        super().__init__(database, holder)
        self._running = running

    async def take(self, at_least: Epoch) -> Epoch | None:
        await self._running.wait()
        return await super().take(at_least)

    async def renew(self, epoch: Epoch) -> bool:
        await self._running.wait()
        return await super().renew(epoch)


@pytest.mark.parametrize("seed", range(3))
async def test_one_leads_at_a_time_whoever_is_stopped_and_whatever_breaks(
    owner: Database,
    database_settings: Callable[[str], DatabaseSettings],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.setattr(lease_module, "_term", literal(timedelta(seconds=LEASE_S)))
    monkeypatch.setattr(election_module, "LEASE_S", LEASE_S)
    monkeypatch.setattr(election_module, "RENEW_S", LEASE_S / 3)
    rng = random.Random(seed)
    clock, receiver = SystemClock(), Receiver()
    rivals = [Rival(holder, database_settings("scheduler"), receiver) for holder in HOLDERS[:3]]
    for rival in rivals:
        await rival.election.start()
    ends_s = clock.monotonic_s() + FIGHT_S
    while clock.monotonic_s() < ends_s:
        await pause(rng.uniform(0.0, LEASE_S))
        leading = next(
            (rival for rival in rivals if rival.election.epoch is not None), rng.choice(rivals)
        )
        if rng.random() < 0.25:
            await cut_all(owner)
        else:
            await leading.stand_still(
                rng.uniform(LEASE_S / 2, 2 * LEASE_S), clock_too=rng.random() < 0.4
            )
    before = len(receiver.obeyed)
    await until(lambda: len(receiver.obeyed) > before)
    for rival in rivals:
        await rival.stop()
    check_order(receiver.obeyed)
    check_order(await written(owner))
    assert receiver.highest > 2, "the lease changed hands"
    spans: dict[int, list[float]] = {}
    for rival in rivals:
        for at_s, epoch in rival.believed:
            spans.setdefault(epoch, []).append(at_s)
    terms = sorted(spans)
    assert all(max(spans[one]) < min(spans[other]) for one, other in pairwise(terms)), (
        "two led at once"
    )
