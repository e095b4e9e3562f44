"""Channels over TCP: which peers are let in, which are not, and that those hold up no other."""

import select
import socket
import threading
from contextlib import ExitStack, suppress
from struct import pack
from time import monotonic

import pytest
from channel_ends import HERE, HOST, KEY, THERE, accepted, tcp_channel

from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.handshake import CHANNEL_PURPOSE, LINK_PURPOSE, Identity
from pilotlight.common.messages.codec import encode_msgpack
from pilotlight.common.messages.link import LINK_VERSION, Hello
from pilotlight.engine.channel import door as doors
from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.door import Door
from pilotlight.engine.channel.tcp import HANDSHAKE, TcpChannel, connect
from pilotlight.engine.errors import PeerLost, PeerRefused, PeerSilent
from pilotlight.engine.pipeline.joining import NextStage, join
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.model import Stage

STRANGER = Identity(HERE.node_id, ClusterKey(b"the key of another cluster", CHANNEL_PURPOSE))
LINKED = Identity(HERE.node_id, ClusterKey(b"the key of this cluster", LINK_PURPOSE))


@pytest.fixture
def refused():
    return []


class Clock:
    """The system's, which a test can put forward."""

    def __init__(self):
        self.ahead_s = 0.0

    def __call__(self):
        return monotonic() + self.ahead_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def door(refused, clock):
    made = Door(THERE, (HOST, 0), clock, on_refused=refused.append)
    yield made
    made.close()


def frame(header: bytes, payload: bytes = b"") -> Frame:
    return Frame(header, memoryview(payload))


def framed(header: bytes, payload_bytes: int = 0, header_bytes: int | None = None) -> bytes:
    return (
        pack(
            "<4sB3xIQ",
            b"PLch",
            0,
            len(header) if header_bytes is None else header_bytes,
            payload_bytes,
        )
        + header
    )


def goes(door, me=HERE, expected=THERE.node_id, about="i"):
    try:
        return connect((HOST, door.port), me, expected, about, monotonic, 10)
    except PeerLost as error:
        return error


def comes_in(door, refused):
    """A node of the cluster still gets in, whatever came before."""
    channel, other = accepted(door, "sound", lambda: goes(door, about="sound"))
    channel.send(frame(b"header", b"payload"), 1)
    assert bytes(other.receive(1).payload) == b"payload"
    channel.close()
    other.close()


def no_peer_comes(door, about="i"):
    """No peer is there for this, after one look at all that have come."""
    with pytest.raises(PeerSilent, match="no peer came"):
        door.accept(about, 0)


def looks_until(door, happened):
    """The door is looked after until something has happened."""
    deadline_s = monotonic() + 10
    while not happened():
        assert monotonic() < deadline_s
        with suppress(PeerSilent):
            door.accept("nothing that a peer is about", 0.01)


def tries(door, **changes):
    """What a peer gets that comes to a door at which no stage waits for it."""
    got = []
    thread = threading.Thread(target=lambda: got.append(goes(door, **changes)))
    thread.start()
    looks_until(door, lambda: not thread.is_alive())
    return got[0]


def refused_to(door, **changes):
    """What a peer gets that tries to come in and should not."""
    error = tries(door, **changes)
    no_peer_comes(door)
    return error


@pytest.mark.parametrize(
    "me", [STRANGER, LINKED], ids=["another cluster's key", "the key for links"]
)
def test_who_has_another_key_is_refused_and_refuses(me, door, refused):
    error = refused_to(door, me=me)
    assert type(error) is PeerRefused
    assert error.code == "peer_refused"
    assert "another cluster key" in error.message
    assert ["another cluster key" in why for why in refused] == [True]
    comes_in(door, refused)


def test_whoever_answers_in_the_place_of_another_is_refused(door, refused):
    error = refused_to(door, expected=NodeId("somebody else"))
    assert isinstance(error, PeerRefused)
    assert "there answers where somebody else should" in error.message
    comes_in(door, refused)


def test_a_proof_without_the_key_is_none(door, refused):
    """The end that listens gives its proof first; that proof cannot be sent back."""
    with socket.create_connection((HOST, door.port)) as stranger:
        stranger.sendall(
            framed(
                encode_msgpack(
                    Hello(version=LINK_VERSION, node_id=HERE.node_id, nonce=bytes(32), about="i")
                )
            )
        )
        looks_until(door, lambda: select.select([stranger], [], [], 0)[0])
        stranger.recv(1 << 16)
        stranger.sendall(framed(b"\x82\xa4type\xa5proof\xa5proof\xc4\x20" + bytes(32)))
        looks_until(door, lambda: refused)
        no_peer_comes(door)
        assert refused == ["here has another cluster key"]
    comes_in(door, refused)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
        framed(b"no message"),
        framed(b"", payload_bytes=1),
        framed(b"", header_bytes=HANDSHAKE.header_bytes + 1),
        framed(b"", payload_bytes=1 << 62),
        framed(encode_msgpack(Hello(version=LINK_VERSION, node_id=HERE.node_id, nonce=b"short"))),
        framed(
            encode_msgpack(Hello(version=LINK_VERSION + 1, node_id=HERE.node_id, nonce=bytes(32)))
        ),
        b"",
    ],
    ids=[
        "http",
        "no message",
        "payload",
        "long header",
        "huge",
        "short nonce",
        "version",
        "nothing",
    ],
)
def test_nonsense_is_sent_away(said, door, refused):
    with socket.create_connection((HOST, door.port)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        looks_until(door, lambda: refused)
        no_peer_comes(door)
        assert len(refused) == 1
        stranger.settimeout(5)
        while stranger.recv(1 << 16):
            pass
    comes_in(door, refused)


def test_nobody_is_held_up_by_those_who_say_nothing_or_little(door, refused, clock):
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((HOST, door.port))) for _ in range(10)
        ]
        for each in silent[:5]:
            each.sendall(framed(b"12345")[:-1])
        comes_in(door, refused)
        assert not refused
        clock.ahead_s = doors.HANDSHAKE_S + 1
        no_peer_comes(door)
        assert refused == ["no handshake within 5.0 s"] * 10
    comes_in(door, refused)


def test_more_than_there_is_room_for_do_not_keep_others_out(door, refused, monkeypatch):
    monkeypatch.setattr(doors, "MAX_AT_ONCE", 4)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection((HOST, door.port)))
        comes_in(door, refused)
        assert refused.count("too many come at once") >= 16


def test_each_channel_is_given_to_whoever_waits_for_it(door):
    one, at_one = accepted(door, "one", lambda: goes(door, about="one"))
    two = tries(door, about="two")
    no_peer_comes(door, "three")
    at_two = door.accept("two", 0)
    at_two.send(frame(b"two"), 1)
    at_one.send(frame(b"one"), 1)
    assert (one.receive(1).header, two.receive(1).header) == (b"one", b"two")
    for channel in (one, at_one, two, at_two):
        channel.close()


def test_who_comes_again_takes_its_own_place(door):
    first, second = tries(door), tries(door)
    channel = door.accept("i", 0)
    with pytest.raises(PeerLost):
        first.receive(1)
    second.send(frame(b"x"), 1)
    assert channel.receive(1).header == b"x"
    for each in (channel, first, second):
        each.close()


def test_a_channel_that_nobody_asks_for_is_let_go(door, clock):
    made = tries(door)
    clock.ahead_s = doors.HELD_S + 1
    no_peer_comes(door, "another")
    with pytest.raises(PeerLost):
        made.receive(1)


def test_nobody_at_the_address_is_a_loss_and_nobody_who_answers_is_silence():
    listener = socket.create_server((HOST, 0))
    address = listener.getsockname()
    start = monotonic()
    with pytest.raises(PeerSilent):
        connect(address, HERE, THERE.node_id, "i", monotonic, 0.1)
    assert 0.1 <= monotonic() - start < 5
    listener.close()
    with pytest.raises(PeerLost, match="cannot be reached") as lost:
        connect(address, HERE, THERE.node_id, "i", monotonic, 5)
    assert lost.type is PeerLost


def test_a_closed_door_stays_closed(door):
    door.close()
    door.close()
    with pytest.raises(PeerLost, match="closed"):
        door.accept("i", 1)


def test_frames_larger_than_a_handshakes_come_right_behind_it(door):
    """The end that listens may send as soon as it has let a peer in."""

    def comes():
        channel = door.accept("i", 10)
        channel.send(frame(b"h" * 10_000, b"p" * 1_000_000), 10)
        return channel

    got = []
    thread = threading.Thread(target=lambda: got.append(comes()))
    thread.start()
    channel = goes(door)
    first = channel.receive(10)
    assert (len(first.header), bytes(first.payload)) == (10_000, b"p" * 1_000_000)
    thread.join(10)
    channel.close()
    got[0].close()


def test_what_was_sent_last_arrives_though_the_other_end_has_more_to_say():
    """A connection that is closed with bytes unread is reset, and what was under way with it:
    unless they are read first.
    """
    one, other = tcp_channel()
    for _ in range(5):
        other.send(frame(b"unread", b"x" * 100_000), 1)
    select.select([one._socket], [], [], 5)
    one.send(frame(b"last", b"y" * 50_000), 1)
    one.close()
    last = other.receive(5)
    assert (last.header, last.payload.nbytes) == (b"last", 50_000)
    with pytest.raises(PeerLost):
        other.receive(5)
    other.close()


def test_a_peer_that_dies_is_a_loss():
    one, other = tcp_channel()
    one._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
    one._socket.close()
    with pytest.raises(PeerLost, match="reset"):
        other.receive(5)
    with pytest.raises(PeerLost):
        other.send(frame(b"x"), 5)
    other.close()


def test_the_system_watches_for_a_host_that_is_gone():
    """It has keepalive probes while nothing is under way, and a limit on what is not acknowledged:
    20 s each.
    """
    one, other = tcp_channel()
    for channel in (one, other):
        option = channel._socket.getsockopt
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            option(socket.IPPROTO_TCP, name)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count == 20
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert option(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
        assert option(socket.IPPROTO_IP, socket.IP_TOS) >> 2 == 18, "DSCP AF21"
        channel.close()


def test_a_stage_that_cannot_have_one_neighbour_lets_go_of_the_other(door):
    """Stage 0 accepts first; nothing is at the address of stage 1."""
    listener = socket.create_server((HOST, 0))
    address = listener.getsockname()
    listener.close()
    stage, last = Stage(0, 2), Stage(2, 4)
    joined = []

    def joins():
        try:
            join(
                door,
                THERE,
                InstanceId("i"),
                stage,
                NextStage(NodeId("gone"), address, last),
                monotonic,
                10,
            )
        except PeerLost as error:
            joined.append(error)

    thread = threading.Thread(target=joins)
    thread.start()
    channel = goes(door, about="i/0-2")
    assert isinstance(channel, TcpChannel)
    thread.join(10)
    assert "gone cannot be reached" in joined[0].message
    with pytest.raises(PeerLost):
        channel.receive(5)
    channel.close()


def test_the_key_is_not_shown():
    assert "key of" not in repr(Identity(HERE.node_id, KEY))
