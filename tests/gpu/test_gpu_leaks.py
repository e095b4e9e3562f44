"""1,000 random operations on the whole engine, and every byte of the device is free again."""

import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from random_models import random_parts, source_of, spec_of

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.pools import clear_cublas_workspaces
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import EngineError
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, ModelSpec
from pilotlight.policy.request import RequestKey, Sampling

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
MIB = 1 << 20
OPERATIONS = 1000
KINDS = ("llama", "gemma3")
MODELS = 4
"""Instances at most, over both engines."""


@dataclass
class Held:
    """One instance, and what is still to be placed of it."""

    engine: Engine
    instance: InstanceId
    spec: ModelSpec
    missing: list[int]
    requests: set[RequestKey] = field(default_factory=set)


class World:
    """Two engines on one arena, and a random operation at a time.

    Refusals are answers; anything else that is raised is a failure.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.arena = CudaArena(device.index)
        ticks = itertools.count()
        limits = BatchLimits(step_tokens=256, running=12)
        self.engines = [Engine(2, lambda: next(ticks) / 1e6, limits, self.arena) for _ in range(2)]
        self.held: list[Held] = []
        self.moves = random.Random(seed)
        self.number = 0
        self.done = dict[str, int]()
        self.parts = {
            kind: [
                {name: source_of(tensor) for name, tensor in part.items()}
                for part in random_parts(spec_of(kind, Dtype.BFLOAT16), 1)
            ]
            for kind in KINDS
        }
        self.kinds = dict[InstanceId, str]()

    def run(self, operations: int) -> None:
        """Runs ``operations`` moves; those for which there was nothing to do do not count."""
        several = {self.place: 4, self.add: 2, self.step: 4}
        choices = [self.open, self.resize, self.move, self.cancel, self.close]
        choices += [operation for operation, times in several.items() for _ in range(times)]
        while sum(self.done.values()) < operations:
            operation = self.moves.choice(choices)
            name = operation.__name__
            try:
                if not operation():
                    continue
            except EngineError as error:
                name = f"{name}: {error.code}"
            self.done[name] = self.done.get(name, 0) + 1

    def room(self, spec: ModelSpec) -> int:
        return spec.total_bytes + 60 * MIB + self.moves.randrange(1, 200) * MIB

    def open(self) -> bool:
        if len(self.held) == MODELS:
            return False
        kind = self.moves.choice(KINDS)
        spec, engine = spec_of(kind, Dtype.BFLOAT16), self.moves.choice(self.engines)
        self.number += 1
        instance = InstanceId(f"i{self.number}")
        room = engine.begin_load(instance, spec, spec.whole, Dtype.BFLOAT16, self.room(spec))
        self.kinds[instance] = kind
        self.held.append(Held(engine, instance, spec, list(room.parts)))
        return True

    def place(self) -> bool:
        loading = [held for held in self.held if held.missing]
        if not loading:
            return False
        held = self.moves.choice(loading)
        part = held.missing.pop(0)
        held.engine.place_part(held.instance, part, self.parts[self.kinds[held.instance]][part])
        return True

    def add(self) -> bool:
        if not self.held:
            return False
        held = self.moves.choice(self.held)
        self.number += 1
        key = RequestKey(RequestId(f"r{self.number}"), 1)
        prompt = [self.moves.randrange(997) for _ in range(self.moves.choice((1, 5, 90, 161, 600)))]
        temperature, top_k = self.moves.choice(((0.0, 0), (0.8, 0), (0.8, 7)))
        sampling = Sampling(
            seed=self.number,
            max_tokens=self.moves.randrange(1, 40),
            temperature=temperature,
            top_k=top_k,
            ignore_eos=True,
        )
        held.engine.add(*key, held.instance, prompt, (), sampling)
        held.requests.add(key)
        return True

    def step(self) -> bool:
        engine = self.moves.choice(self.engines)
        if not engine.has_work:
            return False
        for _ in range(self.moves.randrange(1, 8)):
            for produced in engine.step().produced:
                if produced.finish is not None:
                    for held in self.held:
                        held.requests.discard(RequestKey(produced.request_id, produced.attempt))
        return True

    def resize(self) -> bool:
        if not self.held:
            return False
        held = self.moves.choice(self.held)
        held.engine.resize(held.instance, self.room(held.spec))
        return True

    def move(self) -> bool:
        ready = [held for held in self.held if not held.missing]
        pairs = [
            (source, target)
            for source in ready
            for target in ready
            if source is not target
            and self.kinds[source.instance] == self.kinds[target.instance]
            and source.requests
        ]
        if not pairs:
            return False
        source, target = self.moves.choice(pairs)
        key = self.moves.choice(sorted(source.requests))
        pieces = source.engine.export_kv(source.instance, [key], source.spec.whole)
        gone = source.engine.release(*key)
        source.requests.discard(key)
        target.engine.add(
            *key, target.instance, gone.prompt_ids, gone.output_ids, gone.sampling, pieces=pieces
        )
        target.requests.add(key)
        return True

    def cancel(self) -> bool:
        running = [(held, key) for held in self.held for key in sorted(held.requests)]
        if not running:
            return False
        held, key = self.moves.choice(running)
        held.engine.abort(*key)
        held.requests.discard(key)
        return True

    def close(self) -> bool:
        if not self.held:
            return False
        held = self.held.pop(self.moves.randrange(len(self.held)))
        held.engine.drop(held.instance)
        return True

    def end(self) -> None:
        """Everything goes; the arena's own memory for eager steps last."""
        while self.held:
            self.close()
        for engine in self.engines:
            engine.step()
            assert not engine.has_work
            engine.close()
        gc.collect()
        torch.cuda.synchronize()
        assert self.arena.backed_bytes == 0
        assert self.arena.physical_bytes == self.arena.workspace.mapped_bytes, (
            "parameters, KV, steps and graph pools are gone"
        )
        self.arena.close()


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_thousand_random_operations_leave_nothing_behind(
    device: torch.device, record_property: Record
) -> None:
    """Some before the first look at what is free: kernels that are loaded then stay.

    No other process may use the device meanwhile.
    """
    warm = World(device, 1)
    warm.run(OPERATIONS // 2)
    warm.end()
    before, allocated = free_bytes(), torch.cuda.memory_allocated()
    world = World(device, 2)
    world.run(OPERATIONS)
    record_property("operations", world.done)
    record_property("driver_calls", str(world.arena.driver_calls))
    record_property("physical_bytes", world.arena.physical_bytes)
    for name in ("open", "place", "add", "step", "resize", "move", "cancel", "close"):
        assert world.done.get(name, 0) > 5, f"{name} was hardly tried"
    world.end()
    del warm, world
    after = free_bytes()
    record_property("free_bytes_before_and_after", [before, after])
    assert torch.cuda.memory_allocated() == allocated
    assert before - after < 32 * MIB
