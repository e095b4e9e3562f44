"""Layer ranges on the device against the same ranges on the CPU, for every family; captured steps
against eager ones.
"""

import gc
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from random_models import KINDS, WIDE, placed, spec_of
from torch import Tensor

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

from pilotlight.engine.compute import Runner
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.graphs import GraphSet
from pilotlight.engine.cuda.kernels import decode_attention
from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.prompts import prompt_length
from pilotlight.engine.cuda.runner import CudaRangeRunner
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.arena_protocol import Arena, TorchMemory
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.policy.model import Dtype, Stage

pytestmark = pytest.mark.gpu

SLOT_BYTES = 256 << 20
NUM_BLOCKS = 200
PROMPTS = (5, 23, 130, 1, 300)
ALONE = (161, 150, 16, 300, 9, 384, 380, 2, 3, 470)
"""Prompts that run alone: some of the same padded length, one of exactly such a length, and some
behind a prefix."""
PREFIX = 37
Steps = Iterator[tuple[Batch, Tensor]]


def row_of(length: int, number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(997, (length,), generator=generator).tolist()


def together() -> Steps:
    """Prompts in chunks of different lengths, then all of them token by token, whatever the model
    says.
    """
    tables = [tuple(range(number, NUM_BLOCKS, len(PROMPTS))) for number in range(len(PROMPTS))]
    tokens = [row_of(length + 12, number) for number, length in enumerate(PROMPTS)]
    done = [0] * len(PROMPTS)

    def step(counts: Sequence[int]) -> tuple[Batch, Tensor]:
        segments: list[Segment] = []
        inputs: list[int] = []
        for number, count in enumerate(counts):
            if count:
                stop = done[number] + count
                segments.append(
                    Segment(
                        done[number],
                        count,
                        tables[number][: blocks_for(stop)],
                        stop >= PROMPTS[number],
                    )
                )
                inputs += tokens[number][done[number] : stop]
                done[number] = stop
        return Batch(tuple(segments)), torch.tensor(inputs)

    yield step((5, 23, 100, 0, 37))
    yield step((1, 1, 30, 1, 263))
    for count in (5, 5, 5, 1, 1, 1, 3, 3):
        yield step([1] * count + [0] * (len(PROMPTS) - count))


def one_by_one() -> Steps:
    """Short prompts, one alone at a time, each in blocks of its own in no order; every third one
    behind a prefix.
    """
    shuffled = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    for number, length in enumerate(ALONE):
        prefix = PREFIX if number % 3 == 1 else 0
        start = number * 17
        table = tuple((shuffled + shuffled)[start : start + blocks_for(prefix + length)])
        tokens = row_of(prefix + length, 100 + number)
        if prefix:
            yield (
                Batch((Segment(0, prefix, table[: blocks_for(prefix)], False),)),
                torch.tensor(tokens[:prefix]),
            )
        yield Batch((Segment(prefix, length, table, True),)), torch.tensor(tokens[prefix:])
        yield Batch((Segment(prefix + length - 1, 1, table, True),)), torch.tensor(tokens[-1:])


def logits_of(runners: Sequence[Runner], steps: Steps) -> list[Tensor]:
    """What a chain of ranges gives for every step, on the CPU."""
    found: list[Tensor] = []
    with torch.inference_mode():
        for batch, inputs in steps:
            state = inputs
            for runner in runners:
                state = runner.run(batch, state)
            found.append(state.cpu().clone())
    return found


def on_cpu(kind: str, dtype: Dtype, run_as: Dtype, steps: Steps) -> list[Tensor]:
    arena = CpuArena(num_slots=1, slot_bytes=SLOT_BYTES)
    memory, parameters, kv = placed(arena, spec_of(kind, dtype), 1, NUM_BLOCKS, run_as)
    return logits_of([RangeRunner(memory, parameters, kv)], steps)


@contextmanager
def arena_on(device: torch.device) -> Generator[Arena]:
    arena = CudaArena(device.index)
    yield arena
    gc.collect()
    torch.cuda.synchronize()
    assert arena.backed_bytes == 0
    arena.close()


def run_on(
    arena: Arena, kind: str, dtype: Dtype, steps: Steps, *, graphs: bool, cut: Sequence[int] = ()
) -> list[Tensor]:
    spec = spec_of(kind, dtype)
    runners: list[CudaRangeRunner] = []
    closes: list[GraphSet | TorchMemory] = []
    memories = []
    for start, stop in zip((0, *cut), (*cut, spec.num_layers), strict=True):
        memory, parameters, kv = placed(arena, spec, 1, NUM_BLOCKS, stage=Stage(start, stop))
        scratch = memory.scratch()
        assert scratch is not None
        # What padding and scratch hold is anything, so let it be the worst.
        with scratch.eager.use():
            poison = torch.full((8 << 20,), torch.nan, device=arena.device)
        del poison
        captured = (
            GraphSet(arena.device, scratch, CaptureOnSecondUse(arena.device, scratch))
            if graphs
            else None
        )
        closes.append(captured or scratch.graphs)
        memories.append(memory)
        runners.append(CudaRangeRunner(memory, parameters, kv, scratch.eager, graphs=captured))
    found = logits_of(runners, steps)
    del runners
    for each in closes:
        each.close()
    for memory in memories:
        memory.close()
    return found


def on_device(
    device: torch.device,
    kind: str,
    dtype: Dtype,
    steps: Steps,
    *,
    graphs: bool,
    cut: Sequence[int] = (),
) -> list[Tensor]:
    with arena_on(device) as arena:
        return run_on(arena, kind, dtype, steps, graphs=graphs, cut=cut)


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    assert [tuple(one.shape) for one in found] == [tuple(one.shape) for one in exact]
    return max(
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(found, exact, strict=True)
        if one.numel()
    )


def error_of_all(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return largest_error(
        [torch.cat([one.flatten() for one in found])], [torch.cat([one.flatten() for one in exact])]
    )


def test_the_steps_are_of_the_kinds_that_they_are_to_be() -> None:
    lengths = [prompt_length(batch) for batch, _ in one_by_one()]
    assert [length for length in lengths if length] == [
        192,
        192,
        16,
        384,
        16,
        384,
        384,
        16,
        16,
        512,
    ]
    assert not any(prompt_length(batch) for batch, _ in together())


STEPS = {"together": together, "one-by-one": one_by_one}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_streams_need_beside_prompts_is_there_before_they_share_a_step(
    device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows and of many: a step that compiles makes all that run wait for a second."""
    kernel = Kernel(decode_attention._decode_attention)  # that has launched nothing yet
    monkeypatch.setattr(decode_attention, "_run_decode_attention", kernel)
    with arena_on(device) as arena:
        memory, parameters, kv = placed(arena, spec_of(kind, Dtype.BFLOAT16), 1, NUM_BLOCKS)
        scratch = memory.scratch()
        assert scratch is not None
        runner = CudaRangeRunner(memory, parameters, kv, scratch.eager)
        while not runner.kernels_ahead.is_over:
            runner.kernels_ahead.one()
        ready = len(kernel.compiled)
        for prompt_tokens in (5, 40):
            blocks = tuple(range(1, 1 + blocks_for(prompt_tokens)))
            batch = Batch((Segment(3, 1, (0,), True), Segment(0, prompt_tokens, blocks, True)))
            logits_of([runner], iter([(batch, torch.arange(1 + prompt_tokens))]))
        assert (ready, len(kernel.compiled)) == (2, 2)
        del runner
        scratch.graphs.close()
        memory.close()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", [*KINDS, *WIDE])
def test_float32_logits_are_the_cpus(device: torch.device, kind: str, steps: str) -> None:
    found = on_device(device, kind, Dtype.FLOAT32, STEPS[steps](), graphs=True)
    assert largest_error(found, on_cpu(kind, Dtype.FLOAT32, Dtype.FLOAT32, STEPS[steps]())) < 2e-5


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", [*KINDS, *WIDE])
def test_bfloat16_logits_are_as_near_to_float64_as_the_cpus(
    device: torch.device, kind: str, steps: str
) -> None:
    exact = on_cpu(kind, Dtype.BFLOAT16, Dtype.FLOAT64, STEPS[steps]())
    found = on_device(device, kind, Dtype.BFLOAT16, STEPS[steps](), graphs=True)
    here = on_cpu(kind, Dtype.BFLOAT16, Dtype.BFLOAT16, STEPS[steps]())
    assert error_of_all(found, exact) < 1.3 * error_of_all(here, exact)
    # The worst of some twenty single rows is a matter of luck on both sides.
    assert largest_error(found, exact) < 2 * largest_error(here, exact)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        *((kind, cut) for kind in KINDS if kind != "qwen3-moe" for cut in ((), (1,), (1, 2))),
        *((kind, ()) for kind in WIDE),
    ],
    ids=str,
)
def test_captured_steps_equal_eager_ones_bit_for_bit(
    device: torch.device, kind: str, cut: tuple[int, ...], steps: str
) -> None:
    """Every step runs twice: the second time, all that can be captured is."""
    captured = on_device(
        device, kind, Dtype.BFLOAT16, iter([*STEPS[steps](), *STEPS[steps]()]), graphs=True, cut=cut
    )
    eager = on_device(device, kind, Dtype.BFLOAT16, STEPS[steps](), graphs=False, cut=cut)
    assert all(torch.equal(one, other) for one, other in zip(captured, eager + eager, strict=True))
