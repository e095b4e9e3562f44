"""The link's frames: what is read, refused, and read again."""

import struct
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.errors import MessageTooLarge, MessageUndecodable
from pilotlight.common.messages.link import (
    Ask,
    Enough,
    FromReceiver,
    FromSender,
    Hello,
    NotHeld,
    Placed,
    Proof,
    Recorded,
    Region,
    Sent,
    Units,
    Waiting,
)
from pilotlight.dataplane.link.wire import (
    HEADER,
    FrameKind,
    control_frame,
    decode_control,
    parse_head,
)
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import Digest, NodeId


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_a_header_is_read_or_refused(data: bytes) -> None:
    try:
        head = parse_head(data)
    except (MessageUndecodable, MessageTooLarge):
        return
    assert (head.kind, head.request, head.length) == struct.unpack(">B3xII", data)
    assert head.length <= 1024 * 1024


@given(st.binary(max_size=512), st.sampled_from([FromReceiver, FromSender]))
def test_a_body_is_a_message_or_refused(data: bytes, of: Any) -> None:
    with suppress(MessageUndecodable):
        assert isinstance(decode_control(data, of), of)


digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True).map(Digest)
messages = st.one_of(
    st.builds(
        Hello,
        version=st.integers(0, 9),
        node_id=st.text().map(NodeId),
        nonce=st.binary(),
        beat_s=st.floats(0, 9),
    ),
    st.builds(Proof, proof=st.binary(max_size=64)),
    st.builds(
        Ask,
        model=digests,
        part=st.integers(0, 999),
        chunk=st.integers(0, 999),
        digest=digests | st.none(),
        from_byte=st.integers(0, 2**23),
        priority=st.sampled_from(FetchPriority),
    ),
    st.builds(Units, digests=st.binary(max_size=256)),
    st.builds(
        Region,
        agent=st.binary(max_size=512),
        address=st.integers(0, 2**64 - 1),
        size_bytes=st.integers(0, 2**50),
    ),
    st.builds(Placed, offset=st.integers(0, 2**50), size_bytes=st.integers(0, 2**20)),
    st.just(Enough())
    | st.just(Sent())
    | st.just(NotHeld())
    | st.just(Recorded())
    | st.just(Waiting()),
)


@given(messages, st.integers(0, 2**32 - 1))
def test_what_was_framed_is_read_again(message: Any, request: int) -> None:
    data = control_frame(message, request)
    head = parse_head(data[: HEADER.size])
    assert (head.kind, head.request, head.length) == (
        FrameKind.CONTROL,
        request,
        len(data) - HEADER.size,
    )
    assert decode_control(data[HEADER.size :], FromReceiver | FromSender) == message
