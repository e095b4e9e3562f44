"""Whatever bytes come, a decoder answers with a value or with its one error."""

import asyncio
import contextlib
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.common.errors import MessageTooLarge, MessageUndecodable
from pilotlight.common.messages import codec
from pilotlight.common.messages.codec import (
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameBuffer,
    Message,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
    frame,
    read_frame,
    write_frame,
)
from pilotlight.common.messages.engine import (
    FromEngine,
    Produced,
    StageFailed,
    StageUnloaded,
    StepDone,
)
from pilotlight.common.messages.hold import WorkerHold
from pilotlight.common.messages.tokens import Submit, TokenBatch, TokenEntry
from pilotlight.policy.ids import InstanceId, RequestId, WorkerId
from pilotlight.policy.request import FinishReason

KINDS = [WorkerHold, Submit, TokenBatch]
TOKENS = st.lists(st.integers(0, 2**32), max_size=20)
ENTRIES = st.builds(
    TokenEntry,
    request_id=st.text().map(RequestId),
    attempt=st.integers(0, 2**31),
    seq=st.integers(0, 2**31),
    token_ids=TOKENS,
    logprobs=st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    finish=st.none() | st.sampled_from(FinishReason),
    code=st.text(),
)
FRAMES = st.one_of(
    st.builds(StageUnloaded, instance_id=st.text().map(InstanceId)),
    st.builds(
        StageFailed, instance_id=st.text().map(InstanceId), code=st.text(), message=st.text()
    ),
    st.builds(
        StepDone,
        produced=st.lists(
            st.builds(
                Produced,
                request_id=st.text().map(RequestId),
                attempt=st.integers(0, 9),
                position=st.integers(0, 9),
                token_ids=TOKENS.map(tuple),
                logprobs=st.none(),
                finish=st.none() | st.sampled_from(FinishReason),
            ),
            max_size=3,
        ).map(tuple),
        waiting=st.integers(0, 9),
        running=st.integers(0, 9),
        kv_free_tokens=st.integers(0, 9),
        step_time_s=st.floats(0, 1),
    ),
)


class Text(Message, frozen=True, kw_only=True):
    text: str


@given(st.binary(max_size=200), st.sampled_from(KINDS))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused(data: bytes, kind: type[Message]) -> None:
    for decode in (decode_json, decode_msgpack):
        try:
            assert isinstance(decode(data, kind), kind)
        except MessageUndecodable:
            continue


@given(st.lists(ENTRIES, max_size=4))
@settings(max_examples=100, deadline=None)
def test_batches_survive_both_encodings(entries: list[TokenEntry]) -> None:
    batch = TokenBatch(worker_id=WorkerId("w"), entries=entries)
    assert decode_msgpack(encode_msgpack(batch), TokenBatch) == batch
    assert decode_json(encode_json(batch), TokenBatch) == batch


@given(st.lists(FRAMES, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_frames_survive_any_cut(messages: list[FromEngine], data: st.DataObject) -> None:
    stream = b"".join(frame(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    buffer = FrameBuffer(FromEngine)
    found: list[FromEngine] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += buffer.feed(stream[start:stop])
    assert found == messages


@given(st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_a_noisy_stream_is_refused(noise: bytes) -> None:
    with contextlib.suppress(MessageUndecodable, MessageTooLarge):
        FrameBuffer(FromEngine).feed(noise)


@pytest.mark.anyio
async def test_frames_are_read_from_a_stream() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(frame(Text(text="one")) + frame(Text(text="two")))
    reader.feed_eof()
    assert [await read_frame(reader, Text) for _ in range(3)] == [
        Text(text="one"),
        Text(text="two"),
        None,
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("data", [b"\0", frame(Text(text="cut"))[:-1], b"\0\0\0\1\xc1"])
async def test_a_cut_or_broken_frame_is_told(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    with pytest.raises(MessageUndecodable):
        await read_frame(reader, Text)


@pytest.mark.anyio
async def test_an_announced_giant_is_not_read() -> None:
    head = (MAX_FRAME_BYTES + 1).to_bytes(4, "big")
    reader = asyncio.StreamReader()
    reader.feed_data(head)
    with pytest.raises(MessageTooLarge):
        await read_frame(reader, Text)
    with pytest.raises(MessageTooLarge):
        FrameBuffer(Text).feed(head)


def test_what_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MessageTooLarge):
        encode_json(Text(text="x" * MAX_PAYLOAD_BYTES))
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 10)
    with pytest.raises(MessageTooLarge):
        frame(Text(text="x" * 20))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True}), "asyncio"])
async def test_a_frame_to_a_connection_that_broke_is_an_os_error() -> None:
    """As all that writers are ready for: uvloop has another one."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    write_frame(writer, StageUnloaded(instance_id=InstanceId("i")))
    theirs.close()
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    writer.transport.abort()
    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            write_frame(writer, StageUnloaded(instance_id=InstanceId("i")))
        await asyncio.sleep(0)
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
