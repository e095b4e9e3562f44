"""The CUDA arena over a fake driver: all of it but the device.

What a device does with it is in tests/gpu.
"""

import ctypes
import mmap
import os

import pytest
import torch
from fake_cuda import MIB, FakeCuda, fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda.arena import ADDRESSES, CudaArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import EngineFailed, NoRoom
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype, Stage

G = 2 * MIB
CUDA_OUT_OF_MEMORY, CUDA_LAUNCH_FAILED = 2, 719


@pytest.fixture
def fake() -> FakeCuda:
    found = fake_cuda()
    found.reset()
    return found


@pytest.fixture
def make(fake):
    made = []

    def arena(**settings):
        settings = {"num_slots": 2, "slot_bytes": 64 << 30, **settings}
        made.append(CudaArena(0, driver=fake.path, device=torch.device("cpu"), **settings))
        return made[-1]

    yield arena
    for each in made:
        each.close()


def test_an_arena_lies_where_artifacts_expect_it_or_says_that_it_does_not(make):
    first, second = make(), make()
    assert (first.address, first.canonical) == (ADDRESSES[0], True)
    assert (second.address, second.canonical) == (ADDRESSES[1], False)
    with pytest.raises(NoRoom, match="something else is at each of 0x600000000000, 0x500000000000"):
        make(addresses=ADDRESSES[:2])


def test_one_page_of_somebody_else_moves_the_arena(make):
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    there = ADDRESSES[0] + (70 << 30)
    assert libc.mmap(there, mmap.PAGESIZE, 0, 0x22 | 0x100000, -1, 0) == there
    try:
        assert make().address == ADDRESSES[1]
    finally:
        libc.munmap(there, mmap.PAGESIZE)


def test_no_device_is_an_engine_that_failed(fake):
    with pytest.raises(EngineFailed, match="no arena on device 3"):
        CudaArena(3, driver=fake.path)


def test_a_slot_is_the_home_that_is_asked_for_or_the_next_free_one(make):
    arena = make()
    second = arena.open_slot(1)
    assert second.number == 1
    first = arena.open_slot(1)
    assert first.number == 0, "slot 1 holds a model already"
    for home in (None, 0, 1):
        with pytest.raises(NoRoom, match="every slot"):
            arena.open_slot(home)
    first.close()
    second.close()
    assert arena.free_slots == 2
    assert arena.open_slot().number == 0


def test_spare_is_what_stages_may_never_take_however_much_they_have(make, checkpoint):
    arena = make()
    free_bytes, _ = arena.native.memory()
    assert arena.spare_bytes == 0, "all of it is for stages"
    arena.capacity_bytes = free_bytes - 7 * MIB
    assert arena.spare_bytes == 7 * MIB
    decoder = decoder_of(checkpoint("llama").spec)
    memory = StageMemory(arena, decoder, Stage(0, 4), Dtype.FLOAT64)
    memory.resize(4)
    assert arena.backed_bytes > 0
    taken_bytes = arena.physical_bytes - arena.backed_bytes
    assert arena.spare_bytes == 7 * MIB - taken_bytes
    memory.close()
    assert arena.spare_bytes == 7 * MIB


def test_a_stage_backs_its_own_layers_where_the_whole_model_would(make, checkpoint):
    decoder = decoder_of(checkpoint("llama").spec)

    def places(arena, stage):
        memory = StageMemory(arena, decoder, stage, Dtype.FLOAT64)
        memory.resize(4)
        tensors = [tensor for part in memory.parts for tensor in memory.tensors(part).values()]
        tensors += [
            half
            for layer in range(stage.start, stage.stop)
            for half in memory.keys_and_values(layer)
        ]
        found = {tensor.data_ptr() - arena.address for tensor in tensors}, arena.physical_bytes
        memory.close()
        assert arena.physical_bytes == 0
        return found

    arena, elsewhere = make(), make()
    (whole, whole_bytes), (head, head_bytes), (tail, tail_bytes) = (
        places(arena, Stage(0, 4)),
        places(elsewhere, Stage(0, 1)),
        places(arena, Stage(1, 4)),
    )
    assert head | tail == whole
    assert not head & tail
    assert head_bytes + tail_bytes == whole_bytes


def test_kv_grows_and_shrinks_in_place_through_chunks(make, checkpoint):
    """A layer's half grows over several chunks and comes back to a part of one: the bytes that stay
    are moved behind its back.
    """
    arena = make()
    memory = StageMemory(arena, decoder_of(checkpoint("llama").spec), Stage(0, 4), Dtype.FLOAT64)
    parameters = arena.physical_bytes
    kv = KvCache(memory, 3)
    one = torch.arange(4 * 2 * 48 * 2 * 12, dtype=torch.float64).view(4, 2, 48, 2, 12)
    kv.write(Stage(0, 4), (2, 0, 1), 0, one)
    address = memory.keys_and_values(2)[0].data_ptr()
    for num_blocks in (30_000, 14_000, 20_000, 3):
        kv.resize(num_blocks)
        assert memory.keys_and_values(2)[0].data_ptr() == address
        assert torch.equal(kv.read(Stage(0, 4), (2, 0, 1), 0, 48), one)
        assert arena.physical_bytes == arena.backed_bytes
    assert arena.driver_calls.moved_bytes > 0
    assert arena.physical_bytes - parameters == 4 * 2 * G
    memory.close()
    assert arena.physical_bytes == 0


def test_memory_that_the_device_does_not_have_is_refused_and_nothing_is_kept(
    make, fake, checkpoint, clock
):
    model = checkpoint("llama")
    arena = make()
    engine = Engine(1, clock, arena=arena)
    fake.set_memory(fake.used_bytes + 20 * G)
    with pytest.raises(NoRoom, match=r"refuses .*OUT_OF_MEMORY"):
        engine.begin_load("i", model.spec, model.spec.whole, Dtype.FLOAT64, 64 * MIB)
    assert (engine.backed_bytes, arena.physical_bytes) == (0, 0)
    with pytest.raises(NoRoom, match="are in use already"):
        make(capacity_bytes=G).back(Extent(0, 2 * G))


def test_what_torch_keeps_for_itself_is_asked_for_before_memory_is_refused(make, fake, monkeypatch):
    asked: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(None))
    arena = make()
    fake.fail("cuMemCreate", CUDA_OUT_OF_MEMORY)
    slot = arena.open_slot()
    slot.back(Extent(0, 2 * G))
    assert (len(asked), arena.physical_bytes) == (1, 2 * G)


def test_memory_that_the_device_does_not_take_back_stays_in_the_books(make, fake):
    """All of it, also whole chunks, where the driver refuses to unmap the one that is cut."""
    arena = make()
    slot = arena.open_slot()
    slot.back(Extent(0, 2 << 30))
    slot.back(Extent(3 << 30, 4 << 30))
    slot.tensor(0, (4,), torch.uint8).fill_(7)
    fake.fail("cuMemUnmap", CUDA_LAUNCH_FAILED, in_calls=2)
    with pytest.raises(EngineFailed, match="does not take"):
        slot.unback(Extent(G, 2 << 30), Extent(3 << 30, 4 << 30))
    assert arena.backed_bytes == arena.physical_bytes == 3 << 30
    assert slot.tensor(0, (4,), torch.uint8).tolist() == [7] * 4
    slot.close()
    assert arena.backed_bytes == arena.physical_bytes == 0


def test_what_is_lost_with_memory_that_was_taken_away_is_in_no_book(make, fake):
    """The device is full, so what stays needs what goes; and then it is refused."""
    arena = make()
    slot = arena.open_slot()
    fake.set_memory(fake.used_bytes + 32 * G)
    slot.back(Extent(0, 32 * G))
    fake.fail("cuMemCreate", CUDA_OUT_OF_MEMORY, in_calls=2)
    with pytest.raises(EngineFailed):
        slot.unback(Extent(0, 3 * G))
    assert arena.backed_bytes == arena.physical_bytes
    slot.close()
    assert arena.backed_bytes == arena.physical_bytes == 0


def test_every_layer_has_the_blocks_or_none_has(make, fake, checkpoint):
    """The device takes one layer's memory back, and then no more: both have what they had."""
    arena = make()
    decoder = decoder_of(checkpoint("llama").spec)
    memory = StageMemory(arena, decoder, decoder.spec.whole, Dtype.FLOAT64)
    kv = KvCache(memory, 20_000)
    backed = arena.backed_bytes
    fake.fail("cuMemUnmap", CUDA_LAUNCH_FAILED, in_calls=2)
    with pytest.raises(EngineFailed):
        kv.resize(1)
    assert (memory.num_blocks, arena.backed_bytes, arena.physical_bytes) == (20_000, backed, backed)
    kv.resize(1)
    assert arena.backed_bytes < backed
    memory.close()


def test_a_refusal_for_another_reason_keeps_nothing_either(make, fake, checkpoint, clock):
    model = checkpoint("llama")
    arena = make()
    engine = Engine(1, clock, arena=arena)
    free = arena.free_slots
    fake.fail("cuMemCreate", CUDA_LAUNCH_FAILED, in_calls=3)
    with pytest.raises(EngineFailed):
        engine.begin_load("i", model.spec, model.spec.whole, Dtype.FLOAT64, 64 * MIB)
    assert (engine.backed_bytes, arena.physical_bytes, arena.free_slots) == (0, 0, free)


def test_a_whole_model_runs_on_the_arenas_books(make, checkpoint, clock, driver, prompts):
    """The fake's memory is memory, so the CPU's own runner works in it: every address that the
    engine uses is backed.
    """
    model = checkpoint("llama")
    runs = driver()
    runs.engine = Engine(1, clock, arena=make())
    runs.load(model, kv_tokens=64_000)  # whole granules are counted
    runs.add("one", prompts[1], max_tokens=5)
    assert runs.finish()["one"] == model.greedy(prompts[1], 5)


def test_exported_memory_is_mapped_in_the_other_arena(make):
    here, there = make(), make()
    here.back(Extent(0, 4 * G))
    here.tensor(2 * G, (3,), torch.int64).copy_(torch.tensor([5, 6, 7]))
    fd, extent = here.export(3 * G)
    assert extent == Extent(0, 4 * G)
    there.adopt(Extent(8 * G, 12 * G), fd)
    os.close(fd)
    assert there.tensor(10 * G, (3,), torch.int64).tolist() == [5, 6, 7]
    with pytest.raises(EngineFailed, match="held already"):
        there.adopt(Extent(8 * G, 12 * G), fd)
    there.unback(Extent(8 * G, 12 * G))
    with pytest.raises(EngineFailed, match="nothing to export"):
        there.export(9 * G)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int32,
        torch.int64,
    ],
)
def test_tensors_lie_over_addresses_in_every_dtype(make, dtype):
    arena = make()
    arena.back(Extent(0, G))
    tensor = arena.tensor(64, (3, 5), dtype)
    assert (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()) == (
        arena.address + 64,
        dtype,
        (3, 5),
        True,
    )
    tensor.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(arena.tensor(64, (15,), dtype), torch.arange(15).to(dtype))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "back", "unback", "close"]),
            st.integers(0, 30),
            st.integers(0, 8),
        ),
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_what_lies_in_a_slot_stays_until_it_is_given_back(moves):
    fake = fake_cuda()
    fake.reset()
    before = fake.used_bytes
    arena = CudaArena(
        0,
        driver=fake.path,
        device=torch.device("cpu"),
        num_slots=3,
        slot_bytes=17 << 30,
        capacity_bytes=40 * G,
    )
    slots, granules, count = [], {}, 0
    for move, first, length in moves:
        if move == "open":
            if arena.free_slots:
                slots.append(arena.open_slot())
            continue
        if not slots:
            continue
        slot = slots[first % len(slots)]
        mine = [granule for number, granule in granules if number == slot.number]
        if move == "close":
            slot.close()
            slots.remove(slot)
            granules = {key: value for key, value in granules.items() if key[0] != slot.number}
        elif move == "back":
            if len(granules) + length > 40:
                with pytest.raises(NoRoom):
                    slot.back(Extent(first * G, (first + length) * G))
            elif not set(range(first, first + length)) & set(mine):
                slot.back(Extent(first * G, (first + length) * G))
                for granule in range(first, first + length):
                    count += 1
                    tensor = slot.tensor(granule * G, (16,), torch.uint8)
                    tensor.fill_(count % 256)
                    granules[slot.number, granule] = (tensor, count % 256)
        elif mine:
            granule = mine[length % len(mine)]
            slot.unback(Extent(granule * G, (granule + 1) * G))
            del granules[slot.number, granule]
        assert arena.backed_bytes == arena.physical_bytes == len(granules) * G
        for tensor, number in granules.values():
            assert bool((tensor == number).all())
    for slot in slots:
        slot.close()
    arena.trim()
    assert (arena.backed_bytes, arena.physical_bytes, fake.used_bytes) == (0, 0, before)
    arena.close()


def test_what_is_left_to_another_process_is_no_memory_that_lies_idle(make, fake):
    before = fake.used_bytes
    arena = make(capacity_bytes=12 * G)
    slot = arena.open_slot()
    slot.back(Extent(0, 2 * G))
    slot.back(Extent(2 * G, 10 * G))
    slot.unback(Extent(2 * G, 10 * G))
    arena.native_arena.settle(arena.most_idle_bytes)
    assert fake.used_bytes == before + 10 * G, "it keeps what may come back"
    arena.leave(9 * G)
    assert (arena.idle_bytes, fake.used_bytes) == (0, before + 2 * G)
    slot.back(Extent(2 * G, 4 * G))
    slot.unback(Extent(2 * G, 4 * G))
    arena.native_arena.settle(arena.most_idle_bytes)
    assert arena.most_idle_bytes == G
    assert fake.used_bytes <= before + 3 * G, "as long as it is left"
    arena.leave(0)
    slot.back(Extent(2 * G, 10 * G))
    slot.unback(Extent(2 * G, 10 * G))
    arena.native_arena.settle(arena.most_idle_bytes)
    assert fake.used_bytes == before + 10 * G
