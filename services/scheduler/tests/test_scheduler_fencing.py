"""A leader whose lease has run out says nothing more: to workers, loaders, gateways, or the
cache.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import NotLeader
from pilotlight.common.messages.demand import NEVER_FITS_SUBJECT
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.plan import Holds, NodeTold, WorkerTold
from pilotlight.policy.ids import Epoch, InstanceId
from pilotlight.policy.liveness import DEAD_AFTER_S
from pilotlight.policy.phase import Moment
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import instance, model
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.publisher import InstancePublisher
from pilotlight.scheduler.room import RoomClient
from pilotlight.scheduler.teller import Teller

pytestmark = pytest.mark.anyio


class Said:
    """A bus and a bucket that remember what was said."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.written = 0
        """So many of them before anything else could be said."""
        self.asked: list[Any] = []

    async def publish(self, subject: str, message: object, *, sent: Moment | None = None) -> None:
        self.words.append(subject)

    async def request(
        self, subject: str, message: object, reply_type: type[Any], *, deadline_s: float
    ) -> Any:
        self.words.append(subject)
        self.asked.append(message)
        return None

    def write_now(self) -> None:
        self.written = len(self.words)

    async def put(self, key: str, value: object, *, sent: Moment | None = None) -> None:
        self.words.append(f"put {key}")

    async def delete(self, key: str) -> None:
        self.words.append(f"delete {key}")

    async def watch(
        self, value_type: type[Any], on_change: Callable[[str, Any], Awaitable[None]]
    ) -> None:
        raise AssertionError


class Term:
    """A lease that the test ends."""

    over = False

    def check(self) -> None:
        if self.over:
            raise NotLeader

    def instance(self, instance_id: InstanceId) -> None:
        return None


def an_instance() -> Instance:
    return instance("m", "i0", state=InstanceState.READY)


async def test_commands_end_with_the_lease() -> None:
    said, term, one = Said(), Term(), an_instance()
    teller = Teller(said, Epoch(1), term, ManualClock())
    book, placement = Book(), one.placements[0]
    book.put(Record(instance=one, model=model(one.model)))
    await teller.dispatch(one, book, {})
    assert len(said.words) == 2
    term.over = True
    with pytest.raises(NotLeader):
        await teller.dispatch(one, book, {})
    with pytest.raises(NotLeader):
        await teller.tell_worker(WorkerTold(worker_id=placement.worker_id, holds=()), {})
    with pytest.raises(NotLeader):
        await teller.tell_node(NodeTold(node_id=placement.node_id, fetches=()), {})
    assert len(said.words) == 2


async def test_a_start_that_is_alone_is_told_before_any_other_task_runs() -> None:
    said, one, book = Said(), an_instance(), Book()
    teller = Teller(said, Epoch(1), Term(), ManualClock())
    book.put(Record(instance=one, model=model(one.model)))
    with pytest.raises(StopIteration):
        teller.dispatch(one, book, {}, alone=True).send(None)
    assert len(said.words) == said.written == 2
    beside_others = teller.dispatch(one, book, {})
    assert beside_others.send(None) is None, "it waits for them first"
    assert len(said.words) == 2
    beside_others.close()


async def test_of_starts_of_one_moment_each_worker_is_told_once() -> None:
    said, term, book = Said(), Term(), Book()
    teller = Teller(said, Epoch(1), term, ManualClock())
    ones = [replace(an_instance(), instance_id=InstanceId(f"i{at}")) for at in range(3)]
    book.put(*(Record(instance=one, model=model(one.model)) for one in ones))
    await asyncio.gather(*(teller.dispatch(one, book, {}) for one in ones))
    assert len(said.words) == 2, "its node, and it"
    placement = ones[0].placements[0]
    told = WorkerTold(worker_id=placement.worker_id, holds=())
    await teller.tell_all(Holds(workers=(told,)), {}, {})
    assert len(said.words) == 2, "a turn that began before them would have them undone"
    sent = teller.take_sent()
    assert list(sent.nodes) == [placement.node_id]
    (known,) = sent.workers.values()
    assert [one[0] for one in known.essence] == ["i0", "i1", "i2"]
    await teller.tell_all(Holds(workers=(told,)), {}, {})
    assert len(said.words) == 3
    assert teller.take_sent().workers == {}


async def test_gateways_are_told_of_what_never_fits_once_every_worker_was_heard() -> None:
    said, term, clock = Said(), Term(), ManualClock()
    teller = Teller(said, Epoch(1), term, clock)
    await teller.tell_never_fits(model("m"), "it is too large")
    assert said.words == []
    clock.advance(DEAD_AFTER_S)
    await teller.tell_never_fits(model("m"), "it is too large")
    assert said.words == [NEVER_FITS_SUBJECT]
    term.over = True
    with pytest.raises(NotLeader):
        await teller.tell_never_fits(model("m"), "it is too large")


async def test_the_board_ends_with_the_lease() -> None:
    said, term, one = Said(), Term(), an_instance()
    publisher = InstancePublisher(said, ManualClock(), term)
    publisher.publish(one)
    term.over = True
    with pytest.raises(NotLeader):
        await publisher.run()
    publisher = InstancePublisher(said, ManualClock(), term)
    await publisher._on_value("left-by-another", one)
    with pytest.raises(NotLeader):
        await publisher.run()
    assert said.words == []


async def test_for_a_start_ahead_everything_on_the_device_stays() -> None:
    said, one, owed = Said(), an_instance(), InstanceId("owed")
    room = RoomClient(said, Epoch(1), Term(), lambda _: (owed,))
    stays = (InstanceId("idle"), owed)
    await room.reserve(one, model(one.model), one.placements[0], stays, free_room=True)
    assert [ask.protected for ask in said.asked] == [(owed, InstanceId("idle"))]
    assert [ask.free_room for ask in said.asked] == [True]


async def test_no_room_is_asked_for_after_the_lease() -> None:
    said, term, one = Said(), Term(), an_instance()
    room = RoomClient(said, Epoch(1), term, lambda _: ())
    await room.reserve(one, model(one.model), one.placements[0])
    term.over = True
    with pytest.raises(NotLeader):
        await room.reserve(one, model(one.model), one.placements[0])
    assert said.words == ["v1.cache.reserve"]
