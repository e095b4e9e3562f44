"""The newest epoch is known before anything is commanded under it, and nothing older ever takes its
place.
"""

import asyncio
from typing import Any

import pytest

from pilotlight.common.buckets import LEADER, Bucket, Found
from pilotlight.common.bus import Bus
from pilotlight.common.errors import BusUnavailable, NotLeader
from pilotlight.common.messages.hold import LEADING_KEY, Leading
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler.announcement import Announcer, announce
from pilotlight.scheduler.world import World

pytestmark = pytest.mark.anyio


def leads() -> None:
    """The lease is held."""


def over() -> None:
    raise NotLeader


class Interrupted:
    """A bucket, and what happens between its answer and the next write."""

    def __init__(self, bucket: Bucket, *, refusals: int = 0) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.refusals = refusals
        self.reads = 0
        self._bucket = bucket

    async def get(self, key: str, value_type: type[Any]) -> Found[Any]:
        if self.refusals:
            self.refusals -= 1
            raise BusUnavailable
        self.reads += 1
        found = await self._bucket.get(key, value_type)
        self.asked.set()
        await self.go_on.wait()
        return found

    async def replace(self, key: str, value: object, revision: int) -> None:
        await self._bucket.replace(key, value, revision)


async def announced(bucket: Bucket) -> Leading | None:
    return (await bucket.get(LEADING_KEY, Leading)).value


async def test_epochs_only_rise(bus: Bus) -> None:
    bucket = await bus.bucket(LEADER)
    assert await announce(bucket, Epoch(3), leads) == 3
    assert await announce(bucket, Epoch(5), leads) == 5
    assert await announce(bucket, Epoch(4), leads) == 5
    assert await announce(bucket, Epoch(5), leads) == 5
    assert await announced(bucket) == Leading(epoch=Epoch(5))


async def test_one_that_was_stopped_between_reading_and_writing_undoes_nothing(bus: Bus) -> None:
    bucket = await bus.bucket(LEADER)
    stopped = Interrupted(bucket)
    old = asyncio.create_task(announce(stopped, Epoch(7), leads))
    await asyncio.wait_for(stopped.asked.wait(), 10)
    assert await announce(bucket, Epoch(8), leads) == 8
    stopped.go_on.set()
    assert await asyncio.wait_for(old, 10) == 8
    assert await announced(bucket) == Leading(epoch=Epoch(8))


async def test_what_nats_does_not_take_is_said_again_while_the_lease_lasts(bus: Bus) -> None:
    bucket = await bus.bucket(LEADER)
    lost = Interrupted(bucket, refusals=2)
    lost.go_on.set()
    assert await asyncio.wait_for(announce(lost, Epoch(2), leads), 10) == 2
    with pytest.raises(NotLeader):
        await announce(bucket, Epoch(9), over)
    assert await announced(bucket) == Leading(epoch=Epoch(2))


async def test_reconnects_are_followed_by_one_announcement_at_a_time(bus: Bus) -> None:
    bucket = await bus.bucket(LEADER)
    slow = Interrupted(bucket)
    announcer, known = Announcer(slow, Epoch(4), leads), asyncio.Queue[Epoch]()
    running = asyncio.create_task(announcer.run(known.put_nowait))
    await asyncio.wait_for(slow.asked.wait(), 10)
    for _ in range(10):
        announcer.again()
        await bucket.delete(LEADING_KEY)
    assert slow.reads == 1
    slow.go_on.set()
    assert [await asyncio.wait_for(known.get(), 10) for _ in range(2)] == [4, 4]
    assert slow.reads <= 3, "one that came too late, and one for all reconnects"
    assert await announced(bucket) == Leading(epoch=Epoch(4))
    assert await announce(bucket, Epoch(6), leads) == 6
    announcer.again()
    with pytest.raises(NotLeader, match="epoch 6"):
        await asyncio.wait_for(running, 10)
    assert known.get_nowait() == 6


async def test_nonsense_is_replaced(bus: Bus) -> None:
    bucket = await bus.bucket(LEADER)
    await bucket.put(LEADING_KEY, ["nonsense"])
    assert await announce(bucket, Epoch(2), leads) == 2
    assert await announced(bucket) == Leading(epoch=Epoch(2))


def test_the_next_term_is_above_what_was_announced() -> None:
    world = World(listening_since_s=0.0)
    world.hear_epoch(Epoch(12))
    world.hear_epoch(Epoch(3))
    assert world.epoch_seen() == 12
