"""Long prompts alone, before cuDNN has prepared for their length and behind that."""

import gc
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from random_models import placed, random_parts, source_of, spec_of
from torch import Tensor

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

from pilotlight.engine.compute import Runner
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda import layers
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.runner import CudaRangeRunner
from pilotlight.engine.cuda.whole_prompts import WHOLE_STEP, WHOLE_TOKENS, padded_length
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.engine.engine import Engine
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.request import Sampling

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
SLOT_BYTES = 256 << 20
FUSED = ("llama", "llama-bias", "qwen3")
"""Their layers are."""
KINDS = (*FUSED, "qwen3-moe")
LENGTH = 2 * WHOLE_STEP
FIRST, OTHERS = 1600, (1601, 1900, LENGTH - 1, LENGTH)
"""Of one padded length."""
BEYOND = LENGTH + 1
NUM_BLOCKS = blocks_for(BEYOND)
INSTANCE = InstanceId("i")


@pytest.fixture
def on_device(device: torch.device) -> Generator[CudaArena]:
    arena = CudaArena(device.index)
    yield arena
    gc.collect()
    torch.cuda.synchronize()
    arena.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each prompt that a layer of a step has had cuDNN attend to."""
    found: list[int] = []
    known = layers.look_at_whole

    def look(rows: slice, *arguments: Any) -> Tensor:
        found.append(rows.stop - rows.start)
        return known(rows, *arguments)

    monkeypatch.setattr(layers, "look_at_whole", look)
    return found


def tokens_of(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(997, (count,), generator=generator).tolist()


def batch_of(count: int) -> Batch:
    return Batch((Segment(0, count, tuple(range(blocks_for(count))), wants_logits=True),))


def outputs_of(runner: Runner, counts: Sequence[int]) -> list[Tensor]:
    """Of each prompt, alone."""
    with torch.inference_mode():
        return [
            runner.run(batch_of(count), torch.tensor(tokens_of(count))).cpu().clone()
            for count in counts
        ]


def on_cpu(kind: str, run_as: Dtype, stage: Stage, counts: Sequence[int]) -> list[Tensor]:
    arena = CpuArena(num_slots=1, slot_bytes=SLOT_BYTES)
    spec = spec_of(kind, Dtype.BFLOAT16)
    memory, parameters, kv = placed(arena, spec, 1, NUM_BLOCKS, run_as, stage)
    return outputs_of(RangeRunner(memory, parameters, kv), counts)


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Of a prompt, relative to the whole."""
    return max(
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(found, exact, strict=True)
    )


def prepare(runner: CudaRangeRunner) -> int:
    """The lengths that were wanted."""
    prompts, count = runner.whole_prompts, 0
    assert prompts is not None
    while not prompts.is_over:
        prompts.one()
        count += 1
    return count


# Of experts, rounding chooses others now and then: a single row's logits say nothing of it.
@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        *(pytest.param(kind, False, id=f"{kind}, hidden states") for kind in KINDS),
        *(pytest.param(kind, True, id=f"{kind}, logits") for kind in FUSED),
    ],
)
def test_a_prepared_length_gives_what_our_own_kernel_gives(
    on_device: CudaArena, looks: list[int], kind: str, *, whole: bool, record_property: Record
) -> None:
    spec = spec_of(kind, Dtype.BFLOAT16)
    stage = spec.whole if whole else Stage(0, 2)
    memory, parameters, kv = placed(on_device, spec, 1, NUM_BLOCKS, stage=stage)
    scratch = memory.scratch()
    assert scratch is not None
    # What padding and scratch hold is anything, so let it be the worst.
    with scratch.eager.use():
        poison = torch.full((8 << 20,), torch.nan, device=on_device.device)
    del poison
    runner = CudaRangeRunner(memory, parameters, kv, scratch.eager)
    counts = (FIRST, *OTHERS)
    try:
        before = outputs_of(runner, counts)
        assert (looks, prepare(runner)) == ([], 1)
        began_s = time.perf_counter()
        behind = outputs_of(runner, counts)
        record_property("ms", round((time.perf_counter() - began_s) * 1e3, 1))
    finally:
        del runner
        memory.close()
    layers_run = stage.stop - stage.start
    assert looks == [count for count in counts for _ in range(layers_run)]
    exact, here = (
        on_cpu(kind, run_as, stage, counts) for run_as in (Dtype.FLOAT64, Dtype.BFLOAT16)
    )
    # Hidden states are of thousands of rows; the logits of single rows are a matter of luck.
    bound = (2.0 if whole else 1.3) * largest_error(here, exact)
    assert largest_error(before, exact) < bound
    assert largest_error(behind, exact) < bound


def test_a_length_is_prepared_once_for_all_counts_that_are_padded_to_it(
    on_device: CudaArena, looks: list[int]
) -> None:
    spec = spec_of("llama", Dtype.BFLOAT16)
    memory, parameters, kv = placed(on_device, spec, 1, NUM_BLOCKS)
    scratch = memory.scratch()
    assert scratch is not None
    runner = CudaRangeRunner(memory, parameters, kv, scratch.eager)
    try:
        outputs_of(runner, (FIRST,))
        assert (prepare(runner), looks) == (1, [])
        for count in OTHERS:
            assert padded_length(count) == LENGTH
            outputs_of(runner, (count,))
            assert looks == [count] * spec.num_layers, "at its first prompt"
            looks.clear()
        assert prepare(runner) == 0
        outputs_of(runner, (WHOLE_TOKENS - 1, BEYOND))
        assert (looks, prepare(runner)) == ([], 1)
    finally:
        del runner
        memory.close()


def test_an_engine_with_nothing_to_do_prepares_what_was_wanted(
    on_device: CudaArena, looks: list[int]
) -> None:
    # A granule has room for thousands of this model's tokens.
    on_device.whole_granules = False
    spec = spec_of("qwen3", Dtype.BFLOAT16)
    limits = BatchLimits(step_tokens=2 * LENGTH, running=4, prefix_cache=False)
    engine = Engine(1, time.monotonic, limits, on_device)
    kv_bytes = 2 * LENGTH * spec.kv_bytes_per_token(spec.whole, Dtype.BFLOAT16)
    room = spec.total_bytes + kv_bytes
    engine.begin_load(INSTANCE, spec, spec.whole, Dtype.BFLOAT16, room)
    for part, tensors in enumerate(random_parts(spec, 3)):
        sources = {name: source_of(tensor) for name, tensor in tensors.items()}
        engine.place_part(INSTANCE, part, sources)

    def ask(count: int) -> None:
        sampling = Sampling(seed=1, max_tokens=3, temperature=0.0)
        engine.add(RequestId(f"r{count}"), 1, INSTANCE, tokens_of(count), (), sampling)
        while engine.has_work:
            engine.step()

    while engine.prepare():
        pass
    ask(FIRST)
    assert looks == []
    assert engine.prepare(), "the length"
    assert not engine.prepare()
    ask(OTHERS[0])
    assert looks == [OTHERS[0]] * spec.num_layers
    assert not engine.prepare()
    engine.unload(INSTANCE)
