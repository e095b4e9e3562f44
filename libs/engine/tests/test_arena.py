"""Addresses and memory: nothing overlaps, nothing leaks, and what is given back is the system's
again.
"""

import gc
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.extents import Extent, ExtentSet
from pilotlight.engine.core.layout import GRANULE_BYTES, SlotLayout
from pilotlight.engine.device.arena import ARENA_ADDRESS, CpuArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import EngineFailed, NoRoom
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Dtype, Stage

PAGE = GRANULE_BYTES
MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 12)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_extents_are_a_set_of_bytes(moves):
    extents, held = ExtentSet(), set[int]()
    for adding, start, length in moves:
        extent, wanted = Extent(start, start + length), set(range(start, start + length))
        fits = not wanted & held if adding else wanted <= held
        if fits:
            (extents.add if adding else extents.remove)(extent)
            held = held | wanted if adding else held - wanted
        else:
            with pytest.raises(EngineFailed, match="held"):
                (extents.add if adding else extents.remove)(extent)
        assert {byte for each in extents for byte in range(*each)} == held
        assert extents.num_bytes == len(held)
        ends = [bound for each in extents for bound in each]
        assert ends == sorted(set(ends)), "no two touch"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "back", "unback", "close"]),
            st.integers(0, 30),
            st.integers(0, 8),
        ),
        max_size=60,
    )
)
@settings(max_examples=300, deadline=None)
def test_what_lies_in_a_slot_stays_until_it_is_given_back(moves):
    """Each backed page has a number of its own in every byte: a tensor that gets another's page
    overwrites it.
    """
    arena = CpuArena(num_slots=3, slot_bytes=32 * PAGE, capacity_bytes=40 * PAGE)
    slots, pages, count = [], {}, 0
    for move, first, length in moves:
        if move == "open":
            if len(slots) == 3:
                with pytest.raises(NoRoom, match="every slot"):
                    arena.open_slot()
                continue
            slots.append(arena.open_slot())
            continue
        if not slots:
            continue
        slot = slots[first % len(slots)]
        mine = [page for number, page in pages if number == slot.number]
        if move == "close":
            slot.close()
            slots.remove(slot)
            pages = {key: value for key, value in pages.items() if key[0] != slot.number}
        elif move == "back":
            wanted = range(first, first + length)
            if first + length > 32 or len(pages) + length > 40:
                with pytest.raises(NoRoom):
                    slot.back(Extent(first * PAGE, (first + length) * PAGE))
            elif not set(wanted) & set(mine):
                slot.back(Extent(first * PAGE, (first + length) * PAGE))
                for page in wanted:
                    tensor = slot.tensor(page * PAGE, (PAGE,), torch.uint8)
                    assert not tensor.any(), "fresh memory is zero"
                    count += 1
                    tensor.fill_(count % 256)
                    pages[slot.number, page] = (tensor, count % 256)
        elif mine:
            page = mine[length % len(mine)]
            slot.unback(Extent(page * PAGE, (page + 1) * PAGE))
            del pages[slot.number, page]
        assert arena.backed_bytes == len(pages) * PAGE
        for tensor, number in pages.values():
            assert bool((tensor == number).all())
    for slot in slots:
        slot.close()
    assert (arena.backed_bytes, arena.free_slots) == (0, 3)


@given(
    shapes=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=3),
        min_size=3,
        max_size=6,
    ),
    item_bytes=st.sampled_from([2, 4, 8]),
    row_bytes=st.integers(1, 40).map(lambda n: 16 * n),
)
@settings(max_examples=200, deadline=None)
def test_a_layout_overlaps_nowhere_and_stays_in_its_slot(shapes, item_bytes, row_bytes):
    parts = [{f"t{index}": shape for index, shape in enumerate(part)} for part in shapes]
    num_layers, slot_bytes = len(parts) - 2, 2 * MIB
    layout = SlotLayout(parts, num_layers, row_bytes, item_bytes, slot_bytes)
    taken = ExtentSet()
    for part, tensors in enumerate(parts):
        extent = layout.part(part)
        taken.add(extent)
        assert (extent.start % PAGE, extent.stop % PAGE) == (0, 0)
        inside = ExtentSet()
        for name, shape in tensors.items():
            offset = layout.tensors(part)[name]
            inside.add(Extent(offset, offset + shape[0] * shape[1] * item_bytes))
            assert offset % 64 == 0
            assert extent.start <= offset
            assert offset + shape[0] * shape[1] * item_bytes <= extent.stop
    for layer in range(num_layers):
        for extent in layout.kv(layer, 0, layout.max_blocks):
            taken.add(extent)
        grown = [
            extent
            for start in range(min(layout.max_blocks, 7))
            for extent in layout.kv(layer, start, start + 1)
        ]
        assert sum(extent.num_bytes for extent in grown) == sum(
            extent.num_bytes for extent in layout.kv(layer, 0, min(layout.max_blocks, 7))
        )
    assert max(extent.stop for extent in taken) <= slot_bytes


def test_a_model_larger_than_a_slot_is_no_room():
    with pytest.raises(NoRoom, match="does not hold"):
        SlotLayout([{"t": (1024, 1024)}] * 3, 1, 64, 8, 16 * MIB)


def test_a_stage_backs_its_own_layers_where_the_whole_model_would(checkpoint):
    """Consolidation maps the rest in place: parameters and KV of a layer have the same address in
    every stage.
    """
    decoder = decoder_of(checkpoint("llama").spec)

    def places(stage):
        arena = CpuArena(num_slots=1)
        memory = StageMemory(arena, decoder, stage, Dtype.FLOAT64)
        memory.resize(4)
        start = arena.tensor(0, (1,), torch.uint8).data_ptr()
        tensors = [tensor for part in memory.parts for tensor in memory.tensors(part).values()]
        tensors += [
            half
            for layer in range(stage.start, stage.stop)
            for half in memory.keys_and_values(layer)
        ]
        return {tensor.data_ptr() - start for tensor in tensors}, arena.backed_bytes

    (whole, whole_bytes), (head, head_bytes), (tail, tail_bytes) = map(
        places, (Stage(0, 4), Stage(0, 1), Stage(1, 4))
    )
    assert head | tail == whole
    assert not head & tail
    assert head_bytes + tail_bytes == whole_bytes


def test_kv_grows_and_shrinks_in_place(checkpoint):
    arena = CpuArena(num_slots=1)
    memory = StageMemory(arena, decoder_of(checkpoint("llama").spec), Stage(0, 4), Dtype.FLOAT64)
    parameters = arena.backed_bytes
    kv = KvCache(memory, 3)
    one = torch.arange(4 * 2 * 48 * 2 * 12, dtype=torch.float64).view(4, 2, 48, 2, 12)
    kv.write(Stage(0, 4), (2, 0, 1), 0, one)
    address = memory.keys_and_values(2)[0].data_ptr()
    for num_blocks in (200, 5, 77, 3):
        kv.resize(num_blocks)
        assert memory.keys_and_values(2)[0].data_ptr() == address
        assert torch.equal(kv.read(Stage(0, 4), (2, 0, 1), 0, 48), one)
    kv.move({2: 0, 0: 2})
    assert torch.equal(kv.read(Stage(1, 3), (0, 2, 1), 5, 40), one[1:3, :, 5:40])
    with pytest.raises(NoRoom, match="refuses"):
        kv.resize(1 << 40)
    assert torch.equal(kv.read(Stage(0, 4), (0, 2, 1), 0, 48), one)
    memory.close()
    assert arena.backed_bytes == 0 < parameters


def test_memory_that_the_device_does_not_have_is_refused_and_nothing_is_kept(checkpoint, clock):
    model = checkpoint("llama")
    engine = Engine(
        1, clock, arena=CpuArena(num_slots=2, slot_bytes=64 * MIB, capacity_bytes=4 * MIB)
    )
    with pytest.raises(NoRoom, match="refuses"):
        engine.begin_load(InstanceId("i"), model.spec, model.spec.whole, Dtype.FLOAT64, 5 * MIB)
    assert engine.backed_bytes == 0
    engine.begin_load(InstanceId("i"), model.spec, model.spec.whole, Dtype.FLOAT64, 3 * MIB)
    with pytest.raises(NoRoom, match="in use already"):
        engine.begin_load(InstanceId("j"), model.spec, model.spec.whole, Dtype.FLOAT64, 3 * MIB)
    engine.begin_load(InstanceId("k"), model.spec, Stage(0, 1), Dtype.FLOAT64, MIB // 2)
    with pytest.raises(NoRoom, match="every slot"):
        engine.begin_load(InstanceId("l"), model.spec, Stage(0, 1), Dtype.FLOAT64, MIB // 2)


def test_fifty_loads_and_unloads_return_all_memory(checkpoint, driver, prompts):
    models = [checkpoint(kind) for kind in ("llama", "qwen3-moe", "gemma3")]
    expected = [model.greedy(prompts[1], 3) for model in models]
    runs = driver()
    runs.load(models[0], "stays", kv_tokens=256)
    runs.add("long", prompts[0], instance="stays", max_tokens=200)
    base, before = runs.engine.backed_bytes, 0
    for turn in range(50):
        model, name = models[turn % 3], f"turn {turn}"
        # More KV than the measured noise of the process, all of it written.
        runs.load(model, name, kv_tokens=8_000)
        held = [
            runs.engine._stages[InstanceId(name)].memory.keys_and_values(layer)
            for layer in range(4)
        ]
        for rows in held:
            for half in rows:
                half.fill_(1.0)
        del held, rows, half
        runs.add(name, prompts[1], instance=name, max_tokens=3)
        while runs.outputs[name].finish is None:
            runs.step()
        assert runs.outputs[name].token_ids == expected[turn % 3]
        full = resident_bytes()
        runs.engine.unload(InstanceId(name))
        runs.capacity_tokens -= 8_000
        assert runs.engine.backed_bytes == base
        assert resident_bytes() < full - 10 * MIB
        if turn == 5:
            gc.collect()
            before = resident_bytes()
    gc.collect()
    assert resident_bytes() < before + 4 * MIB
    assert models[0].would_say(prompts[0], (long := runs.finish()["long"])) == long


@pytest.mark.slow
def test_an_engine_has_its_arena_at_the_same_address_in_every_process():
    program = (
        "from pilotlight.engine.device.arena import *; import torch; arena = CpuArena(address=ARENA_ADDRESS);"
        "slot = arena.open_slot(); print(slot.tensor(4096, (1,), torch.uint8).data_ptr())\n"
        "try:\n    CpuArena(address=ARENA_ADDRESS)\nexcept NoRoom as error:\n    print(error.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(ARENA_ADDRESS + 4096), "no_room"]
