"""All kinds of channel keep the same promises."""

import gc
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import pytest
from channel_ends import tcp_channel

from pilotlight.engine.channel.channel import Frame, wait_for_any
from pilotlight.engine.channel.memory import memory_channel
from pilotlight.engine.channel.unix import UnixChannel
from pilotlight.engine.errors import PeerLost, PeerSilent

WINDOW = 3


def unix_channel():
    one, other = socket.socketpair()
    return UnixChannel(one, monotonic, WINDOW), UnixChannel(other, monotonic, WINDOW)


def connected_by_tcp():
    return tcp_channel(WINDOW)


@pytest.fixture(
    params=[lambda: memory_channel(monotonic, WINDOW), unix_channel, connected_by_tcp],
    ids=["memory", "unix", "tcp"],
)
def ends(request):
    made = request.param()
    yield made
    for end in made:
        end.close()


@pytest.fixture(params=[unix_channel, connected_by_tcp], ids=["unix", "tcp"])
def stream_ends(request):
    made = request.param()
    yield made
    for end in made:
        end.close()


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Another thread does something in a moment, and is done with it at the end: an end is used by
    one thread at a time.
    """
    timer = threading.Timer(0.02, act)
    timer.start()
    try:
        yield
    finally:
        timer.join(10)
    assert not timer.is_alive()


def frame(header: bytes, payload: bytes = b"") -> Frame:
    return Frame(header, memoryview(payload))


def test_frames_arrive_in_order_and_whole(ends):
    one, other = ends
    sent = [(b"", b""), (b"a", b""), (b"", b"payload")]
    for header, payload in sent:
        one.send(frame(header, payload), 1)
    got = [other.receive(1) for _ in sent]
    assert [(each.header, bytes(each.payload)) for each in got] == sent


def test_a_sender_waits_for_credit_and_no_longer_than_told(ends):
    one, other = ends
    for number in range(WINDOW):
        one.send(frame(b"%d" % number), 1)
    with pytest.raises(PeerSilent, match="took no frame"):
        one.send(frame(b"too much"), 0.01)
    assert other.receive(1).header == b"0"
    one.send(frame(b"3"), 1)
    assert [other.receive(1).header for _ in range(3)] == [b"1", b"2", b"3"]
    for number in range(10 * WINDOW):
        other.send(frame(b"back"), 1)
        assert one.receive(1).header == b"back", number


def test_a_receiver_waits_no_longer_than_told(ends):
    other = ends[1]
    assert not other.readable
    start = monotonic()
    with pytest.raises(PeerSilent, match="sent nothing"):
        other.receive(0.02)
    assert monotonic() - start >= 0.02
    with pytest.raises(PeerSilent):
        other.receive(0)


def test_what_was_sent_before_the_end_is_received_and_then_the_loss(ends):
    one, other = ends
    assert not other.lost
    one.send(frame(b"last"), 1)
    one.close()
    one.close()
    assert other.lost, "it is known before the last frame is taken"
    assert other.receive(1).header == b"last"
    assert other.readable
    for _ in range(2):
        with pytest.raises(PeerLost, match="lost"):
            other.receive(1)
        with pytest.raises(PeerLost):
            other.send(frame(b"to nobody"), 1)
    with pytest.raises(PeerLost):
        one.send(frame(b"from nobody"), 1)


def test_a_sender_that_waits_learns_of_the_loss(ends):
    one, other = ends
    for _ in range(WINDOW):
        one.send(frame(b"x"), 1)
    with meanwhile(other.close), pytest.raises(PeerLost) as lost:
        one.send(frame(b"x"), 10)
    assert lost.type is PeerLost


def test_waiting_for_any_ends_with_a_frame_or_with_the_time(ends):
    one, other = ends
    quiet, _keep = memory_channel(monotonic)
    wait_for_any((quiet, other), 0.01)
    assert not other.readable
    with meanwhile(lambda: one.send(frame(b"x"), 1)):
        wait_for_any((quiet, other), 10)
    assert other.receive(1).header == b"x"


def test_ends_in_memory_that_are_dropped_open_leave_no_descriptor():
    descriptors = [end.interest()[0] for end in memory_channel(monotonic)]
    gc.collect()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_both_ends_send_more_than_the_socket_holds_at_the_same_time(ends):
    """Neither waits for the other to read; what the socket did not take leaves when an end is
    looked at.
    """
    one, other = ends
    big = os.urandom(5_000_000)
    for end in (one, other):
        for number in range(2):
            end.send(frame(b"%d" % number, big), 1)

    got, deadline = [], monotonic() + 20
    while len(got) < 4 and monotonic() < deadline:
        got.extend(end.receive(1) for end in ends if end.readable)
    assert [
        (each.header, each.payload == big) for each in sorted(got, key=lambda each: each.header)
    ] == [
        (b"0", True),
        (b"0", True),
        (b"1", True),
        (b"1", True),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_two_threads_talk_at_random(seed, ends):
    deadline = monotonic() + 20

    def talk(end, chance, got):
        sent = 0
        while (sent < 200 or len(got) < 200) and monotonic() < deadline:
            if sent < 200 and (chance.random() < 0.5 or not end.readable):
                try:
                    end.send(frame(b"%d" % sent, b"p" * chance.choice((0, 1, 300, 70_000))), 0.01)
                    sent += 1
                except PeerSilent:
                    pass
            elif end.readable:
                got.append(int(end.receive(1).header))
            else:
                wait_for_any((end,), 0.01)

    got = [[], []]
    threads = [
        threading.Thread(target=talk, args=(end, random.Random(seed + index), got[index]))
        for index, end in enumerate(ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [list(range(200))] * 2


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n    ",
        b"PLch\x07" + bytes(15),
        b"PLch\x00\0\0\0" + b"\xff" * 12,
        b"PLch\x00\0\0\0" + b"\1\0\0\0" + b"\xff" * 8,
    ],
)
def test_nonsense_is_a_loss(nonsense, stream_ends):
    one, other = stream_ends
    one._socket.send(nonsense)
    with pytest.raises(PeerLost):
        other.receive(1)


def test_a_peer_that_ignores_credit_is_a_loss(stream_ends):
    one, other = stream_ends
    one._credits = 100
    for _ in range(WINDOW + 1):
        one.send(frame(b"x"), 1)
    for _ in range(WINDOW):
        assert other.receive(1).header == b"x"
    with pytest.raises(PeerLost, match="more than it may"):
        other.receive(1)


def test_a_frame_that_was_cut_off_is_a_loss(stream_ends):
    one, other = stream_ends
    one._socket.send(b"PLch\x00\0\0\0" + b"\5\0\0\0" + bytes(8) + b"hal")
    one.close()
    with pytest.raises(PeerLost, match="hung up"):
        other.receive(1)


def test_a_frame_takes_memory_only_for_what_came_of_it(stream_ends):
    """Announced with 3 GiB: neither taken nor given back as zeros."""
    one, other = stream_ends
    before = resident_bytes()
    one._socket.send(b"PLch\x00\0\0\0" + bytes(4) + (3 << 30).to_bytes(8, "little") + b"little")
    assert not other.readable
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
