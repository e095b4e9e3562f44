"""The bus on a real nats-server."""

import asyncio

import msgspec
import nats.errors
import pytest
from bus_messages import Answer, Ask, Number, echo
from nats.aio.msg import Msg

from pilotlight.common import nats_answers, nats_bus
from pilotlight.common.buckets import jetstream
from pilotlight.common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    InternalError,
    MessageTooLarge,
    MessageUndecodable,
    ModelNotFound,
    PilotlightError,
    QueueFull,
    TooManyHeld,
    TransientError,
    all_errors,
)
from pilotlight.common.messages.codec import MAX_PAYLOAD_BYTES
from pilotlight.common.messages.events import Event
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.nats_streams import events_stream
from pilotlight.common.settings import BusSettings, ServiceSettings
from pilotlight.common.telemetry import current_traceparent, span, start_telemetry, stop_telemetry
from pilotlight.common.testing import ConnectBus

pytestmark = pytest.mark.anyio
DEADLINE_S = 10.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_a_request_is_answered(bus: NatsBus, connect_bus: ConnectBus) -> None:
    server = await connect_bus("server")
    await server.serve("v1.echo", Ask, echo)
    assert await bus.request("v1.echo", Ask(text="hé"), Answer, deadline_s=DEADLINE_S) == Answer(
        text="hé"
    )


async def test_each_request_gets_its_own_answer_in_whatever_order_they_come(bus: NatsBus) -> None:
    texts = [str(number) for number in range(64)]
    waiting: dict[str, asyncio.Event] = {}
    all_here = asyncio.Event()

    async def in_turn(ask: Ask) -> Answer:
        turn = waiting[ask.text] = asyncio.Event()
        if len(waiting) == len(texts):
            all_here.set()
        await turn.wait()
        return Answer(text=ask.text)

    await bus.serve("v1.in_turn", Ask, in_turn)
    asking = [
        asyncio.create_task(
            bus.request("v1.in_turn", Ask(text=text), Answer, deadline_s=DEADLINE_S)
        )
        for text in texts
    ]
    await all_here.wait()
    for text in reversed(texts):
        waiting[text].set()
    assert [answer.text for answer in await asyncio.gather(*asking)] == texts


async def test_an_answer_that_comes_too_late_is_no_other_requests(bus: NatsBus) -> None:
    may_answer, answered = asyncio.Event(), asyncio.Event()

    async def slow(message: Msg) -> None:
        await may_answer.wait()
        await bus.client.publish(message.reply, b'{"text":"late"}')
        answered.set()

    await bus.client.subscribe("v1.slow", cb=slow)
    await bus.serve("v1.echo", Ask, echo)
    with pytest.raises(nats.errors.TimeoutError):
        await bus.client.request("v1.slow", b"{}", timeout=0.05)
    may_answer.set()
    await answered.wait()
    told = await bus.request("v1.echo", Ask(text="mine"), Answer, deadline_s=DEADLINE_S)
    assert told.text == "mine"


async def test_nobody_answers(bus: NatsBus) -> None:
    with pytest.raises(BusUnavailable, match=r"v1\.nobody"):
        await bus.request("v1.nobody", Ask(), Answer, deadline_s=DEADLINE_S)


async def test_a_deadline_ends_both_sides(bus: NatsBus) -> None:
    cancelled = asyncio.Event()

    async def never(_: Ask) -> Answer:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    await bus.serve("v1.never", Ask, never)
    with pytest.raises(DeadlineExceeded):
        await bus.request("v1.never", Ask(), Answer, deadline_s=0.5)
    async with asyncio.timeout(DEADLINE_S):
        await cancelled.wait()


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
async def test_every_error_crosses(bus: NatsBus, kind: type[PilotlightError]) -> None:
    async def fail(_: Ask) -> Answer:
        raise kind("what was wrong", retry_after_s=1.5)

    await bus.serve("v1.fail", Ask, fail)
    with pytest.raises(PilotlightError) as caught:
        await bus.request("v1.fail", Ask(), Answer, deadline_s=DEADLINE_S)
    owner = next(base for base in kind.__mro__ if "code" in vars(base))
    assert type(caught.value) is owner
    assert (caught.value.message, caught.value.retry_after_s) == ("what was wrong", 1.5)


async def test_a_bug_is_told_at_once(bus: NatsBus) -> None:
    async def broken(_: Ask) -> Answer:
        raise TimeoutError("of its own, not the deadline")

    await bus.serve("v1.broken", Ask, broken)
    with pytest.raises(InternalError):
        await bus.request("v1.broken", Ask(), Answer, deadline_s=DEADLINE_S)


async def test_an_unknown_code_is_transient(bus: NatsBus) -> None:
    class Newer(TransientError):
        """Of a later release."""

        code = "of_a_later_release"

    async def fail(_: Ask) -> Answer:
        error = TooManyHeld("no")
        error.__class__ = Newer
        raise error

    await bus.serve("v1.fail", Ask, fail)
    with pytest.raises(TransientError):
        await bus.request("v1.fail", Ask(), Answer, deadline_s=DEADLINE_S)


async def test_what_cannot_be_decoded_is_refused(bus: NatsBus) -> None:
    await bus.serve("v1.echo", Number, echo)
    with pytest.raises(MessageUndecodable):
        await bus.request("v1.echo", Ask(text="x"), Answer, deadline_s=DEADLINE_S)
    await bus.serve("v1.echo2", Ask, echo)
    with pytest.raises(MessageUndecodable):
        await bus.request("v1.echo2", Ask(text="x"), Number, deadline_s=DEADLINE_S)


async def test_too_large_messages_are_refused_on_both_ways(bus: NatsBus) -> None:
    async def much(_: Ask) -> Answer:
        return Answer(text="x" * MAX_PAYLOAD_BYTES)

    await bus.serve("v1.much", Ask, much)
    with pytest.raises(MessageTooLarge):
        await bus.request(
            "v1.much", Ask(text="x" * MAX_PAYLOAD_BYTES), Answer, deadline_s=DEADLINE_S
        )
    with pytest.raises(MessageTooLarge):
        await bus.request("v1.much", Ask(), Answer, deadline_s=DEADLINE_S)
    with pytest.raises(MessageTooLarge):
        await bus.publish("v1.much", Ask(text="x" * MAX_PAYLOAD_BYTES), binary=True)


async def test_the_largest_message_passes(bus: NatsBus) -> None:
    size = MAX_PAYLOAD_BYTES - nats_bus.HEADERS_ROOM_BYTES - len('{"text":""}')
    await bus.serve("v1.echo", Ask, echo)
    reply = await bus.request("v1.echo", Ask(text="x" * size), Answer, deadline_s=DEADLINE_S)
    assert len(reply.text) == size


async def test_a_server_refuses_what_it_cannot_take(bus: NatsBus) -> None:
    release = asyncio.Event()

    async def wait(_: Ask) -> Answer:
        await release.wait()
        return Answer(text="done")

    await bus.serve("v1.wait", Ask, wait)
    number = nats_answers.MAX_CONCURRENT_REQUESTS + 3
    asking = [
        asyncio.create_task(bus.request("v1.wait", Ask(), Answer, deadline_s=DEADLINE_S))
        for _ in range(number)
    ]
    refused, _ = await asyncio.wait(asking, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    assert all(isinstance(task.exception(), QueueFull) for task in refused)
    release.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert (
        sum(isinstance(result, Answer) for result in results)
        == nats_answers.MAX_CONCURRENT_REQUESTS
    )
    assert sum(isinstance(result, QueueFull) for result in results) == 3


async def test_queue_groups_share_requests(bus: NatsBus, connect_bus: ConnectBus) -> None:
    served: list[str] = []
    for name in ("a", "b"):
        other = await connect_bus(name)

        async def handle(request: Ask, name: str = name) -> Answer:
            served.append(name)
            return Answer(text=request.text)

        await other.serve("v1.shared", Ask, handle, queue="workers")
    for number in range(40):
        await bus.request("v1.shared", Ask(text=str(number)), Answer, deadline_s=DEADLINE_S)
    assert len(served) == 40
    assert set(served) == {"a", "b"}


async def test_notifications_come_in_order(bus: NatsBus) -> None:
    heard: list[int] = []
    done = asyncio.Event()

    async def listen(message: Number) -> None:
        heard.append(message.number)
        if message.number == 199:
            done.set()
        if message.number % 50 == 0:
            raise ModelNotFound("an error must not end the subscription")

    await bus.subscribe("v1.note.*", Number, listen, binary=True)
    for number in range(200):
        await bus.publish("v1.note.x", Number(number=number), binary=True)
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert heard == list(range(200))


async def test_an_undecodable_notification_is_dropped(bus: NatsBus) -> None:
    heard: asyncio.Queue[Number] = asyncio.Queue()
    await bus.subscribe("v1.note", Number, heard.put)
    await bus.publish("v1.note", Ask(text="not a number"))
    await bus.publish("v1.note", Number(number=1))
    assert await asyncio.wait_for(heard.get(), DEADLINE_S) == Number(number=1)


async def test_an_ended_subscription_lets_its_listener_finish(bus: NatsBus) -> None:
    begun, go_on, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()
    heard: list[int] = []

    async def listen(message: Number) -> None:
        heard.append(message.number)
        begun.set()
        await go_on.wait()
        finished.set()

    subscription = await bus.subscribe("v1.note", Number, listen)
    await bus.publish("v1.note", Number(number=0))
    await bus.publish("v1.note", Number(number=1))
    await begun.wait()
    ending = asyncio.create_task(subscription.end())
    await asyncio.sleep(0)
    go_on.set()
    await ending
    assert finished.is_set()
    await bus.publish("v1.note", Number(number=2))
    await bus.serve("v1.echo", Ask, echo)
    await bus.request("v1.echo", Ask(), Answer, deadline_s=DEADLINE_S)
    assert heard == [0]
    await subscription.end()


async def test_a_listener_may_end_its_own_subscription(bus: NatsBus) -> None:
    ended = asyncio.Event()

    async def listen(_: Number) -> None:
        await subscription.end()
        ended.set()

    subscription = await bus.subscribe("v1.note", Number, listen)
    await bus.publish("v1.note", Number(number=0))
    async with asyncio.timeout(DEADLINE_S):
        await ended.wait()


async def test_closing_lets_requests_finish(connect_bus: ConnectBus, bus: NatsBus) -> None:
    server = await connect_bus("server")
    begun = asyncio.Event()
    go_on = asyncio.Event()

    async def wait(_: Ask) -> Answer:
        begun.set()
        await go_on.wait()
        return Answer(text="done")

    await server.serve("v1.wait", Ask, wait)
    asking = asyncio.create_task(bus.request("v1.wait", Ask(), Answer, deadline_s=DEADLINE_S))
    await begun.wait()
    closing = asyncio.create_task(server.close())
    await asyncio.sleep(0)
    go_on.set()
    assert await asking == Answer(text="done")
    await closing


async def test_the_trace_crosses(bus: NatsBus) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    batches: asyncio.Queue[SpanBatch] = asyncio.Queue()

    async def listen(_: Number) -> None:
        seen.put_nowait(current_traceparent())

    async def handle(request: Ask) -> Answer:
        seen.put_nowait(current_traceparent())
        await bus.publish("v1.note", Number(number=1))
        return Answer(text=request.text)

    await bus.subscribe(SPANS_SUBJECT, SpanBatch, batches.put)
    await bus.subscribe("v1.note", Number, listen)
    await bus.serve("v1.worker.node-1f-w0.submit", Ask, handle)
    start_telemetry("test", ServiceSettings(), bus)
    try:
        with span("root", model="m"):
            root = current_traceparent()
            await bus.request("v1.worker.node-1f-w0.submit", Ask(), Answer, deadline_s=DEADLINE_S)
            inner = [await asyncio.wait_for(seen.get(), DEADLINE_S) for _ in range(2)]
    finally:
        await stop_telemetry()
    trace_id = root.split("-")[1]
    assert [traceparent.split("-")[1] for traceparent in inner] == [trace_id] * 2
    records = (await asyncio.wait_for(batches.get(), DEADLINE_S)).spans
    by_name = {record.name: record for record in records}
    assert set(by_name) == {"root", "request worker.*.submit", "serve worker.*.submit"}
    assert by_name["serve worker.*.submit"].parent_id == by_name["request worker.*.submit"].span_id
    assert by_name["request worker.*.submit"].parent_id == by_name["root"].span_id
    assert by_name["root"].attributes == {"model": "m"}
    assert {record.trace_id for record in records} == {trace_id}


async def test_an_event_is_stored_once(bus: NatsBus, bus_settings: BusSettings) -> None:
    event = Event(event_id="ev-1", kind="happened", entity="x", at="2026-01-01T00:00:00+00:00")
    for _ in range(3):
        await bus.publish_event("v1.event.gateway.happened", "ev-1", event)
    stream = jetstream(bus.client)
    info = await stream.stream_info(events_stream(bus_settings.prefix))
    assert info.state.messages == 1
    stored = await stream.get_msg(events_stream(bus_settings.prefix), seq=1)
    assert msgspec.json.decode(stored.data, type=Event) == event


async def test_an_event_without_a_stream_is_told(connect_bus: ConnectBus) -> None:
    lonely = await connect_bus("lonely")
    with pytest.raises(BusUnavailable):
        await lonely.publish_event("v1.event.gateway.happened", "ev-1", Ask())
