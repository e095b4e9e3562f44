"""What ``FaultyBus`` does to messages, on a real server: each fault that it may deal out, and none
that it may not.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pilotlight.common.buckets import Found
from pilotlight.common.bus import Bus
from pilotlight.common.errors import BusUnavailable, DeadlineExceeded, NotFound
from pilotlight.common.fault_schedule import Fault, FaultRates, FaultSchedule
from pilotlight.common.faulty_bus import FaultyBus
from pilotlight.common.messages.room import Release, Released
from pilotlight.common.testing import ConnectBus, until
from pilotlight.policy.ids import GrantId

pytestmark = pytest.mark.anyio

SUBJECT = "v1.test.things"


def thing(name: str) -> Release:
    return Release(grant_id=GrantId(name))


class Heard:
    """A listener, and a server of requests."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def listen(self, message: Release) -> None:
        self.names.append(message.grant_id)

    async def answer(self, message: Release) -> Released:
        self.names.append(message.grant_id)
        if message.grant_id == "unknown":
            raise NotFound("there is none")
        return Released()


@pytest.fixture
async def clear(connect_bus: ConnectBus) -> Bus:
    return await connect_bus("clear")


@pytest.fixture
async def make(connect_bus: ConnectBus) -> Callable[..., Any]:
    async def faulty(**rates: float) -> FaultyBus:
        return FaultyBus(await connect_bus("faulty"), "test", FaultSchedule(1, FaultRates(**rates)))

    return faulty


async def test_what_takes_messages_at_once_has_the_same_faults(
    clear: Bus, make: Callable[..., Any]
) -> None:
    heard, asked = Heard(), list[str]()

    def listen(message: Release) -> None:
        heard.names.append(message.grant_id)

    def at_once(message: Release) -> Released:
        asked.append(message.grant_id)
        return Released()

    twice = await make(twice=1.0)
    await twice.hear(SUBJECT, Release, listen)
    assert clear.publish_soon(SUBJECT, thing("one"))
    await until(lambda: heard.names == ["one", "one"])
    await twice.serve("v1.test.at_once", Release, heard.answer, at_once=at_once)
    await clear.request("v1.test.at_once", thing("asked"), Released, deadline_s=5.0)
    async with twice.breaking_off():
        assert not twice.publish_soon(SUBJECT, thing("unsent"))
        with pytest.raises(BusUnavailable):
            await clear.request("v1.test.at_once", thing("away"), Released, deadline_s=5.0)
    assert asked == ["asked"]


def test_a_seed_says_what_becomes_of_the_nth_message_of_an_edge() -> None:
    rates = FaultRates(lost=0.2, late=0.2, twice=0.2, overtaken=0.2)

    def drawn(seed: int, *between: str) -> list[Any]:
        schedule = FaultSchedule(seed, rates)
        found = []
        for _ in range(50):
            found.append(schedule.draw("a"))
            for other in between:
                schedule.draw(other)
        return found

    assert drawn(1) == drawn(1, "b", "c")
    assert drawn(1) != drawn(2)
    assert {one.fault for one in drawn(1)} == {None, *Fault}
    schedule = FaultSchedule(1, rates)
    first = [schedule.draw("a") for _ in range(50)]
    schedule.begin(1, rates)
    assert [schedule.draw("a") for _ in range(50)] == first
    schedule.calm()
    assert {schedule.draw("a").fault for _ in range(50)} == {None}


@pytest.mark.parametrize("rates", [{"lost": 0.6, "late": 0.5}, {"lost": -0.1}])
def test_shares_that_cannot_be(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        FaultRates(**rates)


async def test_without_faults_it_is_the_bus(make: Any, clear: Bus) -> None:
    bus, heard, others = await make(), Heard(), Heard()
    assert isinstance(bus, Bus)
    assert bus.connected
    subscription = await bus.subscribe(SUBJECT, Release, heard.listen)
    await bus.serve("v1.test.ask", Release, others.answer)
    for number in range(20):
        await clear.publish(SUBJECT, thing(str(number)))
    await until(lambda: len(heard.names) == 20)
    assert heard.names == [str(number) for number in range(20)]
    assert await clear.request("v1.test.ask", thing("x"), Released, deadline_s=10.0) == Released()
    await subscription.end()
    await clear.publish(SUBJECT, thing("late"))
    assert await bus.request("v1.test.ask", thing("y"), Released, deadline_s=10.0) == Released()
    assert heard.names[-1] == "19"


async def test_lost_notifications_are_lost_for_this_subscriber_alone(make: Any, clear: Bus) -> None:
    bus, heard, others = await make(lost=1.0), Heard(), Heard()
    await bus.subscribe(SUBJECT, Release, heard.listen)
    await clear.subscribe(SUBJECT, Release, others.listen)
    await bus.publish(SUBJECT, thing("a"))
    await until(lambda: others.names == ["a"])
    assert heard.names == []


async def test_late_notifications_keep_their_order(make: Any, clear: Bus) -> None:
    bus, heard = await make(late=0.5, max_late_s=0.02), Heard()
    await bus.subscribe(SUBJECT, Release, heard.listen)
    for number in range(20):
        await clear.publish(SUBJECT, thing(str(number)))
    await until(lambda: len(heard.names) == 20)
    assert heard.names == [str(number) for number in range(20)]


async def test_overtaken_notifications_come_after_later_ones(make: Any, clear: Bus) -> None:
    bus, heard = await make(overtaken=0.3, max_late_s=0.05), Heard()
    await bus.subscribe(SUBJECT, Release, heard.listen)
    for number in range(20):
        await clear.publish(SUBJECT, thing(str(number)))
    await until(lambda: len(heard.names) == 20)
    assert heard.names != sorted(heard.names, key=int)
    assert sorted(heard.names, key=int) == [str(number) for number in range(20)]


async def test_notifications_twice(make: Any, clear: Bus) -> None:
    bus, heard = await make(twice=1.0, max_late_s=0.02), Heard()
    subscription = await bus.subscribe(SUBJECT, Release, heard.listen)
    await clear.publish(SUBJECT, thing("a"))
    await until(lambda: heard.names == ["a", "a"])
    await clear.publish(SUBJECT, thing("b"))
    await until(lambda: "b" in heard.names)
    # What would come later does not come after the end.
    await subscription.end()
    count = len(heard.names)
    assert not subscription._tasks
    assert len(heard.names) == count


async def test_a_lost_request_and_a_lost_reply_look_alike(make: Any, clear: Bus) -> None:
    bus, heard = await make(lost=1.0), Heard()
    await clear.serve("v1.test.ask", Release, heard.answer)
    for number in range(8):
        with pytest.raises(DeadlineExceeded):
            await bus.request("v1.test.ask", thing(str(number)), Released, deadline_s=0.05)
    assert 0 < len(heard.names) < 8


async def test_a_request_twice_is_carried_out_twice(make: Any, clear: Bus) -> None:
    bus, heard = await make(twice=1.0, max_late_s=0.02), Heard()
    await clear.serve("v1.test.ask", Release, heard.answer)
    assert await bus.request("v1.test.ask", thing("a"), Released, deadline_s=10.0) == Released()
    await until(lambda: heard.names == ["a", "a"])


async def test_late_requests_are_answered_also_with_an_error(make: Any, clear: Bus) -> None:
    bus, heard = await make(late=1.0, max_late_s=0.02), Heard()
    await clear.serve("v1.test.ask", Release, heard.answer)
    for _ in range(4):
        assert await bus.request("v1.test.ask", thing("a"), Released, deadline_s=10.0) == Released()
        with pytest.raises(NotFound, match="there is none"):
            await bus.request("v1.test.ask", thing("unknown"), Released, deadline_s=10.0)
    with pytest.raises(BusUnavailable, match="nobody answers"):
        await bus.request("v1.test.nobody", thing("a"), Released, deadline_s=10.0)


async def test_a_write_that_is_not_confirmed_may_have_been_made(make: Any, clear: Bus) -> None:
    bus = await make(lost=1.0, max_late_s=0.01)
    bucket = await bus.bucket("things")
    for number in range(8):
        with pytest.raises(BusUnavailable):
            await bucket.put(f"k{number}", thing(str(number)))
    seen: dict[str, Any] = {}

    async def note(key: str, value: Release | None) -> None:
        seen[key] = value

    real = await clear.bucket("things")
    await real.put("last", thing("last"))
    watching = asyncio.create_task(real.watch(Release, note))
    await until(lambda: "last" in seen)
    watching.cancel()
    assert 0 < len(seen) - 1 < 8


async def test_a_replacement_that_is_not_confirmed_is_found_when_it_was_made(
    make: Any, clear: Bus
) -> None:
    bus = await make(lost=0.5, max_late_s=0.01)
    bucket, real = await bus.bucket("things"), await clear.bucket("things")
    failures = 0
    for number in range(8):
        while True:
            try:
                found = await bucket.get("k", Release)
                if found.value == thing(str(number)):
                    break
                await bucket.replace("k", thing(str(number)), found.revision)
            except BusUnavailable:
                failures += 1
    assert failures
    assert await real.get("k", Release) == Found(thing("7"), 8)


async def test_a_watch_gets_every_last_value_whatever_happens(make: Any, clear: Bus) -> None:
    bus = await make(lost=0.3, late=0.3, twice=0.2, overtaken=0.2, max_late_s=0.01)
    seen: list[tuple[str, str | None]] = []

    async def note(key: str, value: Release | None) -> None:
        seen.append((key, value.grant_id if value is not None else None))

    real = await clear.bucket("things")
    watching = asyncio.create_task((await bus.bucket("things")).watch(Release, note))
    for number in range(30):
        await real.put(f"k{number % 3}", thing(str(number)))
    await real.delete("k0")
    await until(lambda: dict(seen) == {"k0": None, "k1": "28", "k2": "29"})
    watching.cancel()
    assert len(seen) > 31, "nothing was repeated"
    # Of one key an older value comes again only together with everything that was last then, so the
    # end is right.
    assert seen[-1][1] in (None, "29")


async def test_a_break_is_deaf_and_dumb_and_told_of_afterwards(make: Any, clear: Bus) -> None:
    bus, heard, others, told = await make(), Heard(), Heard(), asyncio.Event()

    async def again() -> None:
        told.set()

    bus.on_reconnect(again)
    await bus.subscribe(SUBJECT, Release, heard.listen)
    await bus.serve("v1.test.ask", Release, heard.answer)
    await clear.subscribe("v1.test.out", Release, others.listen)
    async with bus.breaking_off():
        assert not bus.connected
        await bus.publish("v1.test.out", thing("kept"))
        await clear.publish(SUBJECT, thing("missed"))
        with pytest.raises(BusUnavailable):
            await clear.request("v1.test.ask", thing("a"), Released, deadline_s=10.0)
        with pytest.raises(BusUnavailable, match="broken off"):
            await bus.request("v1.test.ask", thing("a"), Released, deadline_s=0.05)
        with pytest.raises(BusUnavailable):
            await (await bus.bucket("things")).put("k", thing("a"))
        assert others.names == []
        assert not told.is_set()
    await until(lambda: others.names == ["kept"])
    await until(told.is_set)
    assert heard.names == []
    assert await clear.request("v1.test.ask", thing("b"), Released, deadline_s=10.0) == Released()


async def test_an_event_that_is_not_confirmed(bus: Bus) -> None:
    faulty = FaultyBus(bus, "test", FaultSchedule(1, FaultRates(lost=1.0, max_late_s=0.01)))
    with pytest.raises(BusUnavailable, match="did not confirm"):
        await faulty.publish_event("v1.event.test.thing", "id-1", thing("a"))
