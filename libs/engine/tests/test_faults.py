"""Errors after which a process can go on, and those after which it cannot."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.errors import BadRequest, EngineFailed, NoRoom
from pilotlight.engine.faults import context_lost, out_of_memory
from pilotlight.native.library import NativeError, OutOfMemory
from pilotlight.policy.request import FinishReason


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Accelerator(RuntimeError):
    """As ``torch.AcceleratorError``."""

    def __init__(self, code: int) -> None:
        self.error_code = code
        super().__init__("CUDA error")


@pytest.mark.parametrize(
    ("error", "lost", "full"),
    [
        (Accelerator(700), True, False),
        (Accelerator(719), True, False),
        (Accelerator(214), True, False),
        (Accelerator(2), False, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True, False),
        (RuntimeError("CUDA error: device-side assert triggered"), True, False),
        (
            caused(EngineFailed("parameters do not come"), NativeError(700, "cuMemcpy: 700")),
            True,
            False,
        ),
        (caused(NoRoom("refused"), OutOfMemory(2, "cuMemCreate: 2")), False, True),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (
            caused(RuntimeError("capture failed"), torch.OutOfMemoryError("CUDA out of memory")),
            False,
            True,
        ),
        (caused(torch.OutOfMemoryError("CUDA out of memory"), Accelerator(700)), True, False),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
            False,
            True,
        ),
        (RuntimeError("shape mismatch"), False, False),
        (BadRequest("no"), False, False),
        (NativeError(-1, "misused"), False, False),
    ],
)
def test_each_error(error: Exception, lost: bool, full: bool) -> None:
    assert (context_lost(error), out_of_memory(error)) == (lost, full)


class Crowded:
    """A runner on a device that has no memory for batches of ``tokens`` tokens."""

    def __init__(self, runner: Any, tokens: int) -> None:
        self.runner = runner
        self.tokens = tokens
        self.refused = 0

    def run(self, batch: Batch, inputs: Any, layers: Any = None) -> Any:
        if batch.num_tokens >= self.tokens:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.runner.run(batch, inputs, layers)


def test_a_batch_without_memory_ends_its_largest_request_and_leaves_the_others_as_they_were(
    driver, checkpoint
):
    model = checkpoint("llama", 1)
    alone = driver(BatchLimits(step_tokens=64, running=8))
    crowded = driver(BatchLimits(step_tokens=64, running=8))
    for runs in (alone, crowded):
        runs.load(model)
    resident = crowded.engine._stages["i"]
    runner = Crowded(resident.compute.runner, 45)
    resident.compute = replace(resident.compute, runner=runner)
    prompts = {
        name: [3 + (7 * place + size) % 60 for place in range(size)]
        for name, size in (("a", 5), ("b", 30), ("c", 20))
    }
    for name, prompt in prompts.items():
        alone.add(name, prompt)
        crowded.add(name, prompt)
    alone.finish()
    crowded.finish()
    assert runner.refused == 1
    lost = crowded.outputs["b"]
    assert (lost.finish, lost.code) == (FinishReason.ERROR, "engine_failed")
    for name in ("a", "c"):
        assert crowded.outputs[name].token_ids == alone.outputs[name].token_ids


def test_what_is_not_the_devices_memory_ends_the_engine(driver, checkpoint):
    runs = driver(BatchLimits(step_tokens=64, running=8))
    runs.load(checkpoint("llama", 1))
    resident = runs.engine._stages["i"]

    class Broken:
        def run(self, *arguments: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    resident.compute = replace(resident.compute, runner=Broken())
    runs.add("a", [1, 2, 3])
    with pytest.raises(RuntimeError, match="illegal memory"):
        runs.step()
