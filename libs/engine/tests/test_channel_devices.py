"""Payloads that go from device to device beside a channel, over a fake driver: all of it but the
devices, which are in tests/gpu.
"""

import os
import random
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import pytest
import torch
from channel_ends import tcp_channel
from fake_cuda import MIB, FakeCuda, fake_cuda
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.engine.channel import device_path, stream
from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.channel.mailbox import Mailbox, is_here, post
from pilotlight.engine.channel.ring import ALIGNMENT, Ring
from pilotlight.engine.cuda import peers
from pilotlight.engine.cuda.peers import PeerMemory
from pilotlight.engine.errors import EngineFailed, PeerLost
from pilotlight.native.device import Device

RING = 4 * MIB
WINDOW = 16


@pytest.fixture
def fake() -> FakeCuda:
    found = fake_cuda()
    found.reset()
    return found


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr(device_path, "LEAST_BYTES", 1)


@dataclass
class Side:
    """One engine's device, and what it was told."""

    fake: FakeCuda
    ways: list[str] = field(default_factory=list)

    @property
    def devices(self) -> Devices:
        memory = PeerMemory(Device(0, self.fake.path), torch.device("cpu"))
        return Devices(memory, self.ways.append)


@pytest.fixture
def ends(fake):
    """The end that sends, the other one, and their devices."""
    before = fake.reserved, fake.used_bytes
    one, other = Side(fake), Side(fake)
    sends, takes = tcp_channel(WINDOW, one.devices, other.devices)
    yield sends, takes, one, other
    sends.close()
    takes.close()
    assert (fake.reserved, fake.used_bytes) == before, "all of it was unmapped"


def offer(sends, takes, ring_bytes=RING) -> bool:
    """The offer and its answer; whether payloads go by the device."""
    sends.offer_device(ring_bytes)
    assert not takes.readable, "that is no frame"
    return sends.carries_device(1)


def row(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_bytes,), generator=generator, dtype=torch.uint8)


def comes(sends, takes) -> Frame:
    """The next frame; both ends are looked at, since what a socket does not take stays behind."""
    deadline_s = monotonic() + 30
    while not takes.readable:
        assert not sends.lost
        assert monotonic() < deadline_s
    return takes.receive(0)


def passes(sends, takes, payload: torch.Tensor, header: bytes = b"a header") -> Frame:
    sends.send(Frame(header, payload), 10)
    got = comes(sends, takes)
    assert got.header == header
    assert bytes(got.in_host) == payload.numpy().tobytes()
    return got


def test_payloads_lie_on_the_other_device_bit_for_bit(ends):
    sends, takes, one, other = ends
    assert offer(sends, takes)
    for seed, num_bytes in enumerate((1, 255, 256, 100_000, RING)):
        got = passes(sends, takes, row(num_bytes, seed))
        assert isinstance(got.payload, torch.Tensor), "it came by the device"
    sends.close()
    assert one.ways[0] == "device memory"
    assert f"{1 + 255 + 256 + 100_000 + RING} bytes by device memory, 0 had" in one.ways[1]
    assert other.ways == []


def test_what_lies_in_the_host_and_what_is_small_goes_with_its_header(ends, monkeypatch):
    sends, takes, *_ = ends
    assert offer(sends, takes)
    sends.send(Frame(b"", memoryview(b"in the host")), 1)
    assert bytes(takes.receive(1).payload) == b"in the host"
    monkeypatch.setattr(device_path, "LEAST_BYTES", 100)
    assert isinstance(passes(sends, takes, row(99)).payload, memoryview)
    assert isinstance(passes(sends, takes, row(100)).payload, torch.Tensor)


def test_both_ends_may_send(ends):
    sends, takes, *_ = ends
    assert offer(sends, takes)
    assert offer(takes, sends)
    assert isinstance(passes(sends, takes, row(1000, 1)).payload, torch.Tensor)
    assert isinstance(passes(takes, sends, row(1000, 2)).payload, torch.Tensor)


def test_before_it_is_mapped_payloads_go_with_their_headers(ends):
    sends, takes, *_ = ends
    early = row(5000)
    sends.send(Frame(b"before it was offered", early), 1)
    sends.offer_device(RING)
    sends.send(Frame(b"before it was answered", early), 1)
    for _ in range(2):
        assert isinstance(takes.receive(1).payload, memoryview)
    assert sends.carries_device(1)
    assert isinstance(passes(sends, takes, early).payload, torch.Tensor)


def test_a_full_ring_holds_nobody_up(ends):
    sends, takes, one, _ = ends
    assert offer(sends, takes)
    payloads = [row(RING // 2, 1), row(RING // 2, 2), row(RING // 4, 3), row(RING + 1, 4)]
    for number, payload in enumerate(payloads):
        sends.send(Frame(b"%d" % number, payload), 1)
    got = [comes(sends, takes) for _ in payloads]
    assert [frame.header for frame in got] == [b"0", b"1", b"2", b"3"], "in order"
    assert [isinstance(frame.payload, torch.Tensor) for frame in got] == [True, True, False, False]
    for frame, payload in zip(got, payloads, strict=True):
        assert bytes(frame.in_host) == payload.numpy().tobytes()
    # All of it is free again.
    assert isinstance(passes(sends, takes, row(RING, 5)).payload, torch.Tensor)
    sends.close()
    assert f"{RING // 4} had no room there" in one.ways[-1]


def test_rounds_of_the_ring_mix_nothing_up(ends):
    sends, takes, *_ = ends
    assert offer(sends, takes)
    chance, waiting, by_device = random.Random(7), [], 0
    for number in range(300):
        payload = row(chance.randrange(1, RING // 3), number)
        sends.send(Frame(b"%d" % number, payload), 1)
        waiting.append(payload)
        while len(waiting) > chance.randrange(6):
            got = comes(sends, takes)
            assert bytes(got.in_host) == waiting.pop(0).numpy().tobytes()
            by_device += isinstance(got.payload, torch.Tensor)
    assert by_device > 200


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 12 * ALIGNMENT), st.integers(0, 4)), min_size=1, max_size=60
    )
)
def test_no_two_frames_lie_at_one_place(steps):
    ring = Ring(10 * ALIGNMENT)
    lying: dict[int, range] = {}
    for number, (num_bytes, read) in enumerate(steps):
        has_room = ring.has_room(num_bytes)
        start = ring.take(number, num_bytes)
        assert has_room is (start is not None)
        if start is not None:
            mine = range(start, start + num_bytes)
            assert mine.stop <= ring.num_bytes
            for other in lying.values():
                assert mine.stop <= other.start or other.stop <= mine.start
            lying[number] = mine
        elif not lying:
            assert num_bytes > ring.num_bytes, "an empty ring has room for all that fits"
        for oldest in sorted(lying)[:read]:
            ring.give_back(oldest)
            del lying[oldest]


@pytest.mark.parametrize("who", ["neither", "who connects", "who listens"])
def test_an_end_that_knows_nothing_of_devices_is_sent_to_as_before(fake, who):
    side = Side(fake)
    here = side.devices if who == "who connects" else None
    there = side.devices if who == "who listens" else None
    for sends, takes in (ends := tcp_channel(WINDOW, here, there), ends[::-1]):
        assert not offer(sends, takes)
        assert isinstance(passes(sends, takes, row(1000)).payload, memoryview)
    for end in ends:
        end.close()
    assert side.ways == []


def test_an_engine_of_another_host_is_sent_to_as_before(fake, monkeypatch):
    monkeypatch.setattr(device_path, "is_here", lambda address: False)
    one, other = Side(fake), Side(fake)
    sends, takes = tcp_channel(WINDOW, one.devices, other.devices)
    assert not offer(sends, takes)
    assert isinstance(passes(sends, takes, row(1000)).payload, memoryview)
    for end in (sends, takes):
        end.close()


STEPS = {
    "no memory": ("cuMemCreate", 1),
    "no address": ("cuMemAddressReserve", 1),
    "no descriptor": ("cuMemExportToShareableHandle", 1),
    "no access for its own device": ("cuMemSetAccess", 1),
    "no address there": ("cuMemAddressReserve", 2),
    "not imported": ("cuMemImportFromShareableHandle", 1),
    "not mapped there": ("cuMemMap", 2),
    "no access for the other device": ("cuMemSetAccess", 2),
}


@pytest.mark.parametrize("step", STEPS)
def test_where_a_step_fails_payloads_go_with_their_headers(ends, fake, step):
    sends, takes, one, other = ends
    function, call = STEPS[step]
    fake.fail(function, 801, call)
    assert not offer(sends, takes)
    assert isinstance(passes(sends, takes, row(100_000)).payload, memoryview)
    (why,) = one.ways
    assert why.startswith("the host's memory: ")
    assert ("the other engine cannot map it" in why) is bool(other.ways)


def test_no_descriptor_comes_where_the_other_mailbox_is_gone(ends):
    sends, takes, one, _ = ends
    takes._path._mailbox.close()
    assert not offer(sends, takes)
    assert "cannot be reached" in one.ways[0]
    assert isinstance(passes(sends, takes, row(1000)).payload, memoryview)


def test_a_stranger_in_the_mailbox_is_not_taken_for_the_other_end(ends):
    sends, takes, *_ = ends
    here, there = os.pipe()
    post(takes._path.address, b"not these words!", here)
    post(takes._path.address, b"", there)
    assert offer(sends, takes), "what came with other words was thrown away"
    assert isinstance(passes(sends, takes, row(1000)).payload, torch.Tensor)
    os.close(here)
    os.close(there)


def test_a_mailbox_gives_the_descriptor_of_the_right_words_alone():
    box = Mailbox()
    assert is_here(box.address)
    assert not is_here("")
    assert not is_here("another boot/" + box.address.partition("/")[2])
    assert box.fetch(b"nothing came yet") is None
    one, other = socket.socketpair()
    post(box.address, b"wrong words", one.fileno())
    post(box.address, b"right words", one.fileno())
    found = box.fetch(b"right words")
    with socket.socket(fileno=found) as came:
        assert not os.get_inheritable(came.fileno())
        came.send(b"it is the one")
        assert other.recv(99) == b"it is the one"
    one.close()
    assert other.recv(99) == b"", "the one with the wrong words is closed, too"
    other.close()
    box.close()
    box.close()
    assert box.fetch(b"closed") is None
    with pytest.raises(OSError, match="refused"):
        post(box.address, b"words", 0)


def test_what_was_sent_is_there_when_the_sender_is_gone(ends):
    sends, takes, *_ = ends
    assert offer(sends, takes)
    payload = row(RING // 2)
    sends.send(Frame(b"last words", payload), 1)
    sends.close()
    assert takes.lost
    got = takes.receive(1)
    assert bytes(got.in_host) == payload.numpy().tobytes()
    with pytest.raises(PeerLost):
        takes.receive(1)
    takes.close()
    assert bytes(got.in_host) == payload.numpy().tobytes(), "it was copied out"


def test_frames_that_are_not_taken_before_the_end_are_lost(ends):
    sends, takes, *_ = ends
    assert offer(sends, takes)
    sends.send(Frame(b"never read", row(1000)), 1)
    assert takes.readable
    takes.close()
    with pytest.raises(PeerLost):
        takes.receive(1)


def test_a_receiver_that_is_gone_takes_nothing_with_it(ends):
    sends, takes, *_ = ends
    assert offer(sends, takes)
    sends.send(Frame(b"", row(1000)), 1)
    takes.close()
    sent = 0
    with suppress(PeerLost):
        while sent < 2 * WINDOW:
            sends.send(Frame(b"", row(1000)), 1)
            sent += 1
    assert sends.lost
    assert sent < WINDOW


NONSENSE = {
    "a ring too long to be one": stream._PREFIX.pack(b"PLch", stream._RING, 16, 1 << 50),
    "a ring without its nonce": stream._PREFIX.pack(b"PLch", stream._RING, 3, RING),
    "a place outside of the ring": stream._PREFIX.pack(b"PLch", stream._PLACED, 8, 9)
    + stream._PLACE.pack(RING - 8),
    "no place": stream._PREFIX.pack(b"PLch", stream._PLACED, 4, 9) + b"head",
}


@pytest.mark.parametrize("said", NONSENSE)
def test_nonsense_is_the_end_of_the_other_end(ends, said):
    sends, takes, *_ = ends
    assert offer(sends, takes)
    sends._socket.sendall(NONSENSE[said])
    with pytest.raises(PeerLost, match=r"a ring of|where nothing is"):
        takes.receive(10)


def test_a_place_where_no_ring_is_is_the_end_of_the_other_end(ends):
    sends, takes, *_ = ends
    header = stream._PLACE.pack(0)
    sends._socket.sendall(stream._PREFIX.pack(b"PLch", stream._PLACED, len(header), 9) + header)
    with pytest.raises(PeerLost, match="nothing is"):
        takes.receive(10)


def test_an_answer_that_nobody_waits_for_changes_nothing(ends):
    sends, takes, *_ = ends
    takes._socket.sendall(stream._PREFIX.pack(b"PLch", stream._MAPPED, 1, 0))
    assert isinstance(passes(sends, takes, row(1000)).payload, memoryview)
    assert not sends.carries_device()


def test_what_batches_need_of_a_device_is_not_shared(fake, monkeypatch):
    native, before = Device(0, fake.path), fake.used_bytes
    monkeypatch.setattr(peers, "LEFT_BYTES", native.memory()[0] - RING + 1)
    with pytest.raises(EngineFailed, match="steps need the rest"):
        PeerMemory(native, torch.device("cpu")).share(RING)
    assert fake.used_bytes == before
    monkeypatch.setattr(peers, "LEFT_BYTES", native.memory()[0] - RING)
    window, descriptor = PeerMemory(native, torch.device("cpu")).share(RING)
    os.close(descriptor)
    window.close()
    assert fake.used_bytes == before
