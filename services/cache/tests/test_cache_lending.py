"""Loans: what workers are told of them, when, and how often."""

from dataclasses import replace

import pytest
from sqlalchemy import URL, delete, func, insert

from pilotlight.cache.books import Books
from pilotlight.cache.grants import Grant
from pilotlight.cache.lender import REPEAT_S, Lender
from pilotlight.cache.testing import (
    MEMORY,
    NODE,
    WORKER,
    Peers,
    change,
    hear,
    heard,
    reserve,
    stage,
)
from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.errors import NoRoom
from pilotlight.common.messages.room import Lend, lend_subject
from pilotlight.common.service import Application
from pilotlight.common.testing import until
from pilotlight.policy.cluster import BuildLoan, HeldStage, HeldState, KvLoan
from pilotlight.policy.ids import Digest, GrantId, InstanceId
from pilotlight.policy.lending import LendingRules
from pilotlight.policy.testing import held, worker

pytestmark = pytest.mark.anyio

KEPT_BACK = int(MEMORY * LendingRules().kept_back_share)


def borrower(name: str, size: int, **loan: int) -> HeldStage:
    """A stage that could use all of the device."""
    return replace(
        held(name, name, device_bytes=size), loan=KvLoan(**({"most_bytes": MEMORY} | loan))
    )


class Told:
    """A bus that keeps what workers are told."""

    def __init__(self) -> None:
        self.messages: list[dict[str, int]] = []
        self.builds: list[int] = []

    async def publish(self, subject: str, message: Lend) -> None:
        assert subject == lend_subject(WORKER)
        self.messages.append({loan.instance_id: loan.num_bytes for loan in message.loans})
        self.builds.append(message.build_bytes)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def books(clock: ManualClock) -> Books:
    books = Books()
    books.listen(clock.monotonic_s())
    return books


@pytest.fixture
def lender(books: Books, told: Told, clock: ManualClock) -> Lender:
    return Lender(books, told, clock, LendingRules())


async def report(
    lender: Lender,
    books: Books,
    clock: ManualClock,
    *stages: HeldStage,
    build: BuildLoan = BuildLoan(),  # noqa: B008 - frozen
) -> None:
    facts = replace(worker(held_stages=stages), build=build)
    hear(books, facts, clock.monotonic_s())
    await lender.hear(WORKER)


def granted(books: Books, name: str, device_bytes: int, expires_s: float) -> GrantId:
    """A start that no report shows yet."""
    grant = Grant(
        grant_id=GrantId(f"g-{name}"),
        instance_id=InstanceId(name),
        digest=Digest("d"),
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=device_bytes,
        host_bytes=0,
        expires_s=expires_s,
    )
    books.grants[grant.grant_id] = grant
    return grant.grant_id


async def test_a_stage_alone_is_lent_what_is_free_once_and_again_if_it_was_lost(
    lender: Lender, books: Books, clock: ManualClock, told: Told
) -> None:
    await report(lender, books, clock, borrower("a", 300))
    await report(lender, books, clock, borrower("a", 300))
    all_of_it = MEMORY - 300 - KEPT_BACK
    assert told.messages == [{"a": all_of_it}]
    clock.advance(REPEAT_S)
    await report(lender, books, clock, borrower("a", 300))
    assert told.messages == [{"a": all_of_it}] * 2, "no report shows it"
    clock.advance(10 * REPEAT_S)
    await report(lender, books, clock, borrower("a", 300, offered_bytes=all_of_it))
    assert len(told.messages) == 2
    assert lender.offered_bytes == all_of_it


async def test_a_new_cache_leaves_loans_as_it_finds_them(
    lender: Lender, books: Books, clock: ManualClock, told: Told
) -> None:
    stages = (borrower("a", 100, offered_bytes=450), borrower("b", 100, offered_bytes=320))
    await report(lender, books, clock, *stages)
    assert not told.messages


async def test_a_grant_calls_loans_in(
    lender: Lender, books: Books, clock: ManualClock, told: Told
) -> None:
    await report(lender, books, clock, borrower("a", 300, offered_bytes=MEMORY - 300 - KEPT_BACK))
    granted(books, "b", 500, clock.monotonic_s() + 10)
    await lender.follow(WORKER)
    assert told.messages == [{"a": MEMORY - 800 - KEPT_BACK}]


async def test_what_takes_no_loans_is_lent_none(
    lender: Lender, books: Books, clock: ManualClock, told: Told
) -> None:
    stages = (
        borrower("piece", 300, most_bytes=0),
        replace(borrower("gone", 0), state=HeldState.EVICTED),
    )
    await report(lender, books, clock, *stages)
    assert not told.messages


async def test_a_build_has_the_room_of_loans_and_goes_before_no_start(
    lender: Lender, books: Books, clock: ManualClock, told: Told
) -> None:
    loan = MEMORY - 300 - KEPT_BACK
    stage_a = borrower("a", 300, offered_bytes=loan, lent_bytes=loan)
    asked = MEMORY - 300
    asks = BuildLoan(wanted_bytes=asked)
    await report(lender, books, clock, stage_a, build=asks)
    assert (told.builds, told.messages) == ([asked], [{"a": loan}]), "the loan stays offered"
    had = replace(asks, offered_bytes=asked, taken_bytes=asked)
    clock.advance(10 * REPEAT_S)
    await report(lender, books, clock, stage_a, build=had)
    assert len(told.builds) == 1, "it has what it is lent"
    grant = granted(books, "b", 1, clock.monotonic_s() + 10)
    await lender.follow(WORKER)
    assert told.builds[-1] == 0, "any grant that leaves too little takes it back"
    clock.advance(REPEAT_S)
    await report(lender, books, clock, stage_a, build=had)
    assert told.builds[-2:] == [0, 0], "until a report shows it"
    await report(lender, books, clock, stage_a)
    count = len(told.builds)
    del books.grants[grant]
    await report(lender, books, clock, stage_a)
    assert told.builds[count:] in ([], [0]), "one that has ended is lent nothing"
    await report(lender, books, clock, stage_a, build=asks)
    assert told.builds[-1] == asked, "the next one is"


async def test_a_build_gets_nothing_that_requests_want_and_nothing_on_a_node_that_drains(
    lender: Lender, books: Books, clock: ManualClock, told: Told
) -> None:
    loan, asked = MEMORY - 300 - KEPT_BACK, MEMORY - 300
    asks = BuildLoan(wanted_bytes=asked)
    busy = borrower("a", 300, offered_bytes=loan, wanted_bytes=1)
    await report(lender, books, clock, busy, build=asks)
    assert not told.builds
    books.draining = frozenset({NODE})
    idle = borrower("a", 300, offered_bytes=loan)
    await report(lender, books, clock, idle, build=asks)
    assert not told.builds
    books.draining = frozenset()
    clock.advance(REPEAT_S)
    await report(lender, books, clock, idle, build=asks)
    assert told.builds == [asked]


async def test_a_new_cache_finds_builds_in_reports(
    lender: Lender, books: Books, clock: ManualClock, told: Told
) -> None:
    had = BuildLoan(wanted_bytes=100, offered_bytes=100, taken_bytes=100)
    await report(lender, books, clock, build=had)
    assert not told.messages
    await report(lender, books, clock, build=replace(had, wanted_bytes=0, taken_bytes=0))
    assert told.builds == [0], "what is left of an offer is taken back"


@pytest.mark.slow
async def test_a_start_takes_the_room_of_a_build(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    """Its grant counts nothing of the build, and the worker hears of it before any hold."""
    builds: list[int] = []

    async def take(message: Lend) -> None:
        builds.append(message.build_bytes)

    await bus.subscribe(lend_subject(WORKER), Lend, take)
    asked = MEMORY
    await peers.report(replace(worker(), build=BuildLoan(wanted_bytes=asked)))
    await until(lambda: builds and builds[-1] == asked)
    await reserve(bus, "b", MEMORY)
    await until(lambda: builds[-1] == 0)


@pytest.mark.slow
async def test_a_grant_that_grew_for_nothing_is_taken_back_by_the_next_leader(
    cache: Application, bus: Bus, peers: Peers, module_database: URL
) -> None:
    """Its leader died before it wrote the row of the longer stage."""
    now = {"created_at": func.now(), "updated_at": func.now()}
    row = {"model": "m", "digest": "d", "generation": 1, "epoch": 1, "body": {}, **now}
    change(module_database, insert(tables.instances).values(instance_id="a", state="ready", **row))
    try:
        await heard(bus, peers, stage("a", 300))
        await reserve(bus, "a", 300, epoch=3)
        await reserve(bus, "a", 900, epoch=3, generation=2)
        with pytest.raises(NoRoom):
            await reserve(bus, "b", 500, epoch=3)
        await until(lambda: has_room(bus, "b", 500, epoch=4))
    finally:
        change(module_database, delete(tables.instances))


async def has_room(bus: Bus, instance: str, device: int, epoch: int) -> bool:
    try:
        await reserve(bus, instance, device, epoch=epoch)
    except NoRoom:
        return False
    return True


@pytest.mark.slow
async def test_a_worker_hears_of_loans_and_of_what_takes_them_back(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    messages: list[Lend] = []

    async def take(message: Lend) -> None:
        messages.append(message)

    await bus.subscribe(lend_subject(WORKER), Lend, take)
    await heard(bus, peers, borrower("a", 300))
    free = MEMORY - 300 - KEPT_BACK

    def lent() -> int:
        return messages[-1].loans[0].num_bytes if messages else 0

    await until(lambda: lent() == free)
    await reserve(bus, "b", 500)
    await until(lambda: lent() == free - 500)
