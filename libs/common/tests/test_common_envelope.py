"""Message and moment travel together, whatever carries them."""

import asyncio
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_samples import message_types

from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock, moment_of
from pilotlight.common.envelope import SENT_HEADER, Timed, opened, stamped
from pilotlight.common.errors import MessageUndecodable
from pilotlight.common.fault_schedule import FaultSchedule
from pilotlight.common.faulty_bus import FaultyBus
from pilotlight.common.messages.codec import (
    FrameBuffer,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
    frame,
)
from pilotlight.common.messages.engine import CommandFrame, UnloadStage
from pilotlight.common.messages.hold import NodeHold
from pilotlight.common.testing import until
from pilotlight.policy.ids import Epoch, InstanceId, NodeId
from pilotlight.policy.phase import Moment

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
MOMENTS = st.builds(Moment, at_s=NUMBERS, wall_offset_s=NUMBERS)
HOLD = NodeHold(node_id=NodeId("n"), epoch=Epoch(3), fetches=())
SENT = Moment(at_s=12.25, wall_offset_s=1.7e9 + 0.1)


@given(MOMENTS | st.none(), st.booleans())
def test_a_header_says_exactly_what_was_said(sent: Moment | None, binary: bool) -> None:
    encode, decode = (encode_msgpack, decode_msgpack) if binary else (encode_json, decode_json)
    headers = stamped({"traceparent": "x"}, sent)
    assert (SENT_HEADER in headers) is (sent is not None)
    assert opened(encode(HOLD), headers, Timed[NodeHold], decode) == Timed(HOLD, sent)
    assert opened(encode(HOLD), headers, NodeHold, decode) == HOLD, (
        "a listener that does not ask for it gets the message alone"
    )


@pytest.mark.parametrize("header", ["", "soon", "1.0", "1.0 2.0 3.0", "1.0 later"])
def test_a_header_that_says_nothing_is_none(header: str) -> None:
    assert (
        opened(encode_json(HOLD), {SENT_HEADER: header}, Timed[NodeHold], decode_json).sent is None
    )
    assert opened(encode_json(HOLD), None, Timed[NodeHold], decode_json).sent is None


def test_a_broken_message_is_refused_whatever_its_header_says() -> None:
    with pytest.raises(MessageUndecodable):
        opened(b"{}", stamped({}, SENT), Timed[NodeHold], decode_json)


@given(st.lists(MOMENTS | st.none(), max_size=4))
def test_a_timed_frame_survives(moments: list[Moment | None]) -> None:
    frames = [Timed(UnloadStage(instance_id=InstanceId("i")), sent) for sent in moments]
    assert FrameBuffer(CommandFrame).feed(b"".join(map(frame, frames))) == frames


@pytest.mark.parametrize("header", ["nan 1.0", "inf 1.0", "1.0 nan", "1e300 1e300"])
def test_a_moment_that_cannot_be_is_taken_for_now(header: str) -> None:
    clock = ManualClock()
    timed = opened(encode_json(HOLD), {SENT_HEADER: header}, Timed[NodeHold], decode_json)
    assert timed.sent_s(clock) == clock.monotonic_s()


def test_who_receives_it_reads_the_moment_on_its_own_clock() -> None:
    clock = ManualClock()
    now = moment_of(clock)
    assert Timed(HOLD).sent_s(clock) == now.at_s
    assert (
        Timed(HOLD, Moment(at_s=now.at_s - 0.5, wall_offset_s=now.wall_offset_s)).sent_s(clock)
        == now.at_s - 0.5
    )
    elsewhere = Moment(at_s=now.at_s - 900.5, wall_offset_s=now.wall_offset_s + 900.0)
    assert Timed(HOLD, elsewhere).sent_s(clock) == pytest.approx(now.at_s - 0.5)


def test_no_message_says_in_a_field_when_it_was_sent() -> None:
    """A moment in a message is a fact of its own, and this is the only one (decision 27)."""
    fields = {
        (kind.__name__, name)
        for kind in message_types()
        for name, hint in get_type_hints(kind).items()
        if Moment in (hint, *get_args(hint))
    }
    assert fields == {("PartReady", "ready")}


@pytest.mark.anyio
@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("binary", [False, True])
async def test_the_bus_carries_it_beside_notifications(
    bus: Bus, faulty: bool, binary: bool
) -> None:
    heard: list[Any] = []

    async def listen(message: Any) -> None:
        heard.append(message)

    one = FaultyBus(bus, "one", FaultSchedule(1)) if faulty else bus
    await one.subscribe("v1.test", Timed[NodeHold], listen, binary=binary)
    await one.publish("v1.test", HOLD, binary=binary, sent=SENT)
    await one.publish("v1.test", HOLD, binary=binary)
    await until(lambda: len(heard) == 2)
    assert heard == [Timed(HOLD, SENT), Timed(HOLD)]


@pytest.mark.anyio
async def test_a_notification_that_waits_for_the_connection_keeps_its_moment(bus: Bus) -> None:
    heard: list[Any] = []

    async def listen(message: Any) -> None:
        heard.append(message)

    await bus.subscribe("v1.test", Timed[NodeHold], listen)
    faulty = FaultyBus(bus, "one", FaultSchedule(1))
    async with faulty.breaking_off():
        await faulty.publish("v1.test", HOLD, sent=SENT)
    await until(lambda: heard)
    assert heard == [Timed(HOLD, SENT)]


@pytest.mark.anyio
@pytest.mark.parametrize("faulty", [False, True])
async def test_a_bucket_keeps_it_beside_its_values(bus: Bus, faulty: bool) -> None:
    seen: dict[str, Any] = {}

    async def note(key: str, value: Timed[NodeHold] | None) -> None:
        seen[key] = value

    bucket = await (FaultyBus(bus, "one", FaultSchedule(1)) if faulty else bus).bucket("things")
    await bucket.put("said", HOLD, sent=SENT)
    await bucket.put("silent", HOLD)
    watching = asyncio.create_task(bucket.watch(Timed[NodeHold], note))
    await until(lambda: len(seen) == 2)
    assert seen == {"said": Timed(HOLD, SENT), "silent": Timed(HOLD)}, (
        "also for a watcher that comes late"
    )
    assert (await bucket.get("said", NodeHold)).value == HOLD
    await bucket.delete("said")
    await until(lambda: seen["said"] is None)
    watching.cancel()
    await asyncio.wait({watching})
