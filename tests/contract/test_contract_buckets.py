"""Buckets: present values, then changes; one writer at a time for a key."""

import asyncio

import pytest
from bus_messages import Number

from pilotlight.common.buckets import Found
from pilotlight.common.errors import Conflict, MessageUndecodable
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.testing import ConnectBus

pytestmark = pytest.mark.anyio
DEADLINE_S = 10.0


async def test_a_bucket_gives_present_values_then_changes(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    writer = await (await connect_bus("writer")).bucket("numbers")
    for number in range(3):
        await writer.put("a", Number(number=number))
    await writer.put("b", Number(number=7))
    await writer.delete("b")
    changes: asyncio.Queue[tuple[str, Number | None]] = asyncio.Queue()

    async def on_change(key: str, value: Number | None) -> None:
        changes.put_nowait((key, value))

    reader = await bus.bucket("numbers")
    watching = asyncio.create_task(reader.watch(Number, on_change))
    present = [await asyncio.wait_for(changes.get(), DEADLINE_S) for _ in range(2)]
    assert sorted(present, key=lambda change: change[0]) == [("a", Number(number=2)), ("b", None)]
    await writer.put("c", Number(number=1))
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("c", Number(number=1))
    await writer.delete("a")
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("a", None)
    watching.cancel()
    await asyncio.wait({watching})


async def test_a_key_is_replaced_by_who_saw_its_last_value(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    one = await (await connect_bus("one")).bucket("numbers")
    two = await bus.bucket("numbers")
    nothing = await one.get("k", Number)
    assert nothing == Found(None, 0)
    await one.replace("k", Number(number=1), nothing.revision)
    with pytest.raises(Conflict):
        await two.replace("k", Number(number=2), nothing.revision)
    seen = await two.get("k", Number)
    assert seen.value == Number(number=1)
    await one.put("other", Number(number=5))
    await two.replace("k", Number(number=2), seen.revision)
    assert (await one.get("k", Number)).value == Number(number=2)
    await one.delete("k")
    gone = await two.get("k", Number)
    assert gone.value is None
    await two.replace("k", Number(number=3), gone.revision)
    assert (await one.get("k", Number)).value == Number(number=3)
    await two.put("k", "not a number")
    with pytest.raises(MessageUndecodable):
        await one.get("k", Number)


async def test_puts_of_one_key_keep_their_order(bus: NatsBus) -> None:
    bucket = await bus.bucket("numbers")
    seen: list[int] = []
    done = asyncio.Event()

    async def on_change(_: str, value: Number | None) -> None:
        if value is not None:
            seen.append(value.number)
            if value.number == 99:
                done.set()

    watching = asyncio.create_task(bucket.watch(Number, on_change))
    await asyncio.gather(*(bucket.put("k", Number(number=number)) for number in range(100)))
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert seen == sorted(seen)
    watching.cancel()
    await asyncio.wait({watching})
