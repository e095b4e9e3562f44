"""The whole engine on the device says what the engine on the CPU says, whatever comes and goes
meanwhile.
"""

import gc
import itertools
from collections.abc import Generator

import pytest
import torch
from random_models import WIDE, random_parts, source_of, spec_of

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.graphs import SIZES
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.engine.engine import Engine
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import FinishReason, RequestKey, Sampling

pytestmark = pytest.mark.gpu

SLOT_BYTES = 256 << 20
KINDS = ("llama-bias", "qwen2", "gemma3")
INSTANCE = InstanceId("i")


class Driver:
    """An engine with one model, and what it said."""

    def __init__(self, arena: Arena, kind: str, kv_tokens: int, limits: BatchLimits) -> None:
        ticks = itertools.count()
        spec = spec_of(kind, Dtype.FLOAT32)
        self.engine = Engine(2, lambda: next(ticks) / 1000, limits, arena)
        room = kv_tokens * spec.kv_bytes_per_token(spec.whole, Dtype.FLOAT32)
        self.engine.begin_load(INSTANCE, spec, spec.whole, Dtype.FLOAT32, spec.total_bytes + room)
        for part, tensors in enumerate(random_parts(spec, 3)):
            self.engine.place_part(
                INSTANCE, part, {name: source_of(tensor) for name, tensor in tensors.items()}
            )
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, FinishReason] = {}
        self.steps = 0

    def add(
        self, name: str, prompt_tokens: int, number: int | None = None, **sampling: object
    ) -> None:
        number = len(self.tokens) if number is None else number
        prompt = torch.randint(
            997, (prompt_tokens,), generator=torch.Generator().manual_seed(number)
        ).tolist()
        parameters = Sampling(**{"seed": number, "max_tokens": 30, "temperature": 0.0, **sampling})
        self.engine.add(RequestId(name), 1, INSTANCE, prompt, (), parameters)
        self.tokens[name] = []

    def step(self) -> None:
        self.steps += 1
        for produced in self.engine.step().produced:
            assert produced.request_id not in self.finishes
            assert produced.position == len(self.tokens[produced.request_id])
            self.tokens[produced.request_id].extend(produced.token_ids)
            if produced.finish is not None:
                self.finishes[produced.request_id] = produced.finish

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()


def talk(arena: Arena, kind: str) -> Driver:
    """Requests of every sort, some of which come, go, stop or lose their blocks in the middle."""
    driver = Driver(arena, kind, 2048, BatchLimits(step_tokens=200, running=12))
    for number in range(5):
        driver.add(f"greedy {number}", 7 + 60 * number, max_tokens=10 + 7 * number)
    for number in range(5):
        driver.add(f"noisy {number}", 31, temperature=0.9)
        stops = tuple(range(number, 997, 9))
        driver.add(
            f"stops {number}", 12 + number, temperature=1.2, stop_token_ids=stops, max_tokens=60
        )
    for _ in range(12):
        driver.step()
    driver.add("late", 300)
    driver.add("filtered", 20, temperature=0.8, top_k=40, top_p=0.9, min_p=0.001)
    for _ in range(4):
        driver.step()
    driver.engine.abort(RequestId("greedy 4"), 1)
    spec = spec_of(kind, Dtype.FLOAT32)
    row_bytes = spec.kv_bytes_per_token(spec.whole, Dtype.FLOAT32)
    driver.engine.resize(INSTANCE, spec.total_bytes + 640 * row_bytes)
    for _ in range(5):
        driver.step()
    driver.engine.resize(INSTANCE, spec.total_bytes + 1024 * row_bytes)
    driver.add("penalised", 20, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=20)
    driver.add("biased", 20, logit_bias=((7, 4.0), (9, -100.0)), min_tokens=5, stop_token_ids=(7,))
    driver.finish()
    driver.add("alone", 40, max_tokens=100)
    driver.finish()
    return driver


@pytest.fixture
def on_device(device: torch.device) -> Generator[CudaArena]:
    arena = CudaArena(device.index)
    # A granule has room for thousands of these models' tokens, and the tests are about few.
    arena.whole_granules = False
    yield arena
    gc.collect()
    torch.cuda.synchronize()
    arena.close()


@pytest.mark.parametrize("kind", [*KINDS, *WIDE])
def test_outputs_are_those_of_the_cpu(on_device: CudaArena, kind: str) -> None:
    there, here = talk(on_device, kind), talk(CpuArena(num_slots=1, slot_bytes=SLOT_BYTES), kind)
    cancelled = "greedy 4"
    assert there.finishes == here.finishes
    assert there.finishes[cancelled] is FinishReason.CANCELLED
    assert {name: tokens for name, tokens in there.tokens.items() if name != cancelled} == {
        name: tokens for name, tokens in here.tokens.items() if name != cancelled
    }
    there.engine.unload(INSTANCE)
    assert on_device.backed_bytes == 0


@pytest.mark.parametrize("kind", ["llama-bias", "qwen2"])
def test_outputs_are_the_same_with_graphs_that_were_made_while_nothing_ran(
    on_device: CudaArena, kind: str
) -> None:
    """What the cache has by then stays, its first block among it."""
    on_device.capacity_bytes = 8 << 30  # The rest is to spare.
    there, here = (
        Driver(arena, kind, 2048, BatchLimits(step_tokens=200, running=12))
        for arena in (on_device, CpuArena(num_slots=1, slot_bytes=SLOT_BYTES))
    )
    for driver in (there, here):
        driver.add("before", 150, 7, max_tokens=6)
        driver.finish()
    pieces = 0
    while there.engine.prepare():
        pieces += 1
    assert pieces > 2 * len(SIZES)
    assert not here.engine.prepare()
    for driver in (there, here):
        driver.add("again", 150, 7, max_tokens=20)
        for number in range(9):
            driver.add(f"another {number}", 9 + 21 * number, max_tokens=8 + 3 * number)
        driver.finish()
    assert there.tokens == here.tokens
    there.engine.unload(INSTANCE)
    assert on_device.backed_bytes == 0


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_prompt_in_pieces_comes_first(on_device: CudaArena, max_tokens: int) -> None:
    """The very first batches give no request a token."""
    drivers = [
        Driver(arena, "qwen2", 1024, BatchLimits(step_tokens=200, running=12))
        for arena in (on_device, CpuArena(num_slots=1, slot_bytes=SLOT_BYTES))
    ]
    for driver in drivers:
        driver.add("long", 450, max_tokens=max_tokens)
        driver.step()
        assert driver.tokens == {"long": []}
        driver.finish()
    there, here = drivers
    assert there.tokens == here.tokens
    there.engine.unload(INSTANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_moves_between_engines_in_mid_generation(on_device: CudaArena, kind: str) -> None:
    """From the device to another engine on it, and to one on the CPU, and from there to the device,
    with its keys and values: the tokens are those of one that stays.
    """
    limits = BatchLimits(step_tokens=200, running=12)

    def host() -> Driver:
        return Driver(CpuArena(num_slots=1, slot_bytes=SLOT_BYTES), kind, 1024, limits)

    stays, goes, takes, follows = (Driver(on_device, kind, 1024, limits) for _ in range(4))
    at_home, there = host(), host()
    for driver in (stays, goes, at_home):
        driver.add("r", 75, max_tokens=40, temperature=0.7)
    stays.finish()
    key = RequestKey(RequestId("r"), 1)
    for source, targets in ((goes, (takes, there)), (at_home, (follows,))):
        for _ in range(13):
            source.step()
        pieces = source.engine.export_kv(INSTANCE, [key], spec_of(kind, Dtype.FLOAT32).whole)
        gone = source.engine.release(*key)
        assert list(gone.output_ids) == source.tokens["r"]
        for target in targets:
            target.tokens["r"] = list(gone.output_ids)
            target.engine.add(
                *key, INSTANCE, gone.prompt_ids, gone.output_ids, gone.sampling, pieces=pieces
            )
            # Nothing but the last token has to be run before the next one is sampled.
            target.finish()
            assert target.tokens["r"] == stays.tokens["r"]
    for driver in (stays, goes, takes, follows):
        driver.finish()
        driver.engine.unload(INSTANCE)
    assert on_device.backed_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_requests_move_while_others_go_on(on_device: CudaArena, kind: str) -> None:
    """Two engines on one device, six requests; every few steps one that runs changes sides.

    All end as if none had moved.
    """
    limits = BatchLimits(step_tokens=200, running=12)
    stays, *sides = (Driver(on_device, kind, 2048, limits) for _ in range(3))
    for number in range(6):
        for driver in (stays, sides[number % 2]):
            driver.add(
                f"r{number}",
                20 + 31 * number,
                number,
                max_tokens=50,
                temperature=0.5 * (number % 2),
            )
    stays.finish()
    where = {f"r{number}": number % 2 for number in range(6)}
    for turn in range(18):
        for _ in range(3):
            for side in sides:
                if side.engine.has_work:
                    side.step()
        key = RequestKey(RequestId(f"r{turn % 6}"), 1)
        source, target = sides[where[key.request_id]], sides[1 - where[key.request_id]]
        if key.request_id in source.finishes:
            continue
        pieces = source.engine.export_kv(INSTANCE, [key], spec_of(kind, Dtype.FLOAT32).whole)
        gone = source.engine.release(*key)
        target.tokens[key.request_id] = list(gone.output_ids)
        target.engine.add(
            *key, INSTANCE, gone.prompt_ids, gone.output_ids, gone.sampling, pieces=pieces
        )
        where[key.request_id] = 1 - where[key.request_id]
    for side in sides:
        side.finish()
    assert {name: sides[side].tokens[name] for name, side in where.items()} == stays.tokens
    for driver in (stays, *sides):
        driver.engine.unload(INSTANCE)
