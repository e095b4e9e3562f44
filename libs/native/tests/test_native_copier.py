"""Copies over a fake driver: every byte arrives, in few units, through the ring or from where it
lies.
"""

import ctypes
import random

import pytest
from fake_cuda import MIB, fake_cuda

from pilotlight.native.copier import Copier, Copy
from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.library import NativeError, TooSlow

GRANULE = 2 * MIB
SLAB = 64 << 10


@pytest.fixture
def fake():
    fake_cuda().reset()
    return fake_cuda()


@pytest.fixture
def arena(fake):
    made = DeviceArena(Device(0, fake.path), 16 * GRANULE)
    made.back(0, 16 * GRANULE, GRANULE)
    yield made
    made.close()


@pytest.fixture
def copier(fake):
    made = Copier(Device(0, fake.path), slab_bytes=SLAB, num_movers=3)
    yield made
    made.close()


def source_of(num_bytes, seed=0):
    made = ctypes.create_string_buffer(random.Random(seed).randbytes(num_bytes), num_bytes)
    return made, ctypes.addressof(made)


def there(arena, offset, num_bytes):
    return ctypes.string_at(arena.address + offset, num_bytes)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("manner", ["plain", "background", "alone", "all"])
def test_random_copies_arrive(arena, copier, fake, pinned, manner):
    pick = random.Random(3)
    source, address = source_of(4 * MIB)
    if pinned:
        copier.pin(address, MIB)
        copier.pin(address + MIB, 3 * MIB)
    expected = bytearray(8 * MIB)
    ctypes.memset(arena.address, 0, 8 * MIB)
    tickets, place = [], 0
    for _ in range(20):
        copies = []
        for _ in range(pick.randrange(1, 9)):
            length = pick.choice([1, 63, 500, 5_000, 90_000])
            begin, place = pick.randrange(4 * MIB - length), place + pick.randrange(200)
            copies.append(Copy(address + begin, arena.address + place, length))
            expected[place : place + length] = source.raw[begin : begin + length]
            place += length
        now = pick.choice(["plain", "background", "alone"]) if manner == "all" else manner
        named = {} if now == "plain" else {now: True}
        tickets.append(copier.submit(copies, **named))
    copier.order_before(tickets[3], 0)
    copier.wait_done(tickets[-1])
    assert there(arena, 0, 8 * MIB) == bytes(expected)
    counts = copier.counts
    assert (counts.ring_bytes == 0) is pinned
    assert counts.direct_bytes + counts.ring_bytes >= sum(map(bool, expected))
    if pinned:
        with pytest.raises(NativeError, match="pinned already"):
            copier.pin(address + 2 * MIB, 5)
        copier.unpin(address)
        copier.unpin(address + MIB)
        with pytest.raises(NativeError, match="nothing is pinned"):
            copier.unpin(address)
        assert fake.registered == 0


def test_neighbours_are_one_copy(arena, copier):
    source, address = source_of(40_000)
    copies = [
        Copy(address + 10_000 * index, arena.address + 10_000 * index, 9_990) for index in range(4)
    ]
    copier.wait_done(copier.submit(copies))
    assert (copier.counts.units, copier.counts.calls) == (1, 1)
    assert there(arena, 0, 39_990) == source.raw[:39_990]
    copies = [
        Copy(address + 10_000 * index, arena.address + 10_064 * index, 9_990) for index in range(4)
    ]
    copier.wait_done(copier.submit(copies))
    assert (copier.counts.units, copier.counts.calls) == (2, 5)


def test_a_large_copy_is_several_units(arena, copier):
    source, address = source_of(10 * SLAB + 5)
    copier.wait_done(copier.submit([Copy(address, arena.address, 10 * SLAB + 5)]))
    assert copier.counts.units == 11
    assert there(arena, 0, 10 * SLAB + 5) == source.raw


def test_a_stream_waits_for_what_is_on_its_way(arena, copier, fake):
    _, address = source_of(3 * SLAB)
    before = fake.calls("cuStreamWaitEvent")
    empty = copier.submit([])
    copier.wait_done(empty)
    copier.order_before(empty, 0)
    assert fake.calls("cuStreamWaitEvent") == before
    ticket = copier.submit([Copy(address, arena.address, 3 * SLAB)])
    copier.order_before(ticket, 0)
    assert fake.calls("cuStreamWaitEvent") - before <= 2


@pytest.mark.parametrize(
    ("alone", "pinned", "most"), [(False, True, 2), (True, True, 6), (True, False, 2)]
)
def test_more_units_are_on_their_way_where_nothing_else_wants_the_bus(
    arena, copier, fake, alone, pinned, most
):
    """But none whose slab is still read."""
    _, address = source_of(8 * SLAB)
    if pinned:
        copier.pin(address, 8 * SLAB)
    before = fake.calls("cuMemcpyHtoDAsync")
    fake.hold_events(on=True)
    ticket = copier.submit([Copy(address, arena.address, 8 * SLAB)], alone=alone)
    with pytest.raises(TooSlow):
        copier.wait_done(ticket, 0.2)
    assert fake.calls("cuMemcpyHtoDAsync") - before == most
    fake.hold_events(on=False)


@pytest.mark.parametrize("pinned", [False, True])
def test_an_order_that_is_too_late_is_withdrawn(arena, copier, fake, pinned):
    """What is not on its way by then never arrives: its place may be another's.

    What is ordered afterwards does.
    """
    _, address = source_of(6 * SLAB, seed=1)
    if pinned:
        copier.pin(address, 6 * SLAB)
    ctypes.memset(arena.address, 0, 20 * SLAB)
    fake.hold_events(on=True)
    begun = copier.submit([Copy(address, arena.address, 6 * SLAB)])
    queued = copier.submit([Copy(address, arena.address + 8 * SLAB, SLAB)])
    with pytest.raises(TooSlow, match="is withdrawn"):
        copier.wait_done(begun, 0.2)
    with pytest.raises(TooSlow):
        copier.order_before(queued, 0, 0.2)
    fake.hold_events(on=False)
    other, address = source_of(SLAB, seed=2)
    copier.wait_done(copier.submit([Copy(address, arena.address + 10 * SLAB, SLAB)]))
    assert there(arena, 10 * SLAB, SLAB) == other.raw
    assert not any(there(arena, 2 * SLAB, 8 * SLAB)), "two units were on their way"
    with pytest.raises(TooSlow):
        copier.wait_done(begun)


def test_a_copy_that_fails_fails_all_that_wait(arena, copier, fake):
    _, address = source_of(SLAB)
    fake.fail("cuMemcpyHtoDAsync", 700, 1)
    ticket = copier.submit([Copy(address, arena.address, SLAB)])
    for _ in range(2):
        with pytest.raises(NativeError, match=r"\(700\) in memcpy_htod_async"):
            copier.wait_done(ticket)
    with pytest.raises(NativeError, match="700"):
        copier.order_before(copier.submit([Copy(address, arena.address, 5)]), 0)


def test_memory_mapped_for_reading_is_pinned_so(copier, fake):
    fake.fail("cuMemHostRegister", 1, 1)
    _, address = source_of(SLAB)
    copier.pin(address, SLAB)
    assert fake.registered == 1


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuMemHostAlloc", "cuEventCreate"])
def test_a_copier_that_does_not_come_up_leaves_nothing(fake, function):
    before = fake.calls("cuStreamDestroy") - fake.calls("cuStreamCreate")
    fake.fail(function, 2, 2)
    with pytest.raises(NativeError, match="OUT_OF_MEMORY"):
        Copier(Device(0, fake.path))
    created = fake.calls("cuStreamCreate") - (function == "cuStreamCreate")
    assert fake.calls("cuStreamDestroy") - created == before
