"""The bus on a real nats-server."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
import pytest

from pilotlight.cli.embedded import NatsServer
from pilotlight.common import nats_bus
from pilotlight.common.buckets import Found, jetstream
from pilotlight.common.errors import (
    BusUnavailable,
    Conflict,
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
from pilotlight.common.messages.codec import MAX_PAYLOAD_BYTES, Message
from pilotlight.common.messages.events import Event
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import StreamSettings, ensure_streams, events_stream, server_config
from pilotlight.common.settings import BusSettings, ServiceSettings
from pilotlight.common.telemetry import current_traceparent, span, start_telemetry, stop_telemetry
from pilotlight.common.testing import ConnectBus, until

pytestmark = pytest.mark.anyio

DEADLINE_S = 10.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Ask(Message, frozen=True, kw_only=True):
    text: str = ""


class Answer(Message, frozen=True, kw_only=True):
    text: str


class Number(Message, frozen=True, kw_only=True):
    number: int


async def echo(request: Ask) -> Answer:
    return Answer(text=request.text)


async def test_a_request_is_answered(bus: NatsBus, connect_bus: ConnectBus) -> None:
    server = await connect_bus("server")
    await server.serve("v1.echo", Ask, echo)
    assert await bus.request("v1.echo", Ask(text="hé"), Answer, deadline_s=DEADLINE_S) == Answer(text="hé")


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
        await bus.request("v1.never", Ask(), Answer, deadline_s=0.05)
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
    await bus.serve("v1.echo", Number, echo)  # type: ignore[arg-type]
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
        await bus.request("v1.much", Ask(text="x" * MAX_PAYLOAD_BYTES), Answer, deadline_s=DEADLINE_S)
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
    number = nats_bus.MAX_CONCURRENT_REQUESTS + 3
    asking = [asyncio.create_task(bus.request("v1.wait", Ask(), Answer, deadline_s=DEADLINE_S)) for _ in range(number)]
    refused, _ = await asyncio.wait(asking, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    assert all(isinstance(task.exception(), QueueFull) for task in refused)
    release.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert sum(isinstance(result, Answer) for result in results) == nats_bus.MAX_CONCURRENT_REQUESTS
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


async def test_a_bucket_gives_present_values_then_changes(bus: NatsBus, connect_bus: ConnectBus) -> None:
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


async def test_a_key_is_replaced_by_who_saw_its_last_value(bus: NatsBus, connect_bus: ConnectBus) -> None:
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


@pytest.fixture
async def own_server(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[NatsServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = NatsServer(tmp_path / "nats", port, server_config({}))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_everything_resumes_after_a_restart(own_server: NatsServer, killed: bool) -> None:
    settings = StreamSettings(nats_url=own_server.url, events_bytes=1 << 20)
    await ensure_streams(settings)
    bus = await NatsBus.connect(settings, user="gateway", name="gateway")
    heard: asyncio.Queue[Number] = asyncio.Queue()
    changes: asyncio.Queue[tuple[str, Number | None]] = asyncio.Queue()
    resynced = asyncio.Event()

    async def on_change(key: str, value: Number | None) -> None:
        changes.put_nowait((key, value))

    async def resync() -> None:
        resynced.set()

    bus.on_reconnect(resync)
    await bus.serve("v1.echo", Ask, echo)
    await bus.subscribe("v1.note", Number, heard.put)
    bucket = await bus.bucket("numbers")
    await bucket.put("a", Number(number=1))
    watching = asyncio.create_task(bucket.watch(Number, on_change))
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("a", Number(number=1))

    pid = own_server.pid
    if killed and pid is not None:
        os.kill(pid, signal.SIGKILL)
        await own_server.wait()
    else:
        await own_server.stop()
    await until(lambda: not bus.connected)
    with pytest.raises(BusUnavailable):
        await bus.request("v1.echo", Ask(), Answer, deadline_s=0.05)
    asking = asyncio.create_task(bus.request("v1.echo", Ask(text="waits"), Answer, deadline_s=DEADLINE_S))
    await own_server.start()

    assert await asking == Answer(text="waits")
    async with asyncio.timeout(DEADLINE_S):
        await resynced.wait()
    await bus.publish("v1.note", Number(number=5))
    assert await asyncio.wait_for(heard.get(), DEADLINE_S) == Number(number=5)
    started_s = asyncio.get_running_loop().time()
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("a", Number(number=1))
    await bucket.put("a", Number(number=2))
    while await asyncio.wait_for(changes.get(), DEADLINE_S) != ("a", Number(number=2)):
        pass
    assert asyncio.get_running_loop().time() - started_s < 2.0
    watching.cancel()
    await asyncio.wait({watching})
    await bus.close()


async def test_a_watch_survives_the_loss_of_its_bucket(own_server: NatsServer) -> None:
    bus = await NatsBus.connect(BusSettings(nats_url=own_server.url), user="gateway", name="gateway")
    changes: asyncio.Queue[tuple[str, Number | None]] = asyncio.Queue()

    async def on_change(key: str, value: Number | None) -> None:
        changes.put_nowait((key, value))

    bucket = await bus.bucket("numbers")
    watching = asyncio.create_task(bucket.watch(Number, on_change))
    await bucket.put("a", Number(number=1))
    assert await asyncio.wait_for(changes.get(), DEADLINE_S) == ("a", Number(number=1))
    stream = jetstream(bus.client)
    await own_server.stop()
    await own_server.start()
    await until(lambda: bus.connected)
    await stream.delete_stream("KV_numbers")
    fresh = await NatsBus.connect(BusSettings(nats_url=own_server.url), user="gateway", name="second")
    await (await fresh.bucket("numbers")).put("b", Number(number=2))
    await own_server.stop()
    await own_server.start()
    while await asyncio.wait_for(changes.get(), DEADLINE_S) != ("b", Number(number=2)):
        pass
    watching.cancel()
    await asyncio.wait({watching})
    await fresh.close()
    await bus.close()


async def test_a_frozen_server_is_noticed_and_nothing_is_lost(own_server: NatsServer) -> None:
    """A stopped process keeps its connections: what was sent to it arrives when it goes on, and nobody has to connect anew."""
    bus = await NatsBus.connect(BusSettings(nats_url=own_server.url), user="test", name="frozen")
    received: list[int] = []
    done = asyncio.Event()

    async def on_number(message: Number) -> None:
        received.append(message.number)
        if message.number == 1:
            done.set()

    pid = own_server.pid
    assert pid is not None
    try:
        await bus.subscribe("v1.numbers", Number, on_number)
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not bus.connected, deadline_s=DEADLINE_S)
            # Given up, and answered later all the same: that must not deafen the connection.
            with pytest.raises(BusUnavailable):
                await bus.subscribe("v1.other", Number, on_number)
            await bus.publish("v1.numbers", Number(number=1))
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: bus.connected, deadline_s=DEADLINE_S)
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        assert received == [1]
        assert bus.client.stats["reconnects"] == 0
    finally:
        await bus.close()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_a_connection_that_ends_under_a_question_ends_nothing_else(own_server: NatsServer) -> None:
    """For one turn of the loop nats-py writes to what is closed already: that is a lost connection as any other."""
    bus = await NatsBus.connect(BusSettings(nats_url=own_server.url), user="test", name="aborted")
    transport: Any = bus.client._transport
    pulse = bus.task
    assert pulse is not None
    transport._io_writer.transport.abort()
    with pytest.raises(nats.errors.Error):
        await bus._pulse.round_trip(DEADLINE_S)
    await until(lambda: bus.connected and bus.client.stats["reconnects"] == 1, deadline_s=DEADLINE_S)
    assert not pulse.done()
    await bus.close()
    assert pulse.done()


async def test_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bus, "CONNECT_DEADLINE_S", 0.1)
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:9"):
        await NatsBus.connect(BusSettings(nats_url="nats://127.0.0.1:9"), user="gateway", name="x")


async def test_events_are_kept_as_long_as_settings_say(own_server: NatsServer) -> None:
    """Also for a stream that is there already: settings take effect with the next start."""
    for days, size_bytes in ((7.0, 2 << 20), (1.5, 1 << 20)):
        settings = StreamSettings(nats_url=own_server.url, events_keep_days=days, events_bytes=size_bytes)
        await ensure_streams(settings)
        bus = await NatsBus.connect(settings, user="gateway", name="gateway")
        config = (await jetstream(bus.client).stream_info(events_stream(""))).config
        await bus.close()
        assert (config.max_age, config.max_bytes) == (days * 24 * 3600, size_bytes)
