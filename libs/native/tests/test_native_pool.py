"""Segments for torch's allocator: the same calls give the same addresses, and pools of a group
share their memory.
"""

import ctypes
import random

import pytest
from fake_cuda import MIB, fake_cuda

from pilotlight.native.device import Device, DeviceArena, Pool
from pilotlight.native.library import NativeError, OutOfMemory, library

GRANULE = 2 * MIB
CHUNK = 4 * GRANULE


@pytest.fixture
def device():
    fake_cuda().reset()
    return Device(0, fake_cuda().path)


@pytest.fixture
def arena(device):
    made = DeviceArena(device, 256 * GRANULE)
    yield made
    made.close()


def malloc(num_bytes):
    return library().get("pool_malloc", num_bytes, 0, None)


def free(address):
    library().get("pool_free", address, 0, 0, None)


def test_without_a_pool_there_is_no_memory():
    assert malloc(MIB) == 0


def test_a_segment_of_many_chunks_gets_its_access_in_one_call(device, arena):
    pool = Pool(device, arena, 8 * GRANULE, 40 * GRANULE, CHUNK)
    place = pool.take(6 * CHUNK)
    done = arena.driver_calls
    assert (done.created, done.mapped, done.access_set) == (6, 6, 1)
    ctypes.memset(place, 1, 6 * CHUNK)
    pool.give(place)
    assert pool.mapped_bytes == arena.physical_bytes == 0


@pytest.mark.parametrize(("function", "in_calls"), [("cuMemCreate", 3), ("cuMemMap", 2)])
def test_a_segment_that_cannot_be_mapped_whole_leaves_nothing(device, arena, function, in_calls):
    pool = Pool(device, arena, 8 * GRANULE, 40 * GRANULE, CHUNK)
    pool.take(CHUNK)
    fake_cuda().fail(function, 2, in_calls)
    with pytest.raises(OutOfMemory):
        pool.take(4 * CHUNK)
    assert pool.mapped_bytes == arena.physical_bytes == CHUNK
    assert pool.take(4 * CHUNK) == arena.address + 8 * GRANULE + CHUNK


def test_segments_are_mapped_while_they_live(device, arena):
    pool = Pool(device, arena, 8 * GRANULE, 40 * GRANULE, CHUNK)
    with pool.selected():
        first, second, third = (malloc(size) for size in (1, 3 * GRANULE, 5 * GRANULE))
        assert [place - arena.address - 8 * GRANULE for place in (first, second, third)] == [
            0,
            GRANULE,
            4 * GRANULE,
        ]
        assert pool.mapped_bytes == arena.physical_bytes == 3 * CHUNK
        ctypes.memset(third, 1, 5 * GRANULE)
        free(second)
        assert pool.mapped_bytes == 3 * CHUNK, "another segment lies in its chunk"
        free(first)
        assert pool.mapped_bytes == 2 * CHUNK
        assert malloc(2 * GRANULE) == first, "the lowest place that holds it"
        assert malloc(100 * GRANULE) == 0
        assert "no addresses" in ctypes.string_at(library()._functions["error"]()).decode()
    with pytest.raises(NativeError, match="still holds 2 segments"):
        pool.close()
    free(first)
    free(third)
    assert arena.physical_bytes == 0
    pool.close()
    pool.close()
    with pytest.raises(NativeError, match="there is no pool"):
        library().call("pool_close", 77)


def test_the_same_calls_give_the_same_addresses(device, arena):
    def run(pool):
        moves, live, places = random.Random(5), [], []
        with pool.selected():
            for _ in range(200):
                if live and moves.random() < 0.45:
                    free(live.pop(moves.randrange(len(live))))
                elif place := malloc(moves.randrange(1, 6 * GRANULE)):
                    live.append(place)
                    places.append(place - arena.address)
        for place in live:
            free(place)
        return places, pool.sequence

    pools = [
        Pool(device, arena, start * GRANULE, (start + 64) * GRANULE, CHUNK) for start in (0, 64)
    ]
    (one, one_sequence), (two, two_sequence) = map(run, pools)
    assert [place + 64 * GRANULE for place in one] == two
    assert one_sequence == two_sequence != (0, 0)
    for pool in pools:
        pool.close()
    assert arena.physical_bytes == 0


def test_pools_of_a_group_share_their_memory(device, arena):
    one = Pool(device, arena, 0, 64 * GRANULE, CHUNK)
    two = Pool(device, arena, 64 * GRANULE, 128 * GRANULE, CHUNK, group_of=one)
    with one.selected():
        first = malloc(8 * GRANULE)
    with two.selected():
        second = malloc(12 * GRANULE)
    assert one.mapped_bytes + two.mapped_bytes == 20 * GRANULE
    assert arena.physical_bytes == fake_cuda().used_bytes == 12 * GRANULE
    ctypes.memset(first + 5 * GRANULE, 7, 8)
    assert ctypes.string_at(second + 5 * GRANULE, 8) == b"\7" * 8
    free(first)
    assert arena.physical_bytes == 12 * GRANULE
    assert ctypes.string_at(second + 5 * GRANULE, 8) == b"\7" * 8
    free(second)
    assert arena.physical_bytes == fake_cuda().used_bytes == 0
    one.close()
    two.close()


def test_a_pool_that_nobody_closed_takes_nothing_from_another_at_its_addresses(device, arena):
    left, pool = (Pool(device, arena, 0, 64 * GRANULE, CHUNK) for _ in range(2))
    with pool.selected():
        place = malloc(CHUNK)
    assert place == arena.address
    free(place)
    assert arena.physical_bytes == 0
    pool.close()
    left.close()


def test_an_arena_ends_with_its_pools(device):
    arena = DeviceArena(device, 256 * GRANULE)
    left = Pool(device, arena, 0, 64 * GRANULE, CHUNK)
    with left.selected():
        place = malloc(CHUNK)
    assert place == arena.address
    arena.close()
    assert fake_cuda().used_bytes == 0
    with pytest.raises(NativeError, match="there is no pool"):
        left.close()
    free(place)  # as torch's allocator does it, whenever it likes


def test_a_device_that_is_full_gives_no_segment_and_loses_none(device, arena):
    pool = Pool(device, arena, 0, 64 * GRANULE, CHUNK)
    fake_cuda().set_memory(fake_cuda().used_bytes + 3 * CHUNK)
    with pool.selected():
        place = malloc(CHUNK)
        assert malloc(3 * CHUNK) == 0
        assert pool.mapped_bytes == CHUNK
        assert malloc(2 * CHUNK) == place + CHUNK
        free(place)
        free(place + CHUNK)
    assert arena.physical_bytes == 0
    pool.close()


def test_a_segment_that_does_not_fit_within_a_capture_does_not_spoil_it(device, arena):
    """The second chunk is refused: the first one goes back without a wait for the device."""
    fake = fake_cuda()
    pool = Pool(device, arena, 0, 64 * GRANULE, CHUNK)
    fake.set_memory(fake.used_bytes + 2 * CHUNK)
    with pool.selected():
        first = malloc(CHUNK)
        fake.capture(on=True)
        assert malloc(2 * CHUNK) == 0
        assert not fake.capture_spoilt
        assert pool.mapped_bytes == arena.physical_bytes == CHUNK
        assert malloc(CHUNK) == first + CHUNK
    fake.capture(on=False)
    free(first)
    free(first + CHUNK)
    assert arena.physical_bytes == 0
    pool.close()


def test_a_freed_segment_is_waited_for_as_cuda_does_it(device, arena):
    """Also where its chunk stays, because another segment lies there: the next owner of the place
    may be another stream's.
    """
    fake = fake_cuda()
    pool = Pool(device, arena, 0, 64 * GRANULE, CHUNK)
    with pool.selected():
        first, second = malloc(GRANULE), malloc(GRANULE)
    before = fake.calls("cuCtxSynchronize")
    free(first)
    assert fake.calls("cuCtxSynchronize") == before + 1
    assert pool.mapped_bytes == CHUNK
    fake.fail("cuCtxSynchronize", 719)
    free(second)
    assert pool.mapped_bytes == CHUNK, "it may still be in use"
    pool.close()
    assert arena.physical_bytes == 0


def test_pools_are_made_of_whole_chunks(device, arena):
    for start, stop, chunk in (
        (0, 5 * GRANULE, CHUNK),
        (1, CHUNK + 1, CHUNK),
        (0, 256 * CHUNK, CHUNK),
        (0, GRANULE, 7),
    ):
        with pytest.raises(NativeError, match="whole chunks"):
            Pool(device, arena, start, stop, chunk)


def test_memory_that_a_pool_had_from_elsewhere_goes_with_its_last_segment(device, arena):
    """Places where it was before may be mapped still: the arena's thread comes to them later."""
    arena.keep(64 * GRANULE)
    pool = Pool(device, arena, 32 * GRANULE, 32 * GRANULE + CHUNK, CHUNK)
    for _ in range(200):
        arena.back(0, CHUNK, CHUNK)
        arena.unback((0, CHUNK))
        with pool.selected():
            segment = malloc(MIB)
        free(segment)
        assert (arena.physical_bytes, arena.idle_bytes) == (0, 0)
    pool.close()
