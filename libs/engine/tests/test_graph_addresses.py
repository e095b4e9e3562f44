"""Where a stage's restored graphs may read and write, over a fake driver."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from fake_cuda import MIB, fake_cuda
from random_models import spec_of

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.graph_device import known_addresses
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.models.registry import decoder_of
from pilotlight.native.library import library
from pilotlight.policy.model import Dtype

SLOT, SLOT_BYTES = 1, 64 << 30


@pytest.fixture
def memory() -> Iterator[StageMemory]:
    fake = fake_cuda()
    fake.reset()
    arena = CudaArena(
        0, driver=fake.path, device=torch.device("cpu"), num_slots=2, slot_bytes=SLOT_BYTES
    )
    spec = spec_of("llama", Dtype.BFLOAT16)
    made = StageMemory(arena, decoder_of(spec), spec.whole, spec.dtype, SLOT)
    yield made
    made.close()
    arena.close()


def is_known(memory: StageMemory, address: int) -> bool:
    return any(start <= address < stop for start, stop in known_addresses(memory))


def test_parameters_kv_steps_and_pool_are_known_and_nothing_else_is(memory: StageMemory) -> None:
    arena, layout = memory.arena, memory.layout
    assert isinstance(arena, CudaArena)
    slot = arena.address + SLOT * SLOT_BYTES
    steps = memory.for_steps((1000,), torch.float32)
    parameters = [
        tensor.data_ptr() for part in memory.parts for tensor in memory.tensors(part).values()
    ]
    kv = [slot + at for layer in range(3) for at in (layout.keys(layer), layout.values(layer))]
    for address in (*parameters, *kv, steps.data_ptr(), steps.data_ptr() + 3999):
        assert is_known(memory, address), hex(address)
    pool = slot + SLOT_BYTES - arena.pool_bytes
    before = slot - 64, slot + SLOT_BYTES, kv[1] - 64, kv[0] + 2 * MIB, pool - 64, pool
    for address in before:
        assert not is_known(memory, address), hex(address)
    graphs = arena.graph_pool(SLOT)
    with graphs.selected():
        taken = library().get("pool_malloc", MIB, 0, None)
    assert taken == pool
    assert is_known(memory, pool)
    library().get("pool_free", taken, MIB, 0, None)
    graphs.close()


def test_kv_that_comes_and_goes_changes_nothing(memory: StageMemory) -> None:
    """Its addresses follow from the model: graphs are restored before there is any."""
    before = known_addresses(memory)
    memory.resize(64)
    assert known_addresses(memory) == before
    assert before == sorted(before)
    for (_, stop), (start, _) in pairwise(before):
        assert stop < start, "none touches the next"
