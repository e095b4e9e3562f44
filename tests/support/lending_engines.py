"""Engines on fake devices of one host, whose arenas lend each other what lies in them."""

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_cuda import FakeCuda, fake_cuda
from pipelines import INSTANCE, MemoryPipeline, connect

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.results import PlacedPart
from pilotlight.policy.model import Stage

KV_TOKENS = 1024
SLOT_BYTES = 32 << 30


@dataclass
class Lenders:
    """Makes drivers with arenas of their own; ``close`` gives all of them back."""

    fake: FakeCuda
    driver: Callable[..., Any]
    now_s: float = 0.0
    made: list[tuple[Any, CudaArena]] = field(default_factory=list)

    def on_device(self, limits: BatchLimits | None = None) -> Any:
        """One whose engine is on a device."""
        arena = CudaArena(
            0, driver=self.fake.path, device=torch.device("cpu"), num_slots=1, slot_bytes=SLOT_BYTES
        )
        # A granule has room for thousands of the small models' tokens.
        arena.whole_granules = False
        made = self.driver(limits)
        made.engine = Engine(1, lambda: self.now_s, limits, arena)
        self.made.append((made, arena))
        return made

    def pipeline(
        self, checkpoints: list[Any], stages: list[Stage], *, seed: int = 0, hosts: str = ""
    ) -> MemoryPipeline:
        """Stages that are joined: each of its checkpoint, on a device, or on cores where ``hosts``
        has a ``c``.
        """
        drivers: list[Any] = []
        for index, (model, stage) in enumerate(zip(checkpoints, stages, strict=True)):
            on_cores = hosts[index : index + 1] == "c"
            drivers.append(self.driver() if on_cores else self.on_device())
            drivers[-1].load(model, INSTANCE, kv_tokens=KV_TOKENS, stage=stage)
            drivers[-1].engine.vouch(INSTANCE)
        return connect(drivers, random.Random(seed))

    def close(self) -> None:
        for made, arena in self.made:
            made.engine.drop(INSTANCE)
            arena.close()


def lent_by(driver: Callable[..., Any]) -> Iterator[Lenders]:
    """Lenders for a test; all of their memory is back at its end."""
    gc.collect()
    fake = fake_cuda()
    fake.reset()
    before = fake.reserved, fake.used_bytes
    made = Lenders(fake, driver)
    yield made
    made.close()
    fake.reset()
    assert (fake.reserved, fake.used_bytes) == before


@dataclass
class Growing:
    """The lead of a pipeline gets all layers: its parts are offered in order, as a loader would."""

    model: Any
    pipeline: MemoryPipeline
    target: Stage | None = None
    placed: dict[int, PlacedPart] = field(default_factory=dict)
    waited: int = 0
    """Times that a part was not in its place yet."""

    def __post_init__(self) -> None:
        spec, lead = self.model.spec, self.pipeline.lead.engine
        target = self.target or spec.whole
        held = lead._stages[INSTANCE].parameters.parts
        device_bytes = parameter_bytes(decoder_of(spec), target, spec.dtype)
        device_bytes += KV_TOKENS * spec.kv_bytes_per_token(target, spec.dtype)
        room = lead.extend(INSTANCE, target, device_bytes)
        self.left = [part for part in room.parts if part not in held]

    def offer(self) -> None:
        """The next part, and the one behind it."""
        if not self.left:
            return
        part, parts = self.left[0], self.model.parts
        following = (self.left[1], parts[self.left[1]]) if len(self.left) > 1 else None
        placed = self.pipeline.lead.engine.place_part(INSTANCE, part, parts[part], following)
        if placed.waits:
            self.waited += 1
        else:
            self.placed[self.left.pop(0)] = placed

    def run(self, done: Callable[[], bool], steps: int = 20_000) -> None:
        """All take turns until it is done and every part is placed."""
        for _ in range(steps):
            if not self.left and done():
                return
            self.offer()
            self.pipeline.step()
        raise AssertionError("it does not come to an end")

    @property
    def ways(self) -> dict[int, str]:
        """Which way each part came, or why not from the neighbour."""
        return {
            part: "device" if one.by_device_bytes else (one.why or "pool")
            for part, one in self.placed.items()
        }
