"""What runs and samples a stage, by the device that its arena is on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.logits import Draw
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.engine.device.sampler import Drawn, PendingTokens, Undrawn, sample
from pilotlight.engine.models.decoder import Decoder
from pilotlight.policy.types import Stage

Sampler = Callable[[Tensor, Sequence[Draw]], "list[Drawn | Undrawn]"]
"""Draws one token from each row of logits; see ``device.sampler.sample``."""


class Runner(Protocol):
    """Runs layer ranges; see ``device.runner.RangeRunner``."""

    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """See ``RangeRunner.run``. Logits may be overwritten by the next run."""
        ...


Launcher = Callable[[Tensor, Sequence[Draw]], PendingTokens]
"""The same for draws that are all simple, without waiting for the device."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A stage's executor and its sampler."""

    runner: Runner
    """Takes token ids from the device, too, if there is a ``launch``."""
    sample: Sampler
    launch: Launcher | None = None
    """None where the host does the work itself: there is nothing to run ahead of."""


def compute_on(device: torch.device, decoder: Decoder, stage: Stage, parameters: Parameters, kv: KvCache) -> Compute:
    """What a stage on this device needs.

    Raises:
        UnsupportedModel: the device does not run the stage's dtype.
    """
    if device.type == "cpu":
        return Compute(RangeRunner(decoder, stage, parameters, kv), sample)
    # Only here: on a machine without a GPU there may be no triton.
    from pilotlight.engine.cuda.graphs import Graphs
    from pilotlight.engine.cuda.runner import CudaRangeRunner
    from pilotlight.engine.cuda.sampler import CudaSampler

    runner = CudaRangeRunner(decoder, stage, parameters, kv, device, graphs=Graphs(device))
    sampler = CudaSampler(decoder.spec.vocab_size, device)
    return Compute(runner, sampler, sampler.launch)
