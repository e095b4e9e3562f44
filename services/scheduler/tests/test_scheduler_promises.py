"""Starts whose room is promised: they are written meanwhile, and commanded when the grant is."""

import asyncio
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, func, insert, select, update

from pilotlight.common.db import tables
from pilotlight.common.errors import DatabaseUnavailable, NoRoom, NotLeader, TransientError
from pilotlight.common.messages.room import (
    GRANT_SETTLED_SUBJECT,
    GrantSettled,
    Reserve,
    Reserved,
)
from pilotlight.common.testing import until
from pilotlight.policy.ids import Epoch, GrantId, InstanceId, WorkerId
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import instance, model
from pilotlight.scheduler import room
from pilotlight.scheduler.repository import SchedulerRepository
from pilotlight.scheduler.room import RoomClient
from pilotlight.scheduler.testing import DEADLINE_S, Rig

pytestmark = pytest.mark.anyio
S = InstanceState


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word of a promise comes when the test says it."""
    monkeypatch.setattr(room, "SETTLED_S", DEADLINE_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """That word is lost."""
    monkeypatch.setattr(room, "SETTLED_S", 0.01)


async def settle(rig: Rig, grant_id: str, *, code: str = "", ask: int = -1) -> None:
    """The cache says what became of a promise: of the last one, or of another ``ask``."""
    asked = rig.reserved[ask]
    settled = GrantSettled(
        grant_id=GrantId(grant_id),
        instance_id=asked.instance_id,
        worker_id=asked.worker_id,
        code=code,
        message="it says why" if code else "",
    )
    await rig.bus.publish(GRANT_SETTLED_SUBJECT, settled)


async def row_of(rig: Rig, state: str) -> Any:
    """The row of an instance in a state, when there is one."""
    found: list[Any] = []

    async def there() -> bool:
        found[:] = await rig.rows(select(tables.instances).where(tables.instances.c.state == state))
        return bool(found)

    await until(there)
    return found[0]


def is_commanded(rig: Rig, instance_id: str) -> bool:
    assert rig.worker_hold is not None
    return instance_id in [one.instance_id for one in rig.worker_hold.holds]


async def written_and_promised(rig: Rig) -> InstanceId:
    """A start whose row is there, and whose grant is not; turns know nothing of it."""
    rig.promises = True
    await rig.demand()
    row = await row_of(rig, "fetching")
    await rig.waited()
    assert not rig.instances(S.FETCHING)
    assert not is_commanded(rig, row.instance_id)
    return InstanceId(row.instance_id)


@pytest.mark.slow
async def test_a_promised_start_is_commanded_when_both_rows_are_there(
    rig: Rig, patient: None
) -> None:
    instance_id = await written_and_promised(rig)
    for _ in range(2):
        await settle(rig, "grant-1")
    await rig.ordered(instance_id)
    assert (await rig.shown_as(S.FETCHING)).placements[0].grant_id == "grant-1"
    (decision,) = await rig.rows(select(tables.decisions.c.outcome))
    assert decision.outcome["promised"] == ["grant-1"]
    assert decision.outcome["evicted_instances"] == ["evicted"]
    assert rig.released == []
    assert len(rig.reserved) == 1


@pytest.mark.slow
@pytest.mark.parametrize("code", ["not_sole", "database_unavailable"])
async def test_a_start_whose_promise_is_not_written_fails_and_is_tried_anew(
    rig: Rig, patient: None, code: str
) -> None:
    failed_id = await written_and_promised(rig)
    epoch = rig.epoch
    await settle(rig, "grant-1", code=code)
    failed = await rig.shown_as(S.FAILED)
    assert failed.instance_id == failed_id
    assert "it says why" in failed.reason
    assert (await row_of(rig, "failed")).instance_id == failed_id
    await rig.until(lambda: rig.released == ["grant-1"])
    rig.promises = False
    await rig.passing(rig.waited, lambda: rig.instances(S.FETCHING))
    (again,) = rig.instances(S.FETCHING)
    await rig.ordered(again.instance_id)
    assert again.placements[0].grant_id == "grant-2"
    assert not is_commanded(rig, failed_id)
    assert rig.released == ["grant-1"]
    assert rig.epoch == epoch, "the cache's database is not this term's end"

    async def closed() -> bool:
        starts = tables.cold_starts
        rows = await rig.rows(select(starts.c.status).where(starts.c.instance_id == failed_id))
        return [row.status for row in rows] == ["abandoned"]

    await rig.passing(rig.waited, lambda: True)
    await until(closed)


@pytest.mark.slow
async def test_a_promise_of_which_no_word_comes_is_asked_for_again(
    rig: Rig, impatient: None
) -> None:
    rig.promises = True
    await rig.demand()
    started = await rig.shown_as(S.FETCHING)
    await rig.ordered(started.instance_id)
    assert [(one.instance_id, one.promise) for one in rig.reserved] == [
        (started.instance_id, True),
        (started.instance_id, False),
    ]
    assert started.placements[0].grant_id == "grant-1"
    assert rig.released == []


@pytest.mark.slow
async def test_a_cache_that_knows_nothing_of_a_promise_gets_its_grant_back(
    rig: Rig, impatient: None
) -> None:
    """It died before the row was there, and its successor grants anew."""
    rig.promises, rig.remembers = True, False
    await rig.demand()
    failed = await rig.shown_as(S.FAILED)
    await rig.until(lambda: len(rig.released) == 2)
    assert set(rig.released) == {"grant-1", "grant-2"}
    assert not is_commanded(rig, failed.instance_id)
    rig.promises = False
    await rig.passing(rig.waited, lambda: rig.instances(S.FETCHING))
    (again,) = rig.instances(S.FETCHING)
    await rig.ordered(again.instance_id)
    assert again.placements[0].grant_id == "grant-3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(DatabaseUnavailable("gone"), True), (NotLeader("over"), False), (NoRoom("odd"), False)],
    ids=["may be written", "over", "refused"],
)
async def test_a_promise_is_given_back_with_a_start_that_is_not_written(
    rig: Rig,
    patient: None,
    monkeypatch: pytest.MonkeyPatch,
    error: TransientError,
    is_kept: bool,
) -> None:
    start = SchedulerRepository.start

    async def fails(*_: Any) -> None:
        monkeypatch.setattr(SchedulerRepository, "start", start)
        await settle(rig, "grant-1")
        raise error

    monkeypatch.setattr(SchedulerRepository, "start", fails)
    rig.promises = True
    await rig.demand()
    await rig.until(lambda: rig.reserved)
    await rig.passing(rig.waited, lambda: len(rig.reserved) > 1)
    rig.promises = False
    await settle(rig, "grant-2")
    await rig.ordered(rig.reserved[1].instance_id)
    assert ("grant-1" not in rig.released) == is_kept


@pytest.mark.slow
@pytest.mark.parametrize("is_granted", [False, True], ids=["lost", "written"])
async def test_a_term_that_ends_meanwhile_commands_nothing_and_the_next_looks_for_the_grant(
    rig: Rig, patient: None, is_granted: bool
) -> None:
    instance_id = await written_and_promised(rig)
    epoch, released = rig.epoch, [] if is_granted else ["grant-1"]
    ask = rig.reserved[0]
    async with rig.owner.unit_of_work() as work:
        await work.connection.execute(delete(tables.grants))
        if is_granted:
            row = {
                "grant_id": "grant-1",
                "instance_id": instance_id,
                "digest": ask.digest,
                "worker_id": ask.worker_id,
                "node_id": ask.node_id,
                "device_bytes": 1,
                "host_bytes": 1,
            }
            times = {"expires_at": func.now(), "created_at": func.now()}
            await work.connection.execute(insert(tables.grants).values(**row, **times))
        stolen = {"holder": "another", "epoch": tables.lease.c.epoch + 1}
        await work.connection.execute(
            update(tables.lease).values(**stolen, expires_at=func.clock_timestamp())
        )
    rig.promises = False
    await rig.passing(rig.report, lambda: rig.epoch >= epoch + 2)
    await settle(rig, "grant-1", ask=0)
    if is_granted:
        await rig.ordered(instance_id)
        assert [one.instance_id for one in rig.instances(S.FETCHING)] == [instance_id]
    else:
        failed = await rig.shown_as(S.FAILED)
        assert failed.instance_id == instance_id
        assert failed.epoch == rig.epoch
        await rig.until(lambda: rig.released)
        await rig.passing(rig.waited, lambda: rig.instances(S.FETCHING))
        assert not is_commanded(rig, instance_id)
    assert rig.released == released
    async with rig.owner.unit_of_work() as work:
        await work.connection.execute(delete(tables.grants))


class Cache:
    """Answers one reservation after the other, when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Reserve] = []
        self.answers: list[Reserved] = []
        self.released: list[GrantId] = []
        self.said_first: list[GrantSettled] = []
        self.written = 0
        self.client = RoomClient(self, Epoch(1), self, lambda _: ())

    async def request(self, _subject: str, message: Reserve, *_: Any, **__: Any) -> Reserved:
        self.asked.append(message)
        for word in self.said_first:
            self.client.hear(word)
        return self.answers[len(self.asked) - 1]

    def write_now(self) -> None:
        self.written = len(self.asked)

    def check(self) -> None:
        """The lease holds."""

    def release(self, grant_id: GrantId) -> None:
        self.released.append(grant_id)

    async def promise(self) -> room.Room:
        one = instance("m", "i0")
        return await self.client.promise(one, model("m"), one.placements[0])


def promised(grant_id: str) -> Reserved:
    return Reserved(grant_id=GrantId(grant_id), written=False)


def word(grant_id: str, code: str = "", instance_id: str = "i0") -> GrantSettled:
    return GrantSettled(
        grant_id=GrantId(grant_id),
        instance_id=InstanceId(instance_id),
        worker_id=WorkerId("w0"),
        code=code,
    )


async def test_what_becomes_of_a_promise_may_be_heard_before_it(patient: None) -> None:
    cache = Cache()
    cache.answers, cache.said_first = [promised("g")], [word("g")]
    asked = await cache.promise()
    await cache.client.until_written(asked)
    assert cache.asked[0].promise
    assert cache.written == 1, "before anything else is sent"


async def test_the_first_word_of_a_grant_counts_and_no_other_grants(patient: None) -> None:
    cache = Cache()
    cache.answers = [promised("g")]
    asked = await cache.promise()
    waits = asyncio.create_task(cache.client.until_written(asked))
    for other in (word("earlier", "not_sole"), word("g", instance_id="i1")):
        cache.client.hear(other)
        await asyncio.wait({waits}, timeout=0)
        assert not waits.done()
    cache.client.hear(word("g", "database_unavailable"))
    cache.client.hear(word("g"))
    with pytest.raises(DatabaseUnavailable):
        await waits
    await cache.client.until_written(room.Room(ask=asked.ask, granted=Reserved(grant_id="g")))


async def test_words_of_starts_that_are_over_are_not_kept() -> None:
    cache = Cache()
    cache.answers = [promised("g")]
    asked = await cache.promise()
    assert len(cache.client._promised) == 1
    del asked
    assert not cache.client._promised
    cache.client.hear(word("g"))


async def test_a_cache_of_the_release_before_answers_when_its_row_is_there(patient: None) -> None:
    cache = Cache()
    old = msgspec.json.decode(b'{"grant_id": "g"}', type=Reserved)
    cache.answers = [old]
    await cache.client.until_written(await cache.promise())
    assert len(cache.asked) == 1
