"""Recorders for folders of recordings: one that keeps whole images, and one whose memory falls out
otherwise than in the processes that it is compared with.
"""

from collections.abc import Collection, Sequence
from typing import cast

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.graphs import StageSteps
from pilotlight.engine.cuda.pools import TorchPool
from pilotlight.engine.cuda.tracing import TracingRecorder
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.graphs import GraphDump, dump_graphs
from pilotlight.native.pointers import RecordedAllocation

EXTRA_BYTES = 2 << 20


class Whole(TracingRecorder):
    """Keeps what it records with all kernels of their images, besides."""

    whole = b""

    def _dump(self, memory: StageMemory, steps: StageSteps, sizes: Sequence[int]) -> GraphDump:
        made = super()._dump(memory, steps, sizes)
        arena = cast("CudaArena", memory.arena).native_arena
        self.whole = dump_graphs(self._handles(steps, sizes), arena, prune=False).archive
        return made


class Shifted(TracingRecorder):
    """Of a process that takes memory of the graph pool besides, which no graph knows: two segments
    that lay at one address one after the other, or side by side, then do not. The extra memory is
    not written down, so that allocations have the numbers that others give them.
    """

    extra: Collection[tuple[int, int]] = ()
    """Where it lies, and within which capture it was taken, from 1 on; 0: before all."""

    def _allocations(self, memory: StageMemory) -> list[RecordedAllocation]:
        found = super()._allocations(memory)
        return [one for one in found if (one.address, one.taken) not in self.extra]


class Shifting(Shifted):
    """Takes it itself before each capture, where torch takes the rest."""

    def _captured(self, steps: StageSteps, size: int) -> str:
        assert self._scratch is not None
        assert isinstance(self._scratch.graphs, TorchPool)
        address = self._scratch.graphs.memory.take(EXTRA_BYTES)
        self.extra = {*self.extra, (address, len(self._counts))}
        return super()._captured(steps, size)
