"""KV on loan, on a device: it grows under load, goes back in one step, and tokens are the same."""

import gc
import itertools
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from random_models import SMALL, random_parts, source_of, with_sizes

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.engine import Engine
from pilotlight.native.device import DriverCalls
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import FinishReason, Sampling

pytestmark = pytest.mark.gpu

INSTANCE = InstanceId("i")
SPEC = with_sizes(
    replace(SMALL, dtype=Dtype.FLOAT32, num_layers=36, num_heads=8, num_kv_heads=8, head_dim=128)
)
"""KV as a model of 4B parameters has it, and small parameters."""
GRANTED_TOKENS, LENT_TOKENS, LEFT_TOKENS = 2048, 80_000, 4096
OUTPUT_TOKENS = 60
SHRINK_MS = 50.0
RETURNS = 2
"""The quicker one counts: half of the time is the host's, which other work takes from it."""
WHOLE_BYTES, QUIET_STEPS = 100_000_000_000, 32
"""A loan of a whole device, and the steps by which it grows while nothing waits."""
BESIDE_BYTES = 8 << 30
"""Of a device, what torch and the steps take beside it. Less is free where other work has some, or
where a test before it failed, whose engine the traceback that pytest keeps may hold."""


@pytest.fixture
def arena(device: torch.device) -> Generator[CudaArena]:
    made = CudaArena(device.index)
    yield made
    gc.collect()
    torch.cuda.synchronize()
    made.close()


@pytest.fixture
def engine(arena: CudaArena) -> Generator[Engine]:
    ticks = itertools.count()
    limits = BatchLimits(step_tokens=2048, running=32, prefix_cache=False)
    engine = Engine(2, lambda: next(ticks) / 1000, limits, arena)
    engine.begin_load(INSTANCE, SPEC, SPEC.whole, Dtype.FLOAT32, size_of(GRANTED_TOKENS))
    for part, tensors in enumerate(random_parts(SPEC, 3)):
        engine.place_part(INSTANCE, part, {name: source_of(one) for name, one in tensors.items()})
    yield engine
    engine.unload(INSTANCE)


def size_of(kv_tokens: int) -> int:
    """Bytes of the stage with KV for so many tokens, whole granules of each layer's included."""
    granules = (SPEC.num_layers * 3 + 2) * (2 << 20)
    token_bytes = SPEC.kv_bytes_per_token(SPEC.whole, Dtype.FLOAT32)
    return SPEC.total_bytes + granules + kv_tokens * token_bytes


def timed_ms(work: Callable[[], object]) -> float:
    """What work takes until the device has done it, by its own events."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def calls_of(arena: CudaArena, before: DriverCalls) -> dict[str, int]:
    """What was asked of the driver since then."""
    now, then = asdict(arena.driver_calls), asdict(before)
    return {name: now[name] - then[name] for name in now}


class Load:
    """Requests on an engine, and what they gave."""

    def __init__(self, engine: Engine, run: str) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        for number in range(16):
            name = f"{run} {number}"
            prompt = torch.randint(
                997, (400,), generator=torch.Generator().manual_seed(number)
            ).tolist()
            sampling = Sampling(seed=number, max_tokens=OUTPUT_TOKENS, temperature=0.0)
            engine.add(RequestId(name), 1, INSTANCE, prompt, (), sampling)
            self.tokens[name] = []
        self.waiting = 0

    def step(self) -> None:
        result = self.engine.step()
        self.waiting = result.waiting
        for produced in result.produced:
            assert produced.finish is not FinishReason.ERROR, produced.message
            self.tokens[produced.request_id].extend(produced.token_ids)

    def finish(self) -> list[list[int]]:
        while self.engine.has_work:
            self.step()
        return list(self.tokens.values())


def test_kv_grows_under_load_and_goes_back_within_a_step(
    engine: Engine, record_property: Callable[[str, object], None]
) -> None:
    expected = Load(engine, "queued").finish()
    grown_ms: list[float] = []
    shrunk_ms: list[float] = []
    for turn in range(RETURNS):
        engine.resize(INSTANCE, size_of(GRANTED_TOKENS))
        load = Load(engine, f"lent {turn}")
        load.step()
        assert load.waiting > 0
        grown_ms.append(timed_ms(lambda: engine.resize(INSTANCE, size_of(LENT_TOKENS))))
        assert engine.kv_capacity_tokens(INSTANCE) >= LENT_TOKENS
        for _ in range(20):
            load.step()
        assert load.waiting == 0, "all run side by side"
        shrunk_ms.append(timed_ms(lambda: engine.resize(INSTANCE, size_of(LEFT_TOKENS), must=True)))
        assert engine.backed_bytes <= size_of(LEFT_TOKENS)
        assert load.finish() == expected
    record_property("grown_ms", [round(each, 2) for each in grown_ms])
    record_property("shrunk_ms", [round(each, 2) for each in shrunk_ms])
    assert min(shrunk_ms) <= SHRINK_MS


def test_a_whole_device_grows_in_quiet_steps_and_goes_back_within_one(
    engine: Engine, arena: CudaArena, record_property: Callable[[str, object], None]
) -> None:
    token_bytes = SPEC.kv_bytes_per_token(SPEC.whole, Dtype.FLOAT32)
    granted, whole = size_of(GRANTED_TOKENS), size_of(WHOLE_BYTES // token_bytes)
    if arena.capacity_bytes < whole + BESIDE_BYTES:
        pytest.skip(f"{arena.capacity_bytes} bytes of the device are free, a loan takes {whole}")
    expected = Load(engine, "granted").finish()
    load = Load(engine, "lent")
    steps_ms: list[float] = []
    before = arena.driver_calls
    for number in range(1, QUIET_STEPS + 1):
        lent = (whole - granted) * number // QUIET_STEPS
        load.step()
        steps_ms.append(
            timed_ms(partial(engine.resize, INSTANCE, granted + lent, target_bytes=whole))
        )
        assert engine.backed_bytes - engine.steps_bytes <= granted + lent
    record_property("grown_calls", calls_of(arena, before))
    record_property("quiet_ms", [round(each, 2) for each in steps_ms])
    assert engine.kv_capacity_tokens(INSTANCE) >= WHOLE_BYTES // token_bytes - BLOCK_TOKENS
    assert load.finish() == expected
    before = arena.driver_calls
    shrunk_ms = timed_ms(lambda: engine.resize(INSTANCE, granted, must=True))
    record_property("shrunk_calls", calls_of(arena, before))
    record_property("shrunk_ms", round(shrunk_ms, 2))
    assert engine.backed_bytes <= granted
    grown_ms = timed_ms(lambda: engine.resize(INSTANCE, whole))
    record_property("grown_at_once_ms", round(grown_ms, 2))
    before = arena.driver_calls
    # Nothing asks for a border: every layer's keys and values are cut.
    cut_ms = timed_ms(lambda: engine.resize(INSTANCE, granted + (whole - granted) * 5 // 8))
    record_property("cut_calls", calls_of(arena, before))
    record_property("cut_ms", round(cut_ms, 2))
    assert Load(engine, "cut").finish() == expected
    assert shrunk_ms <= SHRINK_MS
