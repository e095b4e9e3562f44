"""Memory that is given back and kept, over a fake driver: what is called when, and that refusals,
a full device and an end in between lose nothing.
"""

import ctypes
import os
import threading

import pytest
from fake_cuda import MIB, FakeCuda, fake_cuda

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.library import NativeError, OutOfMemory

GRANULE = 2 * MIB
CHUNK = 8 * GRANULE
LAUNCH_FAILED, CUDA_OUT_OF_MEMORY = 719, 2
CALLS = ("cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemRelease")
PATIENCE_S = 60.0


@pytest.fixture
def fake() -> FakeCuda:
    found = fake_cuda()
    found.reset()
    return found


@pytest.fixture
def arena(fake):
    """Keeps all that it is given back."""
    made = DeviceArena(Device(0, fake.path), 64 * GRANULE)
    made.keep(64 * GRANULE)
    yield made
    made.close()


def write(arena, place, value):
    ctypes.memset(arena.address + place, value, 64)


def read(arena, place):
    return ctypes.string_at(arena.address + place, 64)


def calls(fake):
    return {name: fake.calls(name) for name in CALLS}


def made_since(fake, before):
    """The calls of each kind since then, but for those that there were none of."""
    return {
        name: count - before[name] for name, count in calls(fake).items() if count > before[name]
    }


def wait_for(condition):
    """For the arena's thread."""
    done = threading.Event()
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        done.wait(0.001)
    pytest.fail("the arena's thread has not come to it")


def test_whole_chunks_go_back_with_one_wait_and_no_other_call(arena, fake):
    """They stay mapped where they were; others may have the memory at once."""
    arena.back(0, 4 * CHUNK, CHUNK)
    before, waits = calls(fake), fake.calls("cuCtxSynchronize")
    arena.unback((0, CHUNK), (2 * CHUNK, 4 * CHUNK))
    assert (arena.physical_bytes, arena.idle_bytes) == (CHUNK, 3 * CHUNK)
    assert fake.calls("cuCtxSynchronize") == waits + 1
    assert made_since(fake, before) == {}
    arena.settle(3 * CHUNK)
    assert made_since(fake, before) == {"cuMemUnmap": 3}
    assert fake.mappings == 1
    assert fake.used_bytes == 4 * CHUNK, "none of it is released"


def test_idle_memory_is_mapped_elsewhere_without_a_create(arena, fake):
    arena.back(0, 3 * CHUNK, CHUNK)
    arena.unback((0, 3 * CHUNK))
    arena.settle(3 * CHUNK)
    before = calls(fake)
    arena.back(32 * GRANULE, 32 * GRANULE + 2 * CHUNK, CHUNK)
    assert made_since(fake, before) == {"cuMemMap": 2, "cuMemSetAccess": 1}
    assert (arena.physical_bytes, arena.idle_bytes, fake.used_bytes) == (
        2 * CHUNK,
        CHUNK,
        3 * CHUNK,
    )
    write(arena, 32 * GRANULE, 1)
    assert read(arena, 32 * GRANULE) == bytes([1]) * 64


def test_what_has_gone_back_is_had_again_at_its_place(arena, fake):
    """It is the same memory, mapped still: the driver is not called."""
    arena.back(0, 4 * CHUNK, CHUNK)
    before = calls(fake)
    for _ in range(20):
        arena.unback((0, 4 * CHUNK))
        arena.back(0, 4 * CHUNK, CHUNK)
        for chunk in range(4):
            write(arena, chunk * CHUNK, chunk + 1)
        assert [read(arena, chunk * CHUNK)[0] for chunk in range(4)] == [1, 2, 3, 4]
    assert made_since(fake, before) == {}
    assert (arena.physical_bytes, arena.idle_bytes, fake.used_bytes) == (4 * CHUNK, 0, 4 * CHUNK)


def test_idle_memory_is_unmapped_at_its_old_place_before_it_is_mapped_elsewhere(arena, fake):
    """Drivers refuse to have it at both. Other places of idle memory stay."""
    arena.back(0, 3 * CHUNK, CHUNK)
    arena.unback((0, 3 * CHUNK))
    before = calls(fake)
    arena.back(32 * GRANULE, 32 * GRANULE + CHUNK, CHUNK)
    assert made_since(fake, before) == {"cuMemUnmap": 1, "cuMemMap": 1, "cuMemSetAccess": 1}
    assert (arena.physical_bytes, arena.idle_bytes, fake.mappings) == (CHUNK, 2 * CHUNK, 3)
    arena.unback((32 * GRANULE, 32 * GRANULE + CHUNK))
    assert (arena.idle_bytes, fake.mappings) == (3 * CHUNK, 3)
    arena.settle(0)
    assert (fake.mappings, fake.used_bytes) == (0, 0)


def test_idle_memory_that_cannot_be_unmapped_is_not_used_elsewhere(arena, fake):
    arena.back(0, CHUNK, CHUNK)
    arena.unback((0, CHUNK))
    fake.fail("cuMemUnmap", LAUNCH_FAILED)
    with pytest.raises(NativeError, match="719"):
        arena.back(32 * GRANULE, 32 * GRANULE + CHUNK, CHUNK)
    assert (arena.physical_bytes, arena.idle_bytes, fake.mappings) == (0, CHUNK, 1)
    arena.back(32 * GRANULE, 32 * GRANULE + CHUNK, CHUNK)
    assert (arena.physical_bytes, arena.idle_bytes, fake.mappings) == (CHUNK, 0, 1)


def test_the_place_of_a_model_that_comes_back_is_cleared_of_what_others_have_by_now(arena, fake):
    arena.back(0, 2 * CHUNK, CHUNK)
    arena.unback((0, 2 * CHUNK))
    arena.back(32 * GRANULE, 32 * GRANULE + CHUNK, CHUNK)
    write(arena, 32 * GRANULE, 3)
    before = calls(fake)
    arena.back(0, 2 * CHUNK, CHUNK)
    assert made_since(fake, before) == {"cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 1}
    write(arena, 0, 1)
    write(arena, CHUNK, 2)
    assert [read(arena, at)[0] for at in (0, CHUNK, 32 * GRANULE)] == [1, 2, 3]


def test_a_place_that_is_mapped_still_is_not_seen_to_be_backed(arena, fake):
    """What lies there is nobody's."""
    arena.back(0, 2 * CHUNK, CHUNK)
    arena.unback((0, CHUNK))
    assert arena.backed(0, 64 * GRANULE) == [(CHUNK, 2 * CHUNK)]
    assert fake.mappings == 2
    before = calls(fake)
    arena.back(0, GRANULE, GRANULE)
    assert made_since(fake, before)["cuMemUnmap"] == 1, "the place was cleared first"
    assert fake.mappings == 2
    with pytest.raises(NativeError, match="not backed everywhere"):
        arena.unback((0, CHUNK))
    with pytest.raises(NativeError, match="no memory is behind"):
        arena.export(GRANULE)


def test_short_idle_pieces_are_not_what_long_memory_is_made_of(arena, fake):
    """A chunk is not put together from pieces below an eighth of it."""
    arena.back(0, 4 * GRANULE, GRANULE)
    arena.unback((0, 4 * GRANULE))
    arena.settle(4 * GRANULE)
    before = calls(fake)
    arena.back(32 * GRANULE, 48 * GRANULE, 16 * GRANULE)
    assert made_since(fake, before) == {"cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 1}
    assert arena.idle_bytes == 4 * GRANULE


@pytest.mark.parametrize(
    ("function", "in_calls"),
    [
        ("cuMemCreate", 1),
        ("cuMemCreate", 2),
        ("cuMemMap", 2),
        ("cuMemMap", 4),
        ("cuMemSetAccess", 1),
    ],
)
def test_backing_that_fails_half_way_leaves_idle_memory_idle(arena, fake, function, in_calls):
    """Two idle chunks are mapped, two are to be created."""
    arena.back(0, 3 * CHUNK, CHUNK)
    write(arena, 2 * CHUNK, 9)
    arena.unback((0, 2 * CHUNK))
    arena.settle(2 * CHUNK)
    fake.fail(function, LAUNCH_FAILED, in_calls)
    with pytest.raises(NativeError, match="719"):
        arena.back(32 * GRANULE, 32 * GRANULE + 4 * CHUNK, CHUNK)
    assert arena.backed(0, 64 * GRANULE) == [(2 * CHUNK, 3 * CHUNK)]
    assert arena.physical_bytes == CHUNK
    assert arena.idle_bytes >= 2 * CHUNK
    assert fake.used_bytes == CHUNK + arena.idle_bytes
    arena.back(32 * GRANULE, 32 * GRANULE + 4 * CHUNK, CHUNK)
    assert (arena.physical_bytes, arena.idle_bytes, fake.used_bytes) == (5 * CHUNK, 0, 5 * CHUNK)
    assert read(arena, 2 * CHUNK) == bytes([9]) * 64


def test_a_full_device_takes_idle_memory_back_for_what_cannot_be_made_of_it(arena, fake):
    fake.set_memory(fake.used_bytes + 16 * GRANULE)
    arena.back(0, 16 * GRANULE, GRANULE)
    arena.unback((0, 15 * GRANULE))
    arena.back(32 * GRANULE, 47 * GRANULE, 15 * GRANULE)
    assert (arena.physical_bytes, arena.idle_bytes, fake.used_bytes) == (
        16 * GRANULE,
        0,
        16 * GRANULE,
    )
    with pytest.raises(OutOfMemory):
        arena.back(16 * GRANULE, 17 * GRANULE, GRANULE)
    arena.unback((15 * GRANULE, 16 * GRANULE))
    arena.back(16 * GRANULE, 17 * GRANULE, GRANULE)


def test_a_refusal_to_unmap_what_a_full_device_needs_is_said_and_loses_nothing(arena, fake):
    fake.set_memory(fake.used_bytes + 2 * CHUNK)
    arena.back(0, 2 * CHUNK, CHUNK)
    write(arena, CHUNK, 5)
    arena.unback((0, CHUNK))
    fake.fail("cuMemUnmap", LAUNCH_FAILED)
    with pytest.raises(NativeError, match="719"):
        arena.back(32 * GRANULE, 32 * GRANULE + GRANULE, GRANULE)
    assert arena.physical_bytes == CHUNK
    assert arena.backed(0, 64 * GRANULE) == [(CHUNK, 2 * CHUNK)]
    arena.back(32 * GRANULE, 32 * GRANULE + GRANULE, GRANULE)
    assert read(arena, CHUNK) == bytes([5]) * 64
    assert fake.used_bytes == CHUNK + GRANULE + arena.idle_bytes


def test_the_thread_releases_what_is_beyond_the_limit_and_no_more(arena, fake):
    arena.back(0, 4 * CHUNK, CHUNK)
    arena.back(4 * CHUNK, 4 * CHUNK + GRANULE, GRANULE)
    arena.unback((0, 4 * CHUNK + GRANULE))
    assert arena.idle_bytes == 4 * CHUNK + GRANULE
    arena.keep(2 * CHUNK)
    wait_for(lambda: fake.used_bytes <= 2 * CHUNK)
    assert arena.idle_bytes == fake.used_bytes == 2 * CHUNK, "the shortest piece went first"
    assert fake.mappings == 2
    arena.keep(0)
    wait_for(lambda: fake.used_bytes == 0)
    assert arena.idle_bytes == 0


def test_without_a_limit_nothing_is_kept(fake):
    """As an arena has it that is told nothing."""
    arena = DeviceArena(Device(0, fake.path), 64 * GRANULE)
    arena.back(0, 2 * CHUNK, CHUNK)
    arena.unback((0, 2 * CHUNK))
    assert (arena.idle_bytes, fake.used_bytes, fake.mappings) == (0, 0, 0)
    arena.close()


def test_an_arena_that_ends_in_mid_return_gives_everything_back(fake):
    """Its thread may be anywhere: each time some of the places are unmapped, and some are not."""
    before = fake.used_bytes, fake.mappings, fake.reserved
    for kept in range(12):
        arena = DeviceArena(Device(0, fake.path), 64 * GRANULE)
        arena.keep(64 * GRANULE)
        arena.back(0, 48 * GRANULE, GRANULE)
        arena.unback((0, 40 * GRANULE))
        arena.keep(kept * 4 * GRANULE)
        arena.close()
        assert (fake.used_bytes, fake.mappings, fake.reserved) == before


def test_what_another_process_may_have_is_never_kept(arena, fake):
    """It would read there what others write next."""
    arena.back(0, 2 * CHUNK, CHUNK)
    fd, start, stop = arena.export(0)
    os.close(fd)
    assert (start, stop) == (0, CHUNK)
    arena.unback((0, 2 * CHUNK))
    assert arena.idle_bytes == CHUNK
    assert arena.physical_bytes == 0
    arena.settle(CHUNK)
    assert fake.used_bytes == CHUNK, "the exported chunk went back to the driver at once"


def test_memory_at_two_places_is_idle_when_the_last_of_them_goes(arena, fake):
    arena.back(0, CHUNK, CHUNK)
    arena.share(32 * GRANULE, 32 * GRANULE + CHUNK, 0)
    write(arena, 0, 4)
    arena.unback((0, CHUNK))
    assert (arena.physical_bytes, arena.idle_bytes) == (CHUNK, 0)
    assert read(arena, 32 * GRANULE) == bytes([4]) * 64
    arena.unback((32 * GRANULE, 32 * GRANULE + CHUNK))
    assert (arena.physical_bytes, arena.idle_bytes) == (0, CHUNK)
    arena.settle(0)
    assert (fake.used_bytes, fake.mappings) == (0, 0)


def test_a_chunk_that_is_cut_takes_idle_memory_for_what_stays(arena, fake):
    """A full device: nothing is created, and the contents stay."""
    fake.set_memory(fake.used_bytes + 2 * CHUNK)
    arena.back(0, CHUNK, CHUNK // 2)
    arena.back(CHUNK, 2 * CHUNK, CHUNK)
    write(arena, CHUNK, 6)
    arena.unback((0, CHUNK))
    creates = fake.calls("cuMemCreate")
    arena.unback((CHUNK + CHUNK // 2, 2 * CHUNK))
    assert fake.calls("cuMemCreate") == creates
    assert read(arena, CHUNK) == bytes([6]) * 64
    assert arena.physical_bytes == CHUNK // 2
    assert fake.used_bytes == arena.physical_bytes + arena.idle_bytes


def test_a_whole_device_that_goes_back_is_what_a_newcomer_is_made_of(fake):
    """144 areas in chunks of 512 MiB and less, 100 GB, and 80 parts of 800 MiB, on a device that
    has nothing else.
    """
    area, part = 704 * MIB, 800 * MIB
    arena = DeviceArena(Device(0, fake.path), 400 << 30)
    fake.set_memory(fake.used_bytes + 144 * area)
    capacity = 144 * area
    arena.keep(capacity)
    for number in range(144):
        arena.back(number * area, (number + 1) * area, 512 * MIB)
    arena.unback((0, 144 * area))
    assert arena.idle_bytes == 144 * area
    before, base = arena.driver_calls, 200 << 30
    for number in range(80):
        arena.back(base + number * part, base + (number + 1) * part, 1 << 30)
        arena.keep(capacity - (number + 1) * part)
    assert arena.physical_bytes == 80 * part
    now = arena.driver_calls
    reused = (now.mapped - before.mapped) - (now.created - before.created)
    assert reused >= 80, "a long piece at least in each part"
    arena.settle(capacity - 80 * part)
    assert arena.physical_bytes + arena.idle_bytes <= capacity
    assert fake.used_bytes == arena.physical_bytes + arena.idle_bytes
    arena.close()
    assert (fake.used_bytes, fake.mappings) == (0, 0)
