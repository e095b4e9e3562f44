"""How a group gets the room to become one worker, on a real bus, with the test as the cache."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

import pytest

from pilotlight.common.bus import Bus
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import HostPoolFull, PilotlightError
from pilotlight.common.messages.room import RESERVE_SUBJECT, Reserve, Reserved
from pilotlight.common.waiting import cancel_all
from pilotlight.policy.cluster import NodeFacts
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.growing import plan_growth
from pilotlight.policy.control.plan import Room
from pilotlight.policy.control.reconcile import moved
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Epoch, GrantId, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.model import Stage
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import NOW_S, instance, model
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.grower import Grower
from pilotlight.scheduler.room import RoomClient

pytestmark = pytest.mark.anyio

WHOLE, FRONT, BACK = Stage(0, 4), Stage(0, 2), Stage(2, 4)
MODEL = model()
FULL_BYTES = stage_room(MODEL, WHOLE).least_bytes
"""The whole model, and some KV."""
LARGE = model(part_bytes=1000)
"""Of which KV is a small part."""


@dataclass(eq=False)
class Rig:
    """A grower with a book, as the leader's term has it, and the cache that it asks."""

    bus: Bus
    book: Book = field(default_factory=Book)
    refusals: list[PilotlightError] = field(default_factory=list[PilotlightError])
    full: set[WorkerId] = field(default_factory=set[WorkerId])
    asked: list[Reserve] = field(default_factory=list[Reserve])
    released: list[GrantId] = field(default_factory=list[GrantId])
    tasks: list[asyncio.Task[None]] = field(default_factory=list["asyncio.Task[None]"])
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.grower = Grower(
            book=self.book,
            room=RoomClient(self.bus, Epoch(1), self, lambda _: ()),
            effects=self,
            clock=SystemClock(),
            spawn=lambda work, name: self.tasks.append(asyncio.create_task(work, name=name)),
            wake=self.woken.set,
        )

    async def on_reserve(self, ask: Reserve) -> Reserved:
        self.asked.append(ask)
        if self.refusals:
            raise self.refusals.pop(0)
        if ask.worker_id in self.full:
            raise HostPoolFull("the pool is full")
        return Reserved(grant_id=GrantId(f"grown-{len(self.asked)}"))

    # Effects.

    def check(self) -> None:
        """It leads."""

    def instance(self, instance_id: InstanceId) -> Instance | None:
        record = self.book.get(instance_id)
        return record.instance if record is not None else None

    def is_awaited(self, model: ModelName) -> bool:
        return False

    def nodes(self) -> Mapping[NodeId, NodeFacts]:
        return {}

    def release(self, grant_id: GrantId) -> None:
        self.released.append(grant_id)


@pytest.fixture
async def rig(bus: Bus) -> AsyncIterator[Rig]:
    made = Rig(bus)
    serving = await bus.serve(RESERVE_SUBJECT, Reserve, made.on_reserve)
    one = instance(state=InstanceState.READY, since_s=NOW_S)
    places = tuple(
        replace(
            one.placements[0],
            worker_id=WorkerId(f"w{at}"),
            stage=stage,
            device_bytes=40 if at else FULL_BYTES,
            grant_id=GrantId(f"g{at}"),
        )
        for at, stage in enumerate((FRONT, BACK))
    )
    made.book.put(Record(instance=replace(one, placements=places), model=MODEL))
    yield made
    await cancel_all(made.tasks)
    await serving.end()


def group(rig: Rig) -> Instance:
    (record,) = rig.book.rows()
    return record.instance


def begin(rig: Rig) -> None:
    rig.grower.begin(plan_growth(rig.book.rows()))


async def test_a_group_is_written_down_when_it_has_room_for_all_parts(rig: Rig) -> None:
    """One task asks, however often it is ordered, and again when it is refused."""
    rig.refusals = [HostPoolFull("the pool is full")]
    begin(rig)
    begin(rig)
    assert rig.grower.take() == ()
    await rig.woken.wait()
    assert len(rig.tasks) == 1
    assert [(one.worker_id, one.generation, one.host_parts) for one in rig.asked] == [
        ("w0", group(rig).generation + 1, tuple(range(6)))
    ] * 2
    (growth,) = rig.grower.take()
    after = moved(group(rig), growth.change, Epoch(1), NOW_S)
    assert after.state is InstanceState.CONSOLIDATING
    assert after.generation == rig.asked[0].generation
    assert [(one.stage, one.grant_id) for one in after.placements] == [
        (WHOLE, "grown-2"),
        (BACK, "g1"),
    ]
    assert growth.decision.reasons == (growth.change.reason,)
    assert rig.released == []


async def test_room_for_a_group_that_has_ended_is_given_back(rig: Rig) -> None:
    begin(rig)
    await rig.woken.wait()
    drained = replace(group(rig), state=InstanceState.DRAINING)
    rig.book.put(Record(instance=drained, model=MODEL))
    assert rig.grower.take() == ()
    assert rig.released == ["grown-1"]


async def test_nothing_more_is_asked_for_a_group_that_fails(rig: Rig) -> None:
    """A later group of the same kind is asked for anew."""
    rig.refusals = [HostPoolFull("the pool is full")]
    before = group(rig)
    begin(rig)
    rig.book.put(Record(instance=replace(before, state=InstanceState.FAILED), model=MODEL))
    await asyncio.wait(rig.tasks)
    assert len(rig.asked) <= 1
    rig.refusals = []
    rig.book.put(Record(instance=before, model=MODEL))
    begin(rig)
    await rig.woken.wait()
    (growth,) = rig.grower.take()
    assert growth.change.events == (InstanceEvent.CONSOLIDATION_STARTED,)


def become_shorter(rig: Rig) -> Room:
    """Four stages, of which two have room for half of the model."""
    one = group(rig)
    places = tuple(
        replace(
            one.placements[0],
            worker_id=WorkerId(f"w{at}"),
            stage=Stage(at, at + 1),
            device_bytes=stage_room(LARGE, Stage(at, at + 1)).least_bytes,
            grant_id=GrantId(f"g{at}"),
        )
        for at in range(4)
    )
    rig.book.put(Record(instance=replace(one, placements=places), model=LARGE))
    half = stage_room(LARGE, BACK).least_bytes
    return lambda worker_id: (half if worker_id in ("w0", "w2") else 0, 1)


async def test_a_shorter_pipeline_is_written_down_when_all_of_its_workers_have_room(
    rig: Rig,
) -> None:
    room = become_shorter(rig)
    rig.grower.begin(plan_growth(rig.book.rows(), room))
    await rig.woken.wait()
    (growth,) = rig.grower.take()
    assert [one.worker_id for one in rig.asked] == ["w0", "w2"]
    after = moved(group(rig), growth.change, Epoch(1), NOW_S)
    assert after.state is InstanceState.CONSOLIDATING
    assert [(one.stage, one.grant_id) for one in after.placements] == [
        (FRONT, "grown-1"),
        (Stage(1, 2), "g1"),
        (BACK, "grown-2"),
        (Stage(3, 4), "g3"),
    ]
    assert rig.released == []


async def test_what_one_got_goes_back_where_another_has_no_room(rig: Rig) -> None:
    """And nothing is asked again at once."""
    room = become_shorter(rig)
    rig.full.add(WorkerId("w2"))
    rig.grower.begin(plan_growth(rig.book.rows(), room))
    await asyncio.wait(rig.tasks)
    assert rig.grower.take() == ()
    assert rig.released == ["grown-1"]
    rig.grower.begin(plan_growth(rig.book.rows(), room))
    assert len(rig.tasks) == 1


def become_two(rig: Rig, **changes: object) -> None:
    """Both workers have the room, and are to be instances."""
    one = group(rig)
    places = tuple(replace(place, device_bytes=FULL_BYTES) for place in one.placements)
    one = replace(one, placements=places, targets=2, **changes)
    rig.book.put(Record(instance=one, model=MODEL))


async def test_each_worker_that_is_to_be_an_instance_is_asked_for(rig: Rig) -> None:
    become_two(rig)
    begin(rig)
    await rig.woken.wait()
    (growth,) = rig.grower.take()
    assert [one.worker_id for one in rig.asked] == ["w0", "w1"]
    after = moved(group(rig), growth.change, Epoch(1), NOW_S)
    assert [(one.stage, one.held, one.grant_id) for one in after.placements] == [
        (WHOLE, FRONT, "grown-1"),
        (WHOLE, BACK, "grown-2"),
    ]
    assert after.targets == 2


async def test_the_group_does_not_wait_for_room_of_the_others(rig: Rig) -> None:
    """It is promised no instance more than it got room for, and says so."""
    become_two(rig)
    rig.full.add(WorkerId("w1"))
    begin(rig)
    await rig.woken.wait()
    (growth,) = rig.grower.take()
    after = moved(group(rig), growth.change, Epoch(1), NOW_S)
    assert [one.stage for one in after.placements] == [WHOLE, BACK]
    assert after.targets == 1
    assert "w1 has not got the room" in growth.decision.reasons
    rig.book.put(Record(instance=replace(after, targets=2), model=MODEL))
    begin(rig)
    assert len(rig.asked) == 2, "not asked again at once"
