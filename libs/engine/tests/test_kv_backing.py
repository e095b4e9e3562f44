"""KV in chunks over the fake driver: what goes back ends on borders, quiet growth goes layer by
layer, and every layer has what the books say.
"""

import pytest
import torch
from fake_cuda import MIB, FakeCuda, fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.layout import SlotLayout
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.kv_backing import KvBacking
from pilotlight.engine.errors import EngineFailed, NoRoom
from pilotlight.native.device import DeviceArena

LAYERS, CHUNK_BYTES = 3, 128 * MIB
BLOCKS = 64
"""In one granule of a layer's keys."""
ROW_BYTES = 2 * MIB // BLOCKS // 16
CUDA_OUT_OF_MEMORY, CUDA_LAUNCH_FAILED = 2, 719


@pytest.fixture
def fake() -> FakeCuda:
    found = fake_cuda()
    found.reset()
    return found


class Kv:
    """Backing over an arena of its own."""

    def __init__(self, fake, chunk_bytes=CHUNK_BYTES, row_bytes=ROW_BYTES):
        self.arena = CudaArena(
            0, driver=fake.path, device=torch.device("cpu"), num_slots=1, slot_bytes=64 << 30
        )
        self.slot = self.arena.open_slot()
        self.layout = SlotLayout(
            [{"one": (8,)}] * (LAYERS + 2),
            LAYERS,
            row_bytes,
            2,
            64 << 30,
            granule_bytes=2 * MIB,
            pool_bytes=self.arena.pool_bytes,
        )
        self.backing = KvBacking(self.slot, self.layout, 2 * MIB, chunk_bytes)
        self.backing.add(range(LAYERS))

    def bytes_of(self, num_blocks):
        return self.layout.kv_bytes(num_blocks, LAYERS, 2 * MIB)

    def mark(self, layer, block, value):
        place = self.layout.values(layer) + block * 16 * ROW_BYTES
        self.slot.tensor(place, (64,), torch.uint8).fill_(value)

    def read(self, layer, block):
        place = self.layout.values(layer) + block * 16 * ROW_BYTES
        return self.slot.tensor(place, (64,), torch.uint8).unique().tolist()


@pytest.fixture
def kv(fake):
    made = Kv(fake)
    yield made
    made.arena.close()


def test_what_was_lent_goes_back_without_a_copy(kv, fake):
    """Granted 2 granules of a half, lent up to 130 of them in chunks that end at 32, 64 and so
    on.
    """
    kv.backing.resize(2 * BLOCKS)
    kv.backing.resize(130 * BLOCKS)
    before = {name: fake.calls(name) for name in ("cuMemRelease", "cuCtxSynchronize")}
    lent_bytes = kv.arena.backed_bytes - kv.bytes_of(2 * BLOCKS)
    kv.backing.resize(2 * BLOCKS)
    assert fake.calls("cuMemRelease") == before["cuMemRelease"], "others may have it at once"
    assert fake.calls("cuCtxSynchronize") - before["cuCtxSynchronize"] == 1
    assert kv.arena.idle_bytes == lent_bytes
    assert kv.arena.driver_calls.moved_bytes == 0
    assert kv.arena.backed_bytes == kv.bytes_of(2 * BLOCKS)


@pytest.fixture
def asked(monkeypatch):
    """The chunks that were asked for, of each call."""
    calls, back_all = [], DeviceArena.back_all

    def noted(arena, extents, chunk_bytes):
        calls.append(list(extents))
        back_all(arena, extents, chunk_bytes)

    monkeypatch.setattr(DeviceArena, "back_all", noted)
    return calls


def test_chunks_end_at_the_same_blocks_whatever_is_asked_for(fake, asked):
    """The further on, the longer they are, and none is longer than a third of all."""
    fake.set_memory(16 << 30)
    kv = Kv(fake, chunk_bytes=512 * MIB)
    ends = [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    keys = kv.layout.keys(0)
    for num_granules in (1, 33, 130, 256, 400, 1024):
        asked.clear()
        kv.backing.resize(num_granules * BLOCKS)
        ended = [(extent.stop - keys) // (2 * MIB) for extent in asked[0]]
        whole = [end for end in ends if end < num_granules]
        assert ended[: len(whole) + 1] == [*whole, num_granules]
        kv.backing.resize(0)
    kv.arena.close()


def test_chunks_are_as_long_in_a_model_of_other_rows(fake, asked):
    """Its blocks do not end where granules do."""
    kv = Kv(fake, chunk_bytes=512 * MIB, row_bytes=3 * ROW_BYTES // 5)
    num_blocks = kv.layout.blocks_in(LAYERS * 2 * 200 * 2 * MIB, LAYERS, 2 * MIB)
    asked.clear()
    kv.backing.resize(num_blocks)
    lengths = [extent.num_bytes // MIB for extent in asked[0]]
    assert lengths == [64, 64, 64, 64, 128, 16] * 2 * LAYERS
    assert kv.arena.backed_bytes == kv.bytes_of(num_blocks)
    kv.arena.close()


def test_what_another_target_leaves_idle_is_had_again_without_the_driver(kv, fake):
    """A start grows towards another one than the start before it, on a device that is full."""
    kv.backing.resize(BLOCKS)
    kv.backing.grow_towards(160 * BLOCKS, 160 * BLOCKS)
    kv.backing.resize(0)
    fake.set_memory(fake.used_bytes + 23 * 2 * MIB * 2 * LAYERS)
    creates, releases = fake.calls("cuMemCreate"), fake.calls("cuMemRelease")
    kv.backing.resize(BLOCKS)
    for even in range(21, 152, 10):
        kv.backing.grow_towards(even * BLOCKS, 151 * BLOCKS)
    assert kv.backing.num_blocks == 151 * BLOCKS
    assert fake.calls("cuMemCreate") - creates <= 2 * LAYERS, "the last chunk of each half alone"
    assert fake.calls("cuMemRelease") == releases


def test_all_layers_get_their_chunks_in_one_call(kv, asked):
    """Access is set once for what lies side by side, however many chunks that is."""
    asked.clear()
    kv.backing.resize(256 * BLOCKS)
    done = kv.arena.driver_calls
    assert [len(extents) for extents in asked] == [6 * 2 * LAYERS]
    assert (done.created, done.mapped, done.access_set) == (
        6 * 2 * LAYERS,
        6 * 2 * LAYERS,
        2 * LAYERS,
    )


def test_all_layers_have_the_memory_or_none_has(kv, fake):
    kv.backing.resize(BLOCKS)
    held = kv.arena.backed_bytes, kv.arena.physical_bytes
    for function, in_calls in (("cuMemCreate", 5), ("cuMemMap", 6), ("cuMemSetAccess", 3)):
        fake.fail(function, CUDA_LAUNCH_FAILED, in_calls)
        with pytest.raises(EngineFailed):
            kv.backing.resize(130 * BLOCKS)
        assert (kv.arena.backed_bytes, kv.arena.physical_bytes) == held, function
        assert kv.backing.num_blocks == BLOCKS
    kv.backing.resize(130 * BLOCKS)
    assert kv.arena.backed_bytes == kv.arena.physical_bytes == kv.bytes_of(130 * BLOCKS)


def test_a_shrink_ends_on_a_border_unless_that_is_needed(kv):
    kv.backing.resize(2 * BLOCKS)
    kv.backing.resize(130 * BLOCKS)
    rounded = kv.backing.rounded
    assert rounded(30 * BLOCKS, 0) == 2 * BLOCKS
    assert rounded(60 * BLOCKS, 0) == 32 * BLOCKS
    assert rounded(64 * BLOCKS, 0) == 64 * BLOCKS
    assert rounded(95 * BLOCKS, 64 * BLOCKS + 1) == 95 * BLOCKS
    assert rounded(BLOCKS, 0) == BLOCKS, "no border is below"
    assert rounded(500 * BLOCKS, 0) == 500 * BLOCKS
    kv.backing.resize(100 * BLOCKS)
    assert rounded(101 * BLOCKS, 0) == 101 * BLOCKS
    assert rounded(99 * BLOCKS, 0) == 96 * BLOCKS


def test_without_chunks_nothing_is_rounded(fake):
    kv = Kv(fake, chunk_bytes=0)
    kv.backing.resize(130 * BLOCKS)
    assert kv.backing.rounded(60 * BLOCKS, 0) == 60 * BLOCKS
    kv.arena.close()


def test_what_stays_of_cut_chunks_keeps_its_contents(kv):
    kv.backing.resize(64 * BLOCKS)
    for layer in range(LAYERS):
        kv.mark(layer, 49 * BLOCKS, layer + 1)
    kv.backing.resize(50 * BLOCKS)
    assert kv.arena.driver_calls.moved_bytes == 2 * LAYERS * 18 * 2 * MIB
    assert [kv.read(layer, 49 * BLOCKS) for layer in range(LAYERS)] == [[1], [2], [3]]
    assert kv.arena.backed_bytes == kv.arena.physical_bytes == kv.bytes_of(50 * BLOCKS)


def test_quiet_growth_gives_room_when_every_layer_has_its_chunk(kv):
    kv.backing.resize(BLOCKS)
    target, rooms = 129 * BLOCKS, []
    for even in range(9, 130, 8):
        kv.backing.grow_towards(even * BLOCKS, target)
        rooms.append(kv.backing.num_blocks // BLOCKS)
        assert kv.arena.backed_bytes <= kv.bytes_of(even * BLOCKS), "never more than was given"
    assert rooms[-1] == 129
    assert len(set(rooms)) > 2
    assert rooms == sorted(rooms)
    # As many chunks as in one step: they end at 1, 32, 64, 96, 128 and 129 granules.
    assert kv.arena.driver_calls.created == 6 * 2 * LAYERS
    kv.backing.resize(BLOCKS)
    assert kv.arena.driver_calls.moved_bytes == 0


def test_what_some_layers_are_ahead_goes_before_anything_else(kv):
    kv.backing.resize(BLOCKS)
    kv.backing.grow_towards(23 * BLOCKS, 129 * BLOCKS)
    ahead = kv.arena.backed_bytes - kv.bytes_of(BLOCKS)
    assert ahead > 0
    assert kv.backing.num_blocks == BLOCKS
    kv.backing.resize(BLOCKS)
    assert kv.arena.backed_bytes == kv.bytes_of(BLOCKS)
    kv.backing.grow_towards(23 * BLOCKS, 129 * BLOCKS)
    kv.backing.resize(20 * BLOCKS)
    assert kv.arena.backed_bytes == kv.bytes_of(20 * BLOCKS)
    kv.backing.grow_towards(23 * BLOCKS, 129 * BLOCKS)
    # There is not as much to be had as was thought: all of it is shared out.
    kv.backing.grow_towards(33 * BLOCKS, 33 * BLOCKS)
    assert kv.backing.num_blocks == 33 * BLOCKS
    assert kv.arena.backed_bytes == kv.bytes_of(33 * BLOCKS)


def test_a_quiet_step_that_is_refused_changes_nothing(kv, fake):
    kv.backing.resize(BLOCKS)
    kv.backing.grow_towards(23 * BLOCKS, 129 * BLOCKS)
    held, room = kv.arena.backed_bytes, kv.backing.num_blocks
    for refused in (1, 2, 3):
        # Asked again when torch has given back what it keeps.
        fake.set_memory(fake.used_bytes + (2 * refused - 1) * 33 * 2 * MIB)
        with pytest.raises(NoRoom):
            kv.backing.grow_towards(129 * BLOCKS, 129 * BLOCKS)
        assert (kv.arena.backed_bytes, kv.arena.physical_bytes) == (held, held)
        assert kv.backing.num_blocks == room
        fake.reset()
    kv.backing.grow_towards(129 * BLOCKS, 129 * BLOCKS)
    assert kv.backing.num_blocks == 129 * BLOCKS


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["resize", "quiet", "round", "extend"]),
            st.integers(1, 300),
            st.integers(0, 300),
        ),
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_books_and_memory_agree_whatever_happens(moves):
    """Sizes are in half granules, so that blocks of a chunk may share one with the next."""
    fake = fake_cuda()
    fake.reset()
    kv = Kv(fake)
    backing, unit = kv.backing, BLOCKS // 2
    backing.resize(unit)
    for layer in range(LAYERS):
        kv.mark(layer, 0, layer + 1)
    for move, size, other in moves:
        before = backing.num_blocks
        if move == "resize":
            backing.resize(size * unit)
            assert backing.num_blocks == size * unit
        elif move == "quiet":
            even, target = sorted((size * unit, max(1, other) * unit))
            held = kv.arena.backed_bytes
            backing.grow_towards(even, target)
            assert before <= backing.num_blocks <= max(before, target)
            assert kv.arena.backed_bytes <= max(held, kv.bytes_of(even))
        elif move == "round":
            to = backing.rounded(min(size * unit, before), other)
            assert to == min(size * unit, before) or max(1, other) <= to < before
            backing.resize(to)
        else:
            backing.remove([LAYERS - 1])
            backing.add([LAYERS - 1])
            kv.mark(LAYERS - 1, 0, LAYERS)
        assert kv.arena.backed_bytes == kv.arena.physical_bytes >= kv.bytes_of(backing.num_blocks)
        assert [kv.read(layer, 0) for layer in range(LAYERS)] == [[1], [2], [3]]
    backing.remove(range(LAYERS))
    assert (kv.arena.backed_bytes, kv.arena.physical_bytes) == (0, 0)
    kv.arena.close()
