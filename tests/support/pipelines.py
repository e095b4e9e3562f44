"""A model cut into stages, each on an engine of its own, joined in memory; all of them run in one
thread, in random turns.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from pilotlight.engine.channel.memory import memory_channel
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Stage

INSTANCE = InstanceId("i")


def cuts(num_layers: int, num_stages: int) -> list[Stage]:
    """Stages of one length."""
    size = num_layers // num_stages
    return [Stage(start, start + size) for start in range(0, num_layers, size)]


@dataclass
class MemoryPipeline:
    """Drivers of a pipeline's stages; the first one takes the requests."""

    drivers: list
    chance: random.Random
    lost: list = field(default_factory=list)

    @property
    def lead(self):
        return self.drivers[0]

    def step(self) -> None:
        """A stage that has something to do does it."""
        busy = [driver for driver in self.drivers if driver.engine.has_work]
        if busy:
            self.lost.extend(self.chance.choice(busy).step().lost)

    def run_until(self, done: Callable[[], bool], steps: int = 20_000) -> None:
        for _ in range(steps):
            if done():
                return
            self.step()
        raise AssertionError("the pipeline does not come to an end")

    def finish(self) -> dict[str, list[int]]:
        outputs = self.lead.outputs
        self.run_until(lambda: all(output.finish is not None for output in outputs.values()))
        return {name: output.token_ids for name, output in outputs.items()}


def connect(
    drivers, chance: random.Random, instance: InstanceId = INSTANCE, *, vouched: bool = True
) -> MemoryPipeline:
    """Joins stages that are loaded, in a ring."""
    channels = [memory_channel(monotonic) for _ in drivers]
    for index, driver in enumerate(drivers):
        ends = channels[index - 1][1], channels[index][0]
        driver.engine.connect(instance, *ends, vouched=vouched)
    pipeline = MemoryPipeline(drivers, chance)
    pipeline.run_until(lambda: bool(pipeline.lost) or pipeline.lead.engine.serves(instance))
    return pipeline


def staged(
    driver, checkpoint, stages, *, seed: int = 0, limits: BatchLimits | None = None, kv_tokens=4096
) -> MemoryPipeline:
    """A pipeline of fresh engines."""
    sizes = kv_tokens if isinstance(kv_tokens, list) else [kv_tokens] * len(stages)
    drivers = [driver(limits) for _ in stages]
    for made, stage, tokens in zip(drivers, stages, sizes, strict=True):
        made.load(checkpoint, INSTANCE, kv_tokens=tokens, stage=stage)
    return connect(drivers, random.Random(seed))
