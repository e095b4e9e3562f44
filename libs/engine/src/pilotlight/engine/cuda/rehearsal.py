"""What lies behind a stage's last copy, done once while the copies are under way.

The sampler's kernels are compiled for a vocabulary and loaded at their first use, and so is what is
around a trial: torch's kernels that put words and blocks aside, memory of the host that logits come
to. All of it runs here on nothing of any request, so that the first token does not wait for it. The
model with which a process warms up has it loaded what is the same for all models.
"""

from collections.abc import Sequence
from typing import Protocol

import structlog
import torch
from torch import Tensor

from pilotlight.engine.cuda.proofs import Told
from pilotlight.engine.cuda.trials import HOST_ROWS, digest_of
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.sampler import PendingTokens
from pilotlight.engine.faults import out_of_memory
from pilotlight.policy.request import Sampling

log = structlog.get_logger()

GREEDY = SampleSpec(Sampling(seed=0, max_tokens=1, temperature=0.0), 0)
"""One launch runs the kernels of all simple specs."""


class Samples(Protocol):
    """A stage's sampler. ``cuda.sampler.CudaSampler`` is one."""

    def launch(self, logits: Tensor, specs: Sequence[SampleSpec]) -> PendingTokens:
        """See ``CudaSampler.launch``."""
        ...


class Rehearses(Protocol):
    """A stage's steps. ``cuda.runner.CudaRangeRunner`` has them."""

    @property
    def has_trials(self) -> bool:
        """See ``StageSteps.has_trials``."""
        ...

    def rehearse(self, inputs: Tensor) -> None:
        """See ``CudaRangeRunner.rehearse``."""
        ...


class Rehearsal:
    """Of one stage."""

    def __init__(self, memory: StageMemory, sampler: Samples, steps: Rehearses) -> None:
        """Does nothing yet.

        Args:
            memory: the stage's.
            sampler: the stage's.
            steps: the stage's.
        """
        self._memory, self._sampler, self._steps = memory, sampler, steps
        self._is_over = False

    @torch.inference_mode()
    def __call__(self) -> None:
        """The first time, and of a whole model alone: ranges sample elsewhere."""
        spec = self._memory.decoder.spec
        if self._is_over or self._memory.stage != spec.whole:
            return
        self._is_over = True
        try:
            self._run(spec.vocab_size)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            # What is first used then may find some.
            log.warning("nothing rehearsed", action="not_rehearsed", why=str(error))

    def _run(self, vocab_size: int) -> None:
        device, dtype = self._memory.arena.device, TORCH_DTYPES[self._memory.dtype]
        logits = torch.zeros(HOST_ROWS + 1, vocab_size, dtype=dtype, device=device)
        tokens = self._sampler.launch(logits[:1], [GREEDY])
        if self._steps.has_trials:
            self._steps.rehearse(tokens.inputs)
            digest_of(Told(logits[:1]).wait())
            digest_of(logits)  # by the device's kernels
