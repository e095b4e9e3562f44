"""The arena on a device: the same addresses in two processes, memory behind a stage's own layers
alone, and all of it given back.
"""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.core.layout import SlotLayout
from pilotlight.engine.cuda.arena import ADDRESSES, CudaArena
from pilotlight.engine.errors import NoRoom

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
MIB = 1 << 20
G = 2 * MIB
HIDDEN, LAYERS, ROW_BYTES = 1024, 6, 4 * 128 * 2
LAYER_SHAPES = {
    "qkv": (3 * HIDDEN, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "norm": (HIDDEN,),
    "up": (4 * HIDDEN, HIDDEN),
    "down": (HIDDEN, 4 * HIDDEN),
}
SHAPES = [
    {"embedding": (8000, HIDDEN)},
    *[LAYER_SHAPES] * LAYERS,
    {"norm": (HIDDEN,), "head": (8000, HIDDEN)},
]


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def assert_all_is_given_back(arena: CudaArena, free_before: int) -> None:
    """Nothing is in use; what is kept for what needs some next is all that the driver misses, and
    trimmed, nothing is.
    """
    assert arena.physical_bytes == 0
    arena.native_arena.settle(arena.most_idle_bytes)
    assert abs(free_before - free_bytes() - arena.idle_bytes) < 4 * MIB
    arena.trim()
    assert arena.idle_bytes == 0
    assert abs(free_before - free_bytes()) < 4 * MIB


def layout_of(arena: CudaArena) -> SlotLayout:
    return SlotLayout(
        SHAPES,
        LAYERS,
        ROW_BYTES,
        2,
        arena.slot_bytes,
        granule_bytes=arena.granule_bytes,
        pool_bytes=arena.pool_bytes,
    )


def fill(arena: CudaArena, layout: SlotLayout, parts: range) -> dict[str, int]:
    """Every tensor's address and a sum over what was written to it."""
    found = dict[str, int]()
    for part in parts:
        for name, offset in layout.tensors(part).items():
            tensor = arena.tensor(offset, SHAPES[part][name], torch.bfloat16)
            tensor.normal_(
                generator=torch.Generator(arena.device).manual_seed(part * 100 + len(name))
            )
            found[f"{part} {name} {tensor.data_ptr():#x}"] = int(
                tensor.view(torch.int16).sum(dtype=torch.int64)
            )
    return found


CHILD = """
import json, sys
import torch
sys.path[:0] = sys.argv[1].split(":")
import test_gpu_arena as here
arena = here.CudaArena(0)
layout = here.layout_of(arena)
for part in range(len(here.SHAPES)):
    arena.back(layout.part(part))
print(json.dumps(here.fill(arena, layout, range(len(here.SHAPES)))), flush=True)
"""


def in_another_process(program: str, *arguments: str, fds: tuple[int, ...] = ()) -> str:
    paths = ":".join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", program, paths, *arguments]
    done = subprocess.run(
        command, pass_fds=fds, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_processes_lay_the_same_model_out_at_the_same_addresses(
    arena: CudaArena, record_property: Record
) -> None:
    assert (arena.address, arena.canonical, arena.granule_bytes) == (ADDRESSES[0], True, G)
    layout = layout_of(arena)
    for part in range(len(SHAPES)):
        arena.back(layout.part(part))
    mine = fill(arena, layout, range(len(SHAPES)))
    theirs = json.loads(in_another_process(CHILD))
    assert theirs == mine
    record_property("tensors", len(mine))


CONFLICT = """
import ctypes, sys
import torch
sys.path[:0] = sys.argv[1].split(":")
import test_gpu_arena as here
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
there = here.ADDRESSES[0] + (1 << 40)
assert libc.mmap(there, 4096, 0, 0x22 | 0x100000, -1, 0) == there
arena, second = here.CudaArena(0), here.CudaArena(0)
assert (arena.address, arena.canonical) == (here.ADDRESSES[1], False)
assert second.address == here.ADDRESSES[2]
arena.back(here.Extent(0, here.G))
assert arena.tensor(0, (4,), torch.float32).fill_(2).sum() == 8
print("fell back")
"""


def test_a_conflict_falls_back_to_another_base(device: torch.device) -> None:
    assert in_another_process(CONFLICT).split() == ["fell", "back"]


def test_a_stage_maps_its_own_layers_and_consolidation_the_rest_in_place(
    arena: CudaArena, record_property: Record
) -> None:
    before = free_bytes()
    layout = layout_of(arena)
    mine = range(3, 6)
    for part in mine:
        arena.back(layout.part(part))
    own = sum(layout.part(part).num_bytes for part in mine)
    assert arena.physical_bytes == own
    assert abs(before - free_bytes() - own) < 4 * MIB
    written = fill(arena, layout, mine)
    for part in {*range(len(SHAPES))} - {*mine}:
        arena.back(layout.part(part))
    everything = fill(arena, layout, range(len(SHAPES)))
    assert written.items() <= everything.items()
    kept = arena.tensor(layout.tensors(4)["up"], SHAPES[4]["up"], torch.bfloat16)
    assert int(kept.view(torch.int16).sum(dtype=torch.int64)) in written.values()
    record_property("driver_calls", str(arena.driver_calls))
    for part in range(len(SHAPES)):
        arena.unback(layout.part(part))
    assert_all_is_given_back(arena, before)


def test_kv_grows_and_goes_back_in_place(arena: CudaArena, record_property: Record) -> None:
    """To 24 GiB and back in unequal steps; what lies in the blocks that stay is as it was."""
    before, layout = free_bytes(), layout_of(arena)
    block_bytes = 16 * ROW_BYTES
    blocks, kept, spent = 0, 2000, dict[str, float]()
    marks: list[torch.Tensor] = []
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for wanted in (kept, 120_000, 131_072, 90_001, 7_777, 50_000, kept):
        torch.cuda.synchronize()
        start.record()
        for layer in range(LAYERS):
            for extent in layout.kv(layer, *sorted((blocks, wanted))):
                if wanted > blocks:
                    arena.back(extent)
                else:
                    arena.unback(extent)
        stop.record()
        stop.synchronize()
        spent[f"{blocks} to {wanted} blocks, ms"] = round(start.elapsed_time(stop), 3)
        blocks = wanted
        if not marks:
            for layer in range(LAYERS):
                marks.append(
                    arena.tensor(layout.values(layer), (kept * block_bytes // 2,), torch.int16)
                )
                marks[-1].random_(generator=torch.Generator(arena.device).manual_seed(layer))
        for layer, mark in enumerate(marks):
            expected = torch.empty_like(mark).random_(
                generator=torch.Generator(arena.device).manual_seed(layer)
            )
            assert torch.equal(mark, expected)
        needed = sum(
            extent.num_bytes for layer in range(LAYERS) for extent in layout.kv(layer, 0, blocks)
        )
        assert arena.physical_bytes == needed
        del expected
    record_property("times", spent)
    record_property("driver_calls", str(arena.driver_calls))
    for layer in range(LAYERS):
        for extent in layout.kv(layer, 0, blocks):
            arena.unback(extent)
    assert_all_is_given_back(arena, before)


def test_a_thousand_random_operations_leak_no_device_memory(
    arena: CudaArena, record_property: Record
) -> None:
    moves = random.Random(7)
    before = free_bytes()
    held = set[tuple[int, int]]()
    slots = [arena.open_slot() for _ in range(3)]
    values = dict[tuple[int, int], int]()
    for number in range(1000):
        slot = moves.randrange(3)
        start = moves.randrange(120)
        wanted = {(slot, granule) for granule in range(start, start + moves.randrange(1, 40))}
        extent = Extent(start * G, (start + len(wanted)) * G)
        if moves.random() < 0.55 and not wanted & held:
            slots[slot].back(extent)
            slots[slot].tensor(extent.start, (extent.num_bytes,), torch.uint8).fill_(number % 251)
            held |= wanted
            values |= dict.fromkeys(wanted, number % 251)
        elif gone := wanted & held:
            for _, granule in gone:
                slots[slot].unback(Extent(granule * G, (granule + 1) * G))
            held -= gone
        if number % 100 == 99:
            for where, granule in held:
                assert bool(
                    (
                        slots[where].tensor(granule * G, (G,), torch.uint8)
                        == values[where, granule]
                    ).all()
                )
            assert arena.physical_bytes == len(held) * G
    record_property("driver_calls", str(arena.driver_calls))
    for slot in slots:
        slot.close()
    record_property("idle_bytes", arena.idle_bytes)
    assert_all_is_given_back(arena, before)
    record_property("free_bytes_before_and_after", [before, free_bytes()])


def test_more_than_the_device_has_is_no_room_and_keeps_nothing(arena: CudaArena) -> None:
    before = free_bytes()
    arena.capacity_bytes = 1 << 40
    with pytest.raises(NoRoom, match="OUT_OF_MEMORY"):
        arena.back(Extent(0, 200 << 30))
    assert abs(before - free_bytes()) < 4 * MIB
    arena.back(Extent(0, G))


IMPORTER = """
import socket, sys
import torch
sys.path[:0] = sys.argv[1].split(":")
import test_gpu_arena as here
arena = here.CudaArena(0)
_, (fd,), _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[2])), 1, 1)
arena.adopt(here.Extent(0, 8 * here.G), fd)
there = arena.tensor(3 * here.G, (1000,), torch.float32)
print(float(there.sum()))
there.fill_(2)
torch.cuda.synchronize()
"""


def test_another_process_maps_what_is_exported(arena: CudaArena) -> None:
    arena.back(Extent(0, 8 * G))
    mine = arena.tensor(3 * G, (1000,), torch.float32).fill_(3)
    torch.cuda.synchronize()
    fd, extent = arena.export(3 * G)
    assert extent == Extent(0, 8 * G)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [fd])
        assert (
            float(in_another_process(IMPORTER, str(theirs.fileno()), fds=(theirs.fileno(),)))
            == 3000
        )
    os.close(fd)
    assert float(mine.sum()) == 2000
