"""The short ways of the bus's client: what takes them arrives as what does not, and in order."""

import asyncio

import msgspec
import nats.errors
import pytest

from pilotlight.common.errors import BusUnavailable, NotFound
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.nats_client import WRITTEN_SOON_BYTES
from pilotlight.common.testing import ConnectBus, until

pytestmark = pytest.mark.anyio

DEADLINE_S = 10.0


class Note(msgspec.Struct, frozen=True):
    number: int
    text: str = ""


async def echo(note: Note) -> Note:
    return note


async def test_order_holds_where_more_is_published_than_is_written_at_once(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    """Small messages take the short way, large ones between them the one that waits."""
    heard: list[int] = []
    done = asyncio.Event()

    async def listen(note: Note) -> None:
        heard.append(note.number)
        if note.number == 199:
            done.set()

    other = await connect_bus("other")
    await other.subscribe("v1.note", Note, listen, binary=True)
    large = "x" * (WRITTEN_SOON_BYTES // 2)
    for number in range(200):
        text = large if number % 7 == 3 else ""
        await bus.publish("v1.note", Note(number=number, text=text), binary=True)
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert heard == list(range(200))


async def test_what_is_heard_at_once_is_heard_in_order_whatever_listeners_raise(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    heard: list[int] = []
    done = asyncio.Event()

    def listen(note: Note) -> None:
        heard.append(note.number)
        if note.number == 49:
            done.set()
        if note.number % 5 == 0:
            raise ValueError

    other = await connect_bus("other")
    subscription = await bus.hear("v1.heard", Note, listen)
    for number in range(50):
        # What cannot be read is dropped, and the next is heard.
        await other.publish("v1.heard", "no note")
        assert other.publish_soon("v1.heard", Note(number=number))
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert heard == list(range(50))
    await subscription.end()
    await other.publish("v1.heard", Note(number=50))
    assert await echoed(bus, other) == Note(1)
    assert heard == list(range(50))


async def echoed(bus: NatsBus, other: NatsBus) -> Note:
    """By now everything that was sent before has come."""
    await bus.serve("v1.echo", Note, echo)
    return await other.request("v1.echo", Note(number=1), Note, deadline_s=DEADLINE_S)


async def test_a_request_is_answered_at_once_or_by_its_handler(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    tasks: list[str] = []

    async def answer(note: Note) -> Note:
        if note.number == 3:
            raise NotFound("there is no third")
        return Note(number=note.number, text="by a task")

    def at_once(note: Note) -> Note | None:
        tasks.extend(task.get_name() for task in asyncio.all_tasks())
        if note.number == 2:
            raise ValueError
        return Note(number=note.number, text="at once") if note.number == 1 else None

    other = await connect_bus("other")
    await bus.serve("v1.both", Note, answer, at_once=at_once)
    texts = [
        (await other.request("v1.both", Note(number=number), Note, deadline_s=DEADLINE_S)).text
        for number in (0, 1, 2)
    ]
    assert texts == ["by a task", "at once", "by a task"]
    assert "serve v1.both" not in tasks
    with pytest.raises(NotFound):
        await other.request("v1.both", Note(number=3), Note, deadline_s=DEADLINE_S)


async def test_what_somebody_waits_for_is_written_before_anything_else_runs(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    heard: list[int] = []
    other = await connect_bus("other")
    subscription = await bus.hear("v1.now", Note, lambda note: heard.append(note.number))
    other.write_now()
    assert other.publish_soon("v1.now", Note(number=1))
    assert other.client.pending_data_size > 0
    other.write_now()
    assert other.client.pending_data_size == 0
    assert other.publish_soon("v1.now", Note(number=2))
    await until(lambda: len(heard) == 2)
    assert await echoed(bus, other) == Note(1)
    assert heard == [1, 2]
    await subscription.end()


async def test_answers_that_press_are_written_before_anything_else_runs(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    other, unwritten = await connect_bus("other"), list[int]()

    async def answer(note: Note) -> Note:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: unwritten.append(other.client.pending_data_size))
        return note

    await other.serve("v1.pressing", Note, answer, pressing=True)
    await other.serve("v1.patient", Note, answer)
    for subject in ("v1.pressing", "v1.patient"):
        assert await bus.request(subject, Note(number=1), Note, deadline_s=DEADLINE_S)
    pressing, patient = unwritten
    assert pressing == 0 < patient


async def test_nothing_is_published_soon_without_a_connection(
    bus: NatsBus, connect_bus: ConnectBus
) -> None:
    other = await connect_bus("other")
    await other.close()
    assert not other.publish_soon("v1.late", Note(number=1))
    assert bus.publish_soon("v1.late", Note(number=1))


async def test_what_would_break_the_protocol_is_not_written(bus: NatsBus) -> None:
    heard: list[str] = []
    done = asyncio.Event()

    async def on_message(msg: object) -> None:
        headers = getattr(msg, "headers", None) or {}
        heard.append(headers.get("A", ""))
        if headers.get("A") == "last":
            done.set()

    client = bus.client
    await client.subscribe("v1.raw", cb=on_message)
    with pytest.raises(nats.errors.BadSubjectError):
        await client.publish("v1.raw 0\r\nPUB v1.raw", b"")
    with pytest.raises(nats.errors.BadSubjectError):
        await client.publish("", b"")
    # nats-py makes one line of it.
    await client.publish("v1.raw", b"", headers={"A": "one\r\nB: two"})
    await client.publish("v1.raw", b"", headers={"A": "last"})
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert len(heard) == 2
    assert "B: two" in heard[0]


async def test_a_served_subject_that_ended_is_answered_no_more(bus: NatsBus) -> None:
    served = await bus.serve("v1.gone", Note, echo)
    assert await bus.request("v1.gone", Note(number=1), Note, deadline_s=DEADLINE_S) == Note(1)
    await served.end()
    with pytest.raises(BusUnavailable):
        await bus.request("v1.gone", Note(number=2), Note, deadline_s=DEADLINE_S)
