"""What torch allocates in an arena's pools: batches in the workspace, and graphs in their slots."""

import contextlib
from collections.abc import Callable

import pytest
import torch

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda.arena import POOL_BYTES, POOL_CHUNK_BYTES, CudaArena
from pilotlight.engine.cuda.capture import keep_generator_memory
from pilotlight.engine.cuda.pools import run_in
from pilotlight.engine.errors import NoRoom

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]


def test_torch_works_in_the_workspace_and_its_own_allocator_is_left_alone(
    arena: CudaArena, record_property: Record
) -> None:
    own = torch.ones(1000, device=arena.device)
    with arena.workspace.use():
        left = torch.randn(4096, 4096, device=arena.device, dtype=torch.bfloat16)
        product = left @ left
    assert not arena.address <= own.data_ptr() < arena.address + (17 << 38)
    for tensor in (left, product):
        assert (
            arena.address + 16 * arena.slot_bytes
            <= tensor.data_ptr()
            < arena.address + 17 * arena.slot_bytes
        )
    outside = left.float() @ left.float()
    torch.testing.assert_close(product.float(), outside, rtol=2e-2, atol=2.0)
    mapped = arena.workspace.mapped_bytes
    record_property("mapped_bytes", mapped)
    assert mapped >= left.nbytes + product.nbytes
    del left, product, tensor
    arena.workspace.close()
    assert arena.physical_bytes == 0


def test_a_large_batch_finds_the_memory_that_smaller_ones_left(
    device: torch.device, record_property: Record
) -> None:
    """Nothing lies in what torch keeps, and yet the batch does not fit beside it.

    What lies in the pool stays as it is.
    """
    arena = CudaArena(0, num_slots=1, slot_bytes=POOL_BYTES + (1 << 30))

    def take(mib: int) -> torch.Tensor:
        return torch.full((mib << 20,), 3, dtype=torch.uint8, device=device)

    with arena.workspace.use():
        kept = torch.arange(1000, device=device)
        for mib in (100, 200, 300):
            take(mib)
        try:
            take(700)
        except torch.OutOfMemoryError as error:
            record_property("alone", str(error).split(".")[0])
    assert arena.workspace.mapped_bytes >= 300 << 20
    large = run_in(arena.workspace, lambda: take(700))
    assert int(large.min()) == int(large.max()) == 3
    assert kept.tolist() == list(range(1000))
    del large
    arena.trim()
    assert arena.workspace.mapped_bytes < 100 << 20
    with pytest.raises(torch.OutOfMemoryError):
        run_in(arena.workspace, lambda: take(1100))
    del kept
    arena.workspace.close()
    assert arena.physical_bytes == 0
    arena.close()


def test_a_capture_goes_on_after_memory_that_it_did_not_get(arena: CudaArena) -> None:
    """The device has memory for the first chunk of what is asked for, and not for the second."""
    keep_generator_memory(arena.device)
    pool, slot = arena.graph_pool(1), arena.open_slot(0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    outside = torch.zeros(1000, device=arena.device)
    with torch.cuda.stream(stream):
        outside.add_(1)  # its kernel is loaded
    torch.cuda.synchronize()
    granule, backed = arena.granule_bytes, 0
    arena.capacity_bytes = 1 << 40
    for step in (1 << 30, granule):
        with contextlib.suppress(NoRoom):
            while True:
                slot.back(Extent(backed, backed + step))
                backed += step
    spare = POOL_CHUNK_BYTES + POOL_CHUNK_BYTES // 2
    slot.unback(Extent(backed - spare, backed))
    failed = False
    with pool.selected(), torch.cuda.stream(stream):
        graph.capture_begin(pool.id, capture_error_mode="thread_local")
        try:
            torch.empty(2 * POOL_CHUNK_BYTES, dtype=torch.uint8, device=arena.device)
        except torch.OutOfMemoryError:
            failed = True
        outside.add_(1)
        graph.capture_end()
    assert failed
    graph.replay()
    torch.cuda.synchronize()
    assert outside.unique().tolist() == [2.0]
    graph.reset()
    del graph
    pool.close()
    slot.close()
    assert arena.physical_bytes == 0


def test_graph_pools_share_their_memory_and_replay_right(
    arena: CudaArena, record_property: Record
) -> None:
    """Two models' graphs, each in its slot's pool; both scratch areas are the same memory, and
    neither replay minds.
    """
    pools = [arena.graph_pool(number) for number in (0, 1)]
    inputs = [torch.randn(512, 1024, device=arena.device) for _ in pools]
    outputs = [torch.empty(512, 1024, device=arena.device) for _ in pools]
    weights = [torch.randn(1024, 1024, device=arena.device) / 32 for _ in pools]

    def work(index: int) -> None:
        hidden = inputs[index]
        for _ in range(20):
            hidden = torch.tanh(hidden @ weights[index])
        outputs[index].copy_(hidden)

    graphs: list[torch.cuda.CUDAGraph] = []
    stream = (
        torch.cuda.Stream()
    )  # cuBLAS has its workspace for this stream before anything is captured
    with torch.cuda.stream(stream):
        work(0)
    torch.cuda.synchronize()
    for index, pool in enumerate(pools):
        graph = torch.cuda.CUDAGraph()
        with pool.selected(), torch.cuda.graph(graph, pool=pool.id, stream=stream):
            work(index)
        graphs.append(graph)
    assert pools[0].mapped_bytes == pools[1].mapped_bytes >= POOL_CHUNK_BYTES
    assert arena.physical_bytes == pools[0].mapped_bytes, "the same memory, counted once"
    assert pools[0].sequence == pools[1].sequence
    record_property("mapped_bytes", [pool.mapped_bytes for pool in pools])
    for turn in range(3):
        for index, graph in enumerate(graphs):
            inputs[index].normal_(generator=torch.Generator(arena.device).manual_seed(turn))
            work(index)
            expected = outputs[index].clone()
            outputs[index].zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(outputs[index], expected)
    for graph in graphs:
        graph.reset()
    del graphs, graph
    for pool in pools:
        pool.close()
    assert arena.physical_bytes == 0
