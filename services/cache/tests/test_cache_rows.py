"""Books and rows of grants agree in the end, whether the caller, the cache or the database gives up
in the middle.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.cache.books import Books
from pilotlight.cache.forecasts import Forecasts
from pilotlight.cache.keeper import Keeper
from pilotlight.cache.lender import Lender
from pilotlight.cache.measures import CacheMeasures
from pilotlight.cache.repository import Added, Orphans
from pilotlight.cache.room import RoomMaker
from pilotlight.cache.settings import HostCopies
from pilotlight.cache.sole import NotSole
from pilotlight.cache.testing import hear
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.messages.room import (
    GRANT_SETTLED_SUBJECT,
    GrantSettled,
    Release,
    Reserve,
    Reserved,
)
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.ids import (
    Digest,
    Generation,
    GrantId,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.lending import LendingRules
from pilotlight.policy.scaling import ScalingRules
from pilotlight.policy.testing import node, worker

pytestmark = pytest.mark.anyio


class Rows:
    """A database that is as slow as the test wants."""

    def __init__(self) -> None:
        self.rows: set[GrantId] = set()
        self.adding = self.ending = self.transactions = 0
        self.may_add, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_add.set()
        self.may_end.set()
        self.breaks_in_commit = False
        self.refuses: Exception | None = None

    async def write_grants(self, added: Sequence[Added], ended: Sequence[GrantId]) -> None:
        self.transactions += 1
        self.rows -= set(ended)
        if ended:
            self.ending += 1
            await self.may_end.wait()
        if not added:
            return
        self.adding += 1
        await self.may_add.wait()
        if self.refuses is not None:
            raise self.refuses
        self.rows.update(one.grant.grant_id for one in added)
        if self.breaks_in_commit:
            raise DatabaseUnavailable("the connection is gone")

    async def orphans(self) -> Orphans:
        return Orphans(over=frozenset(), unwritten=frozenset())


class Rig:
    def __init__(self) -> None:
        clock = SystemClock()
        self.books = Books()
        hear(self.books, worker(), clock.monotonic_s())
        hear(self.books, node(), clock.monotonic_s())
        self.rows = Rows()
        self.background = Background()
        self.told: list[GrantSettled] = []
        self.written_now = 0
        rules = EvictionRules(min_residency_s=0.0)
        lender = Lender(self.books, None, clock, LendingRules())
        self.room = RoomMaker(
            self.books,
            self.rows,
            None,
            self,
            clock,
            self.background,
            rules,
            lender,
            Keeper(
                self.books,
                None,
                clock,
                "i",
                HostCopies.OFF,
                Forecasts(self.books, ScalingRules()),
            ),
            CacheMeasures(self.books, CollectorRegistry()),
        )

    async def publish(self, subject: str, message: GrantSettled) -> None:
        """As the bus."""
        assert subject == GRANT_SETTLED_SUBJECT
        self.told.append(message)

    def write_now(self) -> None:
        """As the bus."""
        self.written_now = len(self.told)

    def reserve(
        self, *, promise: bool = False, generation: int = 0, device: int = 1
    ) -> Coroutine[Any, Any, Reserved]:
        wanted = Reserve(
            instance_id=InstanceId("i"),
            model=ModelName("m"),
            digest=Digest("d"),
            worker_id=WorkerId("w0"),
            node_id=NodeId("n0"),
            device_bytes=device,
            host_part_bytes=(1,),
            lease_s=30.0,
            generation=Generation(generation),
            promise=promise,
        )
        return self.room.reserve(wanted)

    async def given_up(self, asking: Coroutine[Any, Any, object], begun: str) -> None:
        """A caller asks, and is gone when the database is at it."""
        task, before = asyncio.create_task(asking), getattr(self.rows, begun)
        await until(lambda: getattr(self.rows, begun) > before)
        task.cancel()
        await asyncio.wait({task})

    @property
    def agrees(self) -> bool:
        return self.rows.rows == self.books.grants.keys()


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_a_grant_is_written_though_nobody_waits_for_it_any_more(rig: Rig) -> None:
    rig.rows.may_add.clear()
    await rig.given_up(rig.reserve(), "adding")
    assert not rig.rows.rows
    again = asyncio.create_task(rig.reserve())
    await asyncio.wait({again}, timeout=0.05)
    assert not again.done(), "nothing is granted that is not written"
    rig.rows.may_add.set()
    granted = await again
    assert rig.agrees
    assert rig.rows.rows == {granted.grant_id}
    assert await rig.reserve() == granted
    assert rig.rows.adding == 1


async def test_what_is_given_back_while_it_is_written_leaves_no_row(rig: Rig) -> None:
    rig.rows.may_add.clear()
    await rig.given_up(rig.reserve(), "adding")
    (grant_id,) = rig.books.grants
    await rig.room.release(Release(grant_id=grant_id))
    rig.rows.may_add.set()
    await until(lambda: bool(rig.rows.rows))
    await rig.room.lapse()
    assert rig.agrees
    assert not rig.rows.rows
    assert (await rig.reserve()).grant_id != grant_id


async def test_what_a_broken_commit_may_have_left_is_deleted(rig: Rig) -> None:
    rig.rows.breaks_in_commit = True
    with pytest.raises(DatabaseUnavailable):
        await rig.reserve()
    assert not rig.books.grants
    assert len(rig.rows.rows) == 1
    await rig.room.lapse()
    assert not rig.rows.rows
    ended = rig.rows.ending
    await rig.room.lapse()
    assert rig.rows.ending == ended, "once"


async def test_giving_back_that_is_broken_off_is_ended_later(rig: Rig) -> None:
    granted = await rig.reserve()
    rig.rows.may_end.clear()
    await rig.given_up(rig.room.release(Release(grant_id=granted.grant_id)), "ending")
    rig.rows.rows.add(granted.grant_id)  # The transaction was rolled back.
    rig.rows.may_end.set()
    await rig.room.lapse()
    assert not rig.rows.rows
    assert rig.agrees


async def test_room_is_promised_before_its_row_is_there_and_then_said_to_be_written(
    rig: Rig,
) -> None:
    rig.rows.may_add.clear()
    promised = await rig.reserve(promise=True)
    assert not promised.written
    await until(lambda: rig.rows.adding == 1)
    assert not rig.rows.rows
    assert rig.told == []
    again = [asyncio.create_task(rig.reserve(promise=promise)) for promise in (False, True)]
    await asyncio.wait(again, timeout=0.05)
    assert not any(one.done() for one in again), "one who asks again asks whether it is written"
    rig.rows.may_add.set()
    for one in again:
        assert await one == Reserved(grant_id=promised.grant_id)
    (told,) = rig.told
    assert (told.grant_id, told.instance_id, told.worker_id) == (promised.grant_id, "i", "w0")
    assert told.code == ""
    assert rig.written_now == 1
    assert rig.agrees
    assert rig.rows.adding == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotSole("another answers"), "not_sole"),
        (DatabaseUnavailable("gone"), "database_unavailable"),
        (ValueError("a bug"), "internal"),
    ],
)
async def test_a_promise_that_cannot_be_written_is_taken_back(
    rig: Rig, error: Exception, code: str
) -> None:
    rig.rows.refuses = error
    promised = await rig.reserve(promise=True)
    await until(lambda: rig.told)
    assert [(one.grant_id, one.code) for one in rig.told] == [(promised.grant_id, code)]
    assert not rig.books.grants
    rig.rows.refuses = None
    assert (await rig.reserve()).grant_id != promised.grant_id
    assert len(rig.told) == 1, "one that was not promised is answered alone"
    await rig.room.lapse()
    assert rig.agrees


async def test_a_promise_that_is_given_back_while_it_is_written_leaves_no_row(rig: Rig) -> None:
    rig.rows.may_add.clear()
    promised = await rig.reserve(promise=True)
    await until(lambda: rig.rows.adding == 1)
    await rig.room.release(Release(grant_id=promised.grant_id))
    rig.rows.may_add.set()
    await until(lambda: rig.told)
    await rig.room.lapse()
    assert not rig.rows.rows
    assert rig.agrees


async def test_of_a_stage_that_has_a_grant_no_larger_one_is_promised(rig: Rig) -> None:
    first = await rig.reserve(generation=1)
    rig.rows.may_add.clear()
    growing = asyncio.create_task(rig.reserve(promise=True, generation=2, device=2))
    await until(lambda: rig.rows.adding == 2)
    assert not growing.done()
    assert first.grant_id in rig.books.grants
    rig.rows.may_add.set()
    assert (await growing).written
    assert len(rig.books.grants) == 1
    assert rig.told == []
