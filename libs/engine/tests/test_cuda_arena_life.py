"""A CUDA arena's whole life over the fake driver, in any order: whatever happens, memory is what is
held, and no more than was given.
"""

import ctypes
import math
import os

import pytest
import torch
from fake_cuda import MIB, fake_cuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import POOL_CHUNK_BYTES, CudaArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import NoRoom
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.room import divide
from pilotlight.native.library import library
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.testing import tiny_spec

G = 2 * MIB
NUM_SLOTS, SLOT_BYTES = 3, 64 << 30
MEMORY_BYTES = 4096 * MIB


def shape(layers, hidden, heads, kv_heads, head_dim, vocab):
    """A model of which nothing but its sizes matters."""
    return tiny_spec(
        dtype=Dtype.BFLOAT16,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context_tokens=4096,
    )


MODELS = [
    decoder_of(shape(*sizes))
    for sizes in ((3, 512, 4, 4, 128, 3000), (2, 256, 8, 1, 64, 40_000), (5, 768, 6, 2, 128, 999))
]


class Resident:
    """What a stage has, and what it wrote there."""

    def __init__(self, arena, decoder, stage, num_blocks, mark):
        self.memory = StageMemory(arena, decoder, stage, Dtype.BFLOAT16)
        try:
            self.kv = KvCache(self.memory, num_blocks)
        except NoRoom:
            self.memory.close()
            raise
        self.number = self.memory._slot.number
        self.marks = {}
        for part in self.memory.parts:
            for name, tensor in self.memory.tensors(part).items():
                self.mark((part, name), tensor, mark + part)
        first = self.kv.stored(stage.start)[1][:BLOCK_TOKENS]
        self.mark("kv", first, mark)

    def mark(self, name, tensor, value):
        tensor.view(-1)[:: max(1, tensor.numel() - 1)] = value % 200
        self.marks[name] = tensor, value % 200

    def check(self):
        for name, (tensor, value) in self.marks.items():
            assert tensor.view(-1)[0] == tensor.view(-1)[-1] == value, name


class Life(RuleBasedStateMachine):
    """Stages come and go, their KV grows and shrinks, torch's segments come and go in pools, chunks
    are exported.
    """

    def __init__(self):
        super().__init__()
        self.fake = fake_cuda()
        self.fake.reset()
        self.before = self.fake.used_bytes
        self.fake.set_memory(self.before + MEMORY_BYTES)
        self.arena = CudaArena(
            0,
            driver=self.fake.path,
            device=torch.device("cpu"),
            num_slots=NUM_SLOTS,
            slot_bytes=SLOT_BYTES,
            capacity_bytes=3 << 30,
        )
        self.stages = []
        self.pools = {}
        self.segments = {}
        self.count = 0

    @rule(model=st.sampled_from(MODELS), whole=st.booleans(), blocks=st.integers(1, 3000))
    def load(self, model, whole, blocks):
        stage = model.spec.whole if whole else Stage(1, 2)
        held, full = self.arena.backed_bytes, not self.arena.free_slots
        self.count += 7
        try:
            self.stages.append(Resident(self.arena, model, stage, blocks, self.count))
        except NoRoom:
            assert self.arena.backed_bytes == held, "nothing of what was refused is kept"
        else:
            assert not full

    @precondition(lambda self: self.stages)
    @rule(choice=st.integers(0, 9), blocks=st.integers(1, 6000))
    def resize(self, choice, blocks):
        stage = self.stages[choice % len(self.stages)]
        had = stage.memory.num_blocks
        try:
            stage.kv.resize(blocks)
        except NoRoom:
            assert stage.memory.num_blocks == had

    @precondition(lambda self: self.stages)
    @rule(choice=st.integers(0, 9), rows=st.integers(1, 3_000_000))
    def take_for_steps(self, choice, rows):
        stage = self.stages[choice % len(self.stages)]
        try:
            tensor = stage.memory.for_steps((rows,), torch.int32)
        except NoRoom:
            return
        assert not tensor.any()
        self.count += 1
        stage.mark(f"steps {self.count}", tensor, self.count)
        if rows == 1:
            stage.marks.pop(f"steps {self.count}")

    @rule(slot=st.integers(0, NUM_SLOTS - 1), size=st.integers(1, 90 * MIB))
    def take_segment(self, slot, size):
        """As torch takes one while a model of this slot is captured; whether the slot is open makes
        no difference.
        """
        if slot not in self.pools:
            self.pools[slot] = self.arena.graph_pool(slot)
        with self.pools[slot].selected():
            place = library().get("pool_malloc", size, 0, None)
        if place:
            assert (place - self.arena.address) // SLOT_BYTES == slot
            ctypes.memset(place, slot, size)
            self.segments[place] = slot, size

    @precondition(lambda self: self.segments)
    @rule(choice=st.integers(0, 99))
    def give_segment_back(self, choice):
        place = sorted(self.segments)[choice % len(self.segments)]
        slot, size = self.segments.pop(place)
        library().get("pool_free", place, size, 0, None)
        if slot not in {other for other, _ in self.segments.values()}:
            self.pools.pop(slot).close()

    @precondition(lambda self: self.stages)
    @rule(choice=st.integers(0, 9))
    def export(self, choice):
        """Another mapping of a chunk keeps it alive, not this arena's books."""
        stage = self.stages[choice % len(self.stages)]
        tensor, _ = next(iter(stage.marks.values()))
        fd, extent = self.arena.export(tensor.data_ptr() - self.arena.address)
        os.close(fd)
        assert extent.start <= tensor.data_ptr() - self.arena.address < extent.stop

    @precondition(lambda self: self.stages)
    @rule(choice=st.integers(0, 9))
    def unload(self, choice):
        self.stages.pop(choice % len(self.stages)).memory.close()

    @rule(spare=st.integers(0, 40))
    def fill_the_device(self, spare):
        """Another process takes most of the device, or gives it back."""
        self.fake.set_memory(
            self.fake.used_bytes + spare * G if spare < 20 else self.before + MEMORY_BYTES
        )

    @invariant()
    def memory_is_what_is_held(self):
        granules = sum(self.held_bytes(stage) for stage in self.stages)
        assert self.arena.backed_bytes == granules
        longest = 0
        chunks = set()
        for place, (slot, size) in self.segments.items():
            start = place - self.arena.address - ((slot + 1) * SLOT_BYTES - self.arena.pool_bytes)
            chunks |= set(
                range(start // POOL_CHUNK_BYTES, (start + size - 1) // POOL_CHUNK_BYTES + 1)
            )
            longest = max(longest, size)
        assert self.arena.physical_bytes == granules + len(chunks) * POOL_CHUNK_BYTES, (
            "graph pools share their memory"
        )
        assert self.fake.used_bytes >= self.before + self.arena.physical_bytes

    @rule()
    def settle(self):
        """At any other time the arena's thread is anywhere."""
        self.arena.native_arena.settle(self.arena.most_idle_bytes)
        kept = self.arena.physical_bytes + self.arena.idle_bytes
        assert self.fake.used_bytes == self.before + kept
        assert self.arena.backed_bytes + self.arena.idle_bytes <= self.arena.capacity_bytes

    @rule()
    def trim(self):
        self.arena.trim()
        assert self.arena.idle_bytes == 0

    @staticmethod
    def held_bytes(stage):
        memory, layout = stage.memory, stage.memory.layout
        parts = sum(layout.part(part).num_bytes for part in memory.parts)
        layers = range(memory.stage.start, memory.stage.stop)
        kv = sum(
            extent.num_bytes
            for layer in layers
            for extent in layout.kv(layer, 0, memory.num_blocks)
        )
        return parts + kv + memory.steps_bytes

    @invariant()
    def what_was_written_is_there(self):
        for stage in self.stages:
            stage.check()

    def teardown(self):
        for place, (_, size) in self.segments.items():
            library().get("pool_free", place, size, 0, None)
        for pool in self.pools.values():
            pool.close()
        for stage in self.stages:
            stage.memory.close()
        assert self.arena.physical_bytes == 0
        self.arena.close()
        assert self.fake.used_bytes == self.before
        assert self.fake.mappings == 0


class TestLife(Life.TestCase):
    settings = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )


@pytest.fixture
def arena():
    fake_cuda().reset()
    made = CudaArena(
        0, driver=fake_cuda().path, device=torch.device("cpu"), num_slots=1, slot_bytes=SLOT_BYTES
    )
    yield made
    made.close()


@given(
    model=st.sampled_from(MODELS),
    layers=st.tuples(st.integers(0, 4), st.integers(1, 5)),
    given_mib=st.integers(0, 900),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_stage_never_has_more_than_it_was_given_and_could_not_have_another_block(
    arena, model, layers, given_mib
):
    first, count = layers
    start = min(first, model.spec.num_layers - 1)
    stage = Stage(start, min(start + count, model.spec.num_layers))
    given_bytes = given_mib * MIB + 12_345
    try:
        room = divide(arena, model, stage, Dtype.BFLOAT16, given_bytes)
    except NoRoom as refused:
        needed = int(str(refused).split("at least ")[1].split()[0])
        assert needed > given_bytes
        assert needed % G == 0
        room = divide(arena, model, stage, Dtype.BFLOAT16, needed)
        with pytest.raises(NoRoom, match="at least"):
            divide(arena, model, stage, Dtype.BFLOAT16, needed - 1)
        given_bytes = needed
    memory = StageMemory(arena, model, stage, Dtype.BFLOAT16)
    memory.resize(room.kv_capacity_tokens // BLOCK_TOKENS)
    assert arena.backed_bytes <= given_bytes
    another = memory.num_blocks + 1
    memory.resize(another)
    assert arena.backed_bytes > given_bytes
    memory.close()
    assert room.kv_capacity_tokens % BLOCK_TOKENS == 0
    assert math.isclose(
        room.parameter_bytes,
        sum(math.prod(s) * 2 for p in room.parts for s in model.shapes(p).values()),
    )


def test_an_engines_stage_stays_within_its_bytes_as_it_grows_and_shrinks(arena, checkpoint, clock):
    """The facade: what the cache granted is what is backed at most, before and after every
    change.
    """
    model = checkpoint("llama")
    engine = Engine(1, clock, BatchLimits(), arena)
    engine.begin_load("i", model.spec, model.spec.whole, Dtype.FLOAT64, 60 * MIB)
    assert engine.backed_bytes <= 60 * MIB
    for given_mib in (200, 47, 300, 46):
        engine.resize("i", given_mib * MIB)
        assert engine.backed_bytes <= given_mib * MIB
    with pytest.raises(NoRoom, match="at least"):
        engine.resize("i", 9 * MIB)
    assert engine.backed_bytes <= 46 * MIB
    engine.unload("i")
    assert engine.backed_bytes == 0


def test_what_steps_read_lies_at_the_same_places_whatever_else_a_stage_has(arena, checkpoint):
    decoder = decoder_of(checkpoint("llama").spec)
    sizes = ((5, 7), (1,), (1 << 20,), (3,))

    def places(stage, blocks):
        memory = StageMemory(arena, decoder, stage, Dtype.FLOAT32)
        memory.resize(blocks)
        found = [memory.for_steps(size, torch.float32) for size in sizes]
        assert all(not tensor.any() and tensor.data_ptr() % 256 == 0 for tensor in found)
        before = arena.physical_bytes
        with pytest.raises(NoRoom, match="captured steps"):
            memory.for_steps((1 << 30,), torch.uint8)
        assert arena.physical_bytes == before
        addresses = [tensor.data_ptr() for tensor in found]
        memory.close()
        return addresses

    assert places(Stage(0, 4), 3) == places(Stage(1, 3), 900)
    assert Extent(*(0, 0)).num_bytes == arena.physical_bytes
