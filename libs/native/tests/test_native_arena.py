"""The arena's books over a fake driver: contents stay where they lie, nothing leaks, and every
refusal leaves things as they were.
"""

import ctypes
import mmap
import os
import socket
import subprocess
import sys

import pytest
from fake_cuda import MIB, FakeCuda, fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.library import AddressTaken, NativeError, NoDriver, OutOfMemory

GRANULE = 2 * MIB
BASE = 0x6000_0000_0000


@pytest.fixture
def fake() -> FakeCuda:
    found = fake_cuda()
    found.reset()
    return found


@pytest.fixture
def device(fake):
    return Device(0, fake.path)


@pytest.fixture
def arena(device):
    made = DeviceArena(device, 64 * GRANULE)
    yield made
    made.close()


def write(arena, place, value):
    ctypes.memset(arena.address + place, value, 64)


def read(arena, place):
    return ctypes.string_at(arena.address + place, 64)


def test_ranges_side_by_side_are_chunks_of_their_own_with_one_access(arena):
    ranges = [(0, 3 * GRANULE), (3 * GRANULE, 5 * GRANULE), (8 * GRANULE, 9 * GRANULE)]
    arena.back_all(ranges, 64 * GRANULE)
    done = arena.driver_calls
    assert (done.created, done.mapped, done.access_set) == (3, 3, 2)
    assert arena.backed(0, 64 * GRANULE) == [(0, 5 * GRANULE), (8 * GRANULE, 9 * GRANULE)]
    arena.unback((3 * GRANULE, 5 * GRANULE))
    assert arena.driver_calls.moved_bytes == 0, "no chunk is cut"


@pytest.mark.parametrize(
    "ranges",
    [
        [(4, 6), (2, 4)],
        [(4, 6), (5, 7)],
        [(4, 6), (9, 11)],
        [(4, 6), (7, 7)],
    ],
)
def test_ranges_that_cannot_be_backed_all_are_not_backed_at_all(arena, ranges):
    arena.back(10 * GRANULE, 11 * GRANULE, GRANULE)
    with pytest.raises(NativeError):
        arena.back_all([(start * GRANULE, stop * GRANULE) for start, stop in ranges], GRANULE)
    assert arena.backed(0, 64 * GRANULE) == [(10 * GRANULE, 11 * GRANULE)]
    assert arena.driver_calls.created == 1


def test_idle_memory_between_new_memory_has_its_access_already(arena):
    arena.keep(64 * GRANULE)
    arena.back(4 * GRANULE, 6 * GRANULE, 2 * GRANULE)
    write(arena, 4 * GRANULE, 7)
    arena.unback((4 * GRANULE, 6 * GRANULE))
    arena.back_all([(0, 8 * GRANULE)], 2 * GRANULE)
    for place in range(0, 8 * GRANULE, GRANULE):
        write(arena, place, 5)
    assert arena.physical_bytes == 8 * GRANULE


def test_addresses_are_those_that_were_asked_for(device, fake):
    before = fake.reserved
    arena = DeviceArena(device, 16 << 30, BASE)
    assert (arena.address, arena.granule_bytes, arena.physical_bytes) == (BASE, GRANULE, 0)
    with pytest.raises(AddressTaken, match="instead of"):
        DeviceArena(device, 16 << 30, BASE + (8 << 30))
    assert fake.reserved == before + 1
    arena.close()
    assert fake.reserved == before


def test_memory_of_the_process_in_the_way_is_a_conflict(device):
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    there = BASE + (1 << 40)
    assert libc.mmap(there, mmap.PAGESIZE, 0, 0x22 | 0x100000, -1, 0) == there
    with pytest.raises(AddressTaken):
        DeviceArena(device, 1 << 30, there)
    libc.munmap(there, mmap.PAGESIZE)
    DeviceArena(device, 1 << 30, there).close()


def test_chunks_are_as_long_as_they_may_be(arena, fake):
    before = fake.mappings
    arena.back(3 * GRANULE, 21 * GRANULE, 8 * GRANULE)
    assert fake.mappings - before == 3, "[3, 11) [11, 19) [19, 21)"
    assert arena.driver_calls.access_set == 1
    assert arena.physical_bytes == 18 * GRANULE
    arena.unback((11 * GRANULE, 19 * GRANULE))
    assert arena.driver_calls.moved_bytes == 0


def test_chunks_that_touch_go_in_one_call_and_cuts_share_a_window(arena, fake):
    """Two ranges: whole chunks, and from the middle of one to the middle of another."""
    arena.back(0, 24 * GRANULE, 8 * GRANULE)
    arena.back(30 * GRANULE, 60 * GRANULE, 10 * GRANULE)
    for granule in range(30, 60):
        write(arena, granule * GRANULE, granule + 1)
    names = ("cuMemUnmap", "cuMemAddressReserve", "cuCtxSynchronize", "cuMemcpyDtoD")
    before = {name: fake.calls(name) for name in names}
    arena.unback((0, 24 * GRANULE), (35 * GRANULE, 55 * GRANULE))
    calls = {name: fake.calls(name) - count for name, count in before.items()}
    assert calls == dict(zip(names, (3, 1, 2, 2), strict=True)), "one of the unmaps is the window's"
    assert arena.backed(0, 64 * GRANULE) == [
        (30 * GRANULE, 35 * GRANULE),
        (55 * GRANULE, 60 * GRANULE),
    ]
    for granule in (30, 34, 55, 59):
        assert read(arena, granule * GRANULE) == bytes([granule + 1]) * 64


def test_several_ranges_may_cut_one_chunk(arena, fake):
    arena.back(0, 12 * GRANULE, 12 * GRANULE)
    for granule in range(12):
        write(arena, granule * GRANULE, granule + 1)
    ranges = [(2, 3), (3, 4), (6, 8), (11, 12)]
    arena.unback(*((start * GRANULE, stop * GRANULE) for start, stop in ranges))
    left = [(0, 2), (4, 6), (8, 11)]
    assert arena.backed(0, 12 * GRANULE) == [(a * GRANULE, b * GRANULE) for a, b in left]
    assert arena.physical_bytes == fake.used_bytes == 7 * GRANULE
    for granule in (granule for span in left for granule in range(*span)):
        assert read(arena, granule * GRANULE) == bytes([granule + 1]) * 64
    with pytest.raises(NativeError, match="not behind the range before it"):
        arena.unback((8 * GRANULE, 9 * GRANULE), (4 * GRANULE, 5 * GRANULE))


def test_what_stays_of_a_chunk_keeps_place_and_contents(arena, fake):
    arena.back(0, 32 * GRANULE, 32 * GRANULE)
    for granule in range(32):
        write(arena, granule * GRANULE, granule + 1)
    arena.unback((10 * GRANULE, 12 * GRANULE))
    assert arena.physical_bytes == fake.used_bytes == 30 * GRANULE
    assert arena.driver_calls.moved_bytes == 30 * GRANULE
    for granule in {*range(32)} - {10, 11}:
        assert read(arena, granule * GRANULE) == bytes([granule + 1]) * 64
    arena.back(10 * GRANULE, 12 * GRANULE, GRANULE)


def test_a_part_is_taken_away_from_a_device_that_is_full(arena, fake):
    fake.set_memory(fake.used_bytes + 32 * GRANULE)
    arena.back(0, 32 * GRANULE, 32 * GRANULE)
    write(arena, 31 * GRANULE, 9)
    arena.unback((0, GRANULE))
    assert read(arena, 31 * GRANULE) == bytes([9]) * 64
    assert arena.physical_bytes == 31 * GRANULE
    arena.unback((GRANULE, 32 * GRANULE))
    assert arena.physical_bytes == fake.used_bytes == 0


@pytest.mark.parametrize(
    ("function", "in_calls"),
    [
        ("cuCtxSynchronize", 1),
        ("cuMemCreate", 1),
        ("cuMemcpyDtoD", 2),
        *(("cuMemUnmap", number) for number in (2, 3)),
        *(("cuMemMap", number) for number in (1, 2, 3, 4)),
        *(("cuMemSetAccess", number) for number in (1, 2, 3)),
    ],
)
def test_taking_away_is_all_or_nothing(arena, fake, function, in_calls):
    """From the middle of one chunk to the middle of the next but one, and a chunk elsewhere.

    A window for what stays is mapped and unmapped first.
    """
    arena.back(0, 24 * GRANULE, 8 * GRANULE)
    arena.back(40 * GRANULE, 41 * GRANULE, GRANULE)
    held = [*range(24), 40]
    for granule in held:
        write(arena, granule * GRANULE, granule + 1)
    fake.fail(function, 719, in_calls)
    with pytest.raises(NativeError, match="719"):
        arena.unback((4 * GRANULE, 20 * GRANULE), (40 * GRANULE, 41 * GRANULE))
    fake.reset()
    assert arena.backed(0, 64 * GRANULE) == [(0, 24 * GRANULE), (40 * GRANULE, 41 * GRANULE)]
    assert arena.physical_bytes == fake.used_bytes == 25 * GRANULE
    for granule in held:
        assert read(arena, granule * GRANULE) == bytes([granule + 1]) * 64
    arena.unback((4 * GRANULE, 20 * GRANULE), (40 * GRANULE, 41 * GRANULE))
    assert arena.backed(0, 64 * GRANULE) == [(0, 4 * GRANULE), (20 * GRANULE, 24 * GRANULE)]
    assert arena.backed(2 * GRANULE, 21 * GRANULE) == [
        (2 * GRANULE, 4 * GRANULE),
        (20 * GRANULE, 21 * GRANULE),
    ]
    assert [read(arena, granule * GRANULE)[0] - 1 for granule in (0, 3, 20, 23)] == [0, 3, 20, 23]


def test_what_a_full_device_refuses_to_give_again_is_gone_and_the_books_say_so(arena, fake):
    fake.set_memory(fake.used_bytes + 24 * GRANULE)
    arena.back(0, 24 * GRANULE, 8 * GRANULE)
    write(arena, 23 * GRANULE, 7)
    # Both times that it is asked before, and once more when the chunks are given back.
    fake.fail("cuMemCreate", 2, 3)
    with pytest.raises(OutOfMemory):
        arena.unback((4 * GRANULE, 20 * GRANULE))
    assert arena.backed(0, 24 * GRANULE) == [(20 * GRANULE, 24 * GRANULE)]
    assert arena.physical_bytes == fake.used_bytes == 4 * GRANULE
    assert read(arena, 23 * GRANULE) == bytes([7]) * 64


@pytest.mark.parametrize(
    ("function", "in_calls"),
    [("cuMemCreate", 3), ("cuMemMap", 2), ("cuMemSetAccess", 1), ("cuMemCreate", 1)],
)
def test_backing_is_all_or_nothing(arena, fake, function, in_calls):
    arena.back(0, GRANULE, GRANULE)
    fake.fail(function, 2, in_calls)
    with pytest.raises(OutOfMemory, match=r"OUT_OF_MEMORY \(2\) in mem_\w+: said by the fake"):
        arena.back(GRANULE, 9 * GRANULE, 2 * GRANULE)
    assert arena.physical_bytes == fake.used_bytes == GRANULE
    arena.back(GRANULE, 9 * GRANULE, 2 * GRANULE)


def test_a_full_device_is_out_of_memory(arena, fake):
    fake.set_memory(fake.used_bytes + 5 * GRANULE)
    with pytest.raises(OutOfMemory):
        arena.back(0, 6 * GRANULE, GRANULE)
    assert arena.physical_bytes == 0
    arena.back(0, 5 * GRANULE, GRANULE)


def test_nonsense_is_refused(arena):
    arena.back(4 * GRANULE, 8 * GRANULE, 4 * GRANULE)
    for start, stop in ((1, GRANULE), (GRANULE, GRANULE), (60 * GRANULE, 65 * GRANULE)):
        with pytest.raises(NativeError, match="whole granules"):
            arena.back(start, stop, GRANULE)
    for start, stop in ((0, 5), (7, 9), (5, 6), (0, 64)):
        with pytest.raises(NativeError, match="backed already"):
            arena.back(start * GRANULE, stop * GRANULE, GRANULE)
    for start, stop in ((3, 5), (7, 9), (20, 21)):
        with pytest.raises(NativeError, match="not backed everywhere"):
            arena.unback((start * GRANULE, stop * GRANULE))
    with pytest.raises(NativeError, match="no memory is behind"):
        arena.export(9 * GRANULE)
    with pytest.raises(NativeError, match="whole chunks"):
        arena.share(20 * GRANULE, 22 * GRANULE, 4 * GRANULE)


def test_shared_memory_lies_at_two_places_and_counts_once(arena, fake):
    arena.back(0, 8 * GRANULE, 4 * GRANULE)
    arena.share(32 * GRANULE, 40 * GRANULE, 0)
    assert arena.physical_bytes == fake.used_bytes == 8 * GRANULE
    write(arena, 7 * GRANULE, 5)
    assert read(arena, 39 * GRANULE) == bytes([5]) * 64
    with pytest.raises(NativeError, match="is shared"):
        arena.unback((0, GRANULE))
    arena.unback((0, 8 * GRANULE))
    assert read(arena, 39 * GRANULE) == bytes([5]) * 64
    assert fake.used_bytes == 8 * GRANULE
    arena.unback((32 * GRANULE, 36 * GRANULE))
    arena.unback((37 * GRANULE, 40 * GRANULE))
    assert fake.used_bytes == GRANULE


CHILD = """
import ctypes, socket, sys
sys.path[:0] = sys.argv[3].split(":")
from pilotlight.native.device import Device, DeviceArena
arena = DeviceArena(Device(0, sys.argv[1]), 64 << 21, 0x600000000000)
_, (fd,), _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[2])), 1, 1)
arena.adopt(8 << 21, 4 << 21, fd)
print(ctypes.string_at(arena.address + (9 << 21), 4).hex(), arena.physical_bytes >> 21, flush=True)
ctypes.memset(arena.address + (10 << 21), 0x77, 4)
arena.unback((8 << 21, 12 << 21))
arena.close()
"""


def test_another_process_maps_what_is_exported(arena, fake):
    arena.back(0, 8 * GRANULE, 4 * GRANULE)
    write(arena, 5 * GRANULE, 0x55)
    fd, start, stop = arena.export(5 * GRANULE)
    assert (start, stop) == (4 * GRANULE, 8 * GRANULE)
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"x"], [fd])
        command = [sys.executable, "-c", CHILD, fake.path, str(there.fileno()), ":".join(sys.path)]
        done = subprocess.run(
            command,
            pass_fds=[there.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    os.close(fd)
    assert done.stdout.split() == ["55555555", "4"]
    assert read(arena, 6 * GRANULE)[:4] == b"\x77" * 4


def test_there_is_one_driver_in_a_process(device):
    with pytest.raises(NativeError, match="another driver"):
        Device(0, "libcuda.so.1")
    with pytest.raises(NativeError, match=r"\(101\) in device_get"):
        Device(1, fake_cuda().path)


def test_no_driver_is_said_so(tmp_path):
    program = (
        "import sys; sys.path[:0] = sys.argv[2].split(':')\n"
        "from pilotlight.native.device import Device\nfrom pilotlight.native.library import NoDriver\n"
        "try:\n    Device(0, sys.argv[1])\nexcept NoDriver as error:\n    print(error)"
    )
    empty = tmp_path / "empty.so"
    subprocess.run(
        ["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(empty)], check=True, timeout=60
    )
    for path, message in ((tmp_path / "none.so", "cannot open"), (empty, "the driver is too old")):
        command = [sys.executable, "-c", program, str(path), ":".join(sys.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert message in done.stdout
    assert issubclass(NoDriver, NativeError)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["back", "back", "unback", "share"]),
            st.integers(0, 23),
            st.integers(1, 9),
            st.sampled_from([1, 3, 8]),
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_random_operations_keep_contents_and_leak_nothing(moves):
    """Each backed granule has a number of its own; granules 24 to 31 are where sharing is tried."""
    fake = fake_cuda()
    fake.reset()
    before = fake.used_bytes, fake.mappings
    arena = DeviceArena(Device(0, fake.path), 33 * GRANULE)
    held: dict[int, int] = {}
    count = 0
    for move, start, length, chunk in moves:
        stop = min(start + length, 24)
        wanted = set(range(start, stop))
        if move == "back":
            if wanted & held.keys():
                with pytest.raises(NativeError, match="already"):
                    arena.back(start * GRANULE, stop * GRANULE, chunk * GRANULE)
                continue
            arena.back(start * GRANULE, stop * GRANULE, chunk * GRANULE)
            for granule in wanted:
                count += 1
                held[granule] = count % 251
                write(arena, granule * GRANULE, count % 251)
        elif move == "unback":
            if not wanted <= held.keys():
                with pytest.raises(NativeError, match="not backed"):
                    arena.unback((start * GRANULE, stop * GRANULE))
                continue
            arena.unback((start * GRANULE, stop * GRANULE))
            for granule in wanted:
                del held[granule]
        else:
            try:
                arena.share(24 * GRANULE, (24 + stop - start) * GRANULE, start * GRANULE)
            except NativeError:
                continue
            assert read(arena, 24 * GRANULE) == bytes([held[start]]) * 64
            arena.unback((24 * GRANULE, (24 + stop - start) * GRANULE))
        assert arena.physical_bytes == len(held) * GRANULE
        for granule, value in held.items():
            assert read(arena, granule * GRANULE) == bytes([value]) * 64
    assert fake.used_bytes - before[0] == len(held) * GRANULE
    arena.close()
    assert (fake.used_bytes, fake.mappings) == before
