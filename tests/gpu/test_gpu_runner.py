"""Layer ranges on the device against the same ranges on the CPU, for every family; captured steps against eager ones."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from random_models import KINDS, placed, spec_of
from torch import Tensor
from torch_arena import TorchArena

from pilotlight.engine.compute import Runner
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.cuda.graphs import Graphs
from pilotlight.engine.cuda.runner import CudaRangeRunner
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.policy.types import Dtype, Stage

pytestmark = pytest.mark.gpu

SLOT_BYTES = 64 << 20
NUM_BLOCKS = 200
PROMPTS = (5, 23, 130, 1, 300)


def row_of(length: int, number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(997, (length,), generator=generator).tolist()


def steps() -> Iterator[tuple[Batch, Tensor]]:
    """Prompts in chunks of different lengths, then all of them token by token, whatever the model says."""
    tables = [tuple(range(number, NUM_BLOCKS, len(PROMPTS))) for number in range(len(PROMPTS))]
    tokens = [row_of(length + 12, number) for number, length in enumerate(PROMPTS)]
    done = [0] * len(PROMPTS)

    def step(counts: Sequence[int]) -> tuple[Batch, Tensor]:
        segments: list[Segment] = []
        inputs: list[int] = []
        for number, count in enumerate(counts):
            if count:
                stop = done[number] + count
                segments.append(Segment(done[number], count, tables[number][: blocks_for(stop)], stop >= PROMPTS[number]))
                inputs += tokens[number][done[number] : stop]
                done[number] = stop
        return Batch(tuple(segments)), torch.tensor(inputs)

    yield step((5, 23, 100, 0, 37))
    yield step((1, 1, 30, 1, 263))
    for count in (5, 5, 5, 1, 1, 1, 3, 3):
        yield step([1] * count + [0] * (len(PROMPTS) - count))


def logits_of(runners: Sequence[Runner]) -> list[Tensor]:
    """What a chain of ranges gives for every step, on the CPU."""
    found: list[Tensor] = []
    with torch.inference_mode():
        for batch, inputs in steps():
            state = inputs
            for runner in runners:
                state = runner.run(batch, state)
            found.append(state.cpu().clone())
    return found


def on_cpu(kind: str, dtype: Dtype, run_as: Dtype) -> list[Tensor]:
    arena = CpuArena(num_slots=1, slot_bytes=SLOT_BYTES)
    decoder, parameters, kv = placed(arena, spec_of(kind, dtype), 1, NUM_BLOCKS, run_as)
    return logits_of([RangeRunner(decoder, decoder.spec.whole, parameters, kv)])


def on_device(device: torch.device, kind: str, dtype: Dtype, *, graphs: bool, cut: Sequence[int] = ()) -> list[Tensor]:
    arena = TorchArena(device, num_slots=len(cut) + 1, slot_bytes=SLOT_BYTES)
    spec = spec_of(kind, dtype)
    runners: list[CudaRangeRunner] = []
    for start, stop in zip((0, *cut), (*cut, spec.num_layers), strict=True):
        stage = Stage(start, stop)
        decoder, parameters, kv = placed(arena, spec, 1, NUM_BLOCKS, stage=stage)
        runners.append(CudaRangeRunner(decoder, stage, parameters, kv, device, graphs=Graphs(device) if graphs else None))
    return logits_of(runners)


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    assert [tuple(one.shape) for one in found] == [tuple(one.shape) for one in exact]
    return max(
        float((one.double() - other.double()).norm() / other.double().norm()) for one, other in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_float32_logits_are_the_cpus(device: torch.device, kind: str) -> None:
    assert largest_error(on_device(device, kind, Dtype.FLOAT32, graphs=True), on_cpu(kind, Dtype.FLOAT32, Dtype.FLOAT32)) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_logits_are_as_near_to_float64_as_the_cpus(device: torch.device, kind: str) -> None:
    exact = on_cpu(kind, Dtype.BFLOAT16, Dtype.FLOAT64)
    error = largest_error(on_device(device, kind, Dtype.BFLOAT16, graphs=True), exact)
    assert error < 1.3 * largest_error(on_cpu(kind, Dtype.BFLOAT16, Dtype.BFLOAT16), exact)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen3-moe"])
@pytest.mark.parametrize("cut", [(), (1,), (1, 2)], ids=["whole", "two", "three"])
def test_captured_steps_equal_eager_ones_bit_for_bit(device: torch.device, kind: str, cut: tuple[int, ...]) -> None:
    captured = on_device(device, kind, Dtype.BFLOAT16, graphs=True, cut=cut)
    eager = on_device(device, kind, Dtype.BFLOAT16, graphs=False, cut=cut)
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
