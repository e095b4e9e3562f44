"""An engine child whose device fails on demand: ``python -m faulty_child`` in the place of
``pilotlight.worker.engine_child.child``.

A prompt of ``NO_ROOM_TOKENS`` wants more memory than there is; one of ``ILLEGAL_TOKENS`` makes a
kernel write where nothing is mapped. On a GPU both really happen; on cores what CUDA would say is
raised. A prompt of ``ENDLESS_TOKENS`` waits for ever for what never comes; one of ``SLOW_TOKENS``
waits ``SLOW_S``.
"""

import sys
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pilotlight.engine import engine as engine_module
from pilotlight.engine.core.batch import Batch
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Stage
from pilotlight.worker.engine_child import child

NO_ROOM_TOKENS, ILLEGAL_TOKENS, ENDLESS_TOKENS, SLOW_TOKENS = 41, 43, 47, 53
SLOW_S = 2.0
FAR_TOO_MANY_BYTES = 1 << 46


class FaultyRunner:
    """See ``compute.Runner``."""

    def __init__(self, runner: Any, arena: Arena) -> None:
        self._runner = runner
        self._arena = arena

    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        longest = max(segment.count for segment in batch.segments)
        if longest == NO_ROOM_TOKENS:
            self._want_too_much()
        if longest == ILLEGAL_TOKENS:
            self._write_nowhere()
        if longest in (ENDLESS_TOKENS, SLOW_TOKENS):
            threading.Event().wait(SLOW_S if longest == SLOW_TOKENS else None)
        return self._runner.run(batch, inputs, layers)

    def _want_too_much(self) -> None:
        if self._arena.device.type == "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 TiB.")
        torch.empty(FAR_TOO_MANY_BYTES, dtype=torch.uint8, device=self._arena.device)

    def _write_nowhere(self) -> None:
        if self._arena.device.type == "cpu":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        # The last slot has addresses, and no memory.
        self._arena.tensor(15 * self._arena.slot_bytes, (4096,), torch.float32).fill_(1.0)
        torch.cuda.synchronize(self._arena.device)


class FaultyEngine(engine_module.Engine):
    """The engine, with such a runner for each stage."""

    def begin_load(self, instance_id: InstanceId, *arguments: Any, **options: Any) -> Any:
        room = super().begin_load(instance_id, *arguments, **options)
        resident = self._stages[instance_id]
        resident.compute = replace(
            resident.compute, runner=FaultyRunner(resident.compute.runner, self.arena)
        )
        return room


if __name__ == "__main__":
    engine_module.Engine = FaultyEngine
    sys.exit(child.main(sys.argv[1:]))
