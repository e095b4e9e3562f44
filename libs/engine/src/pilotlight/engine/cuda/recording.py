"""Records a stage's decode graphs, so that another process makes them again (MEDUSA, section 4;
``cuda.restored``).

Everything that a graph knows by its address lies in the arena, at the same place in every process:
parameters are written down as they are. No buffer's contents are: what a graph finds in its pool
must not matter, which is proved here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import structlog
import torch

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice
from pilotlight.engine.cuda.graphs import SIZES, DecodeSteps, GraphSet, GraphSupplier
from pilotlight.engine.cuda.restored import POISON, places_of
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.graphs import GraphDump
from pilotlight.native.library import NativeError, Nowhere
from pilotlight.native.proving import dump_proved
from pilotlight.policy.materialized import MAX_GRAPHS_BYTES, GraphLayout, GraphPlace, Trial

log = structlog.get_logger()


class NotRecorded(Exception):
    """A stage's graphs cannot be restored in another process; ``field`` says why, by name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class RecordedGraphs:
    """What another process restores."""

    layout: GraphLayout
    archive: bytes


class GraphRecorder:
    """A ``GraphPlan`` that keeps what it takes to write graphs down.

    The process records images of kernels (``native.graphs.record_images``) since before its first.
    """

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        """``sizes``: rows of the steps to record."""
        self._sizes = tuple(sorted(sizes))
        self._memory: StageMemory | None = None
        self._scratch: Scratch | None = None
        self._steps: DecodeSteps | None = None
        self._graphs: GraphSet | None = None

    def supplier(self, memory: StageMemory, scratch: Scratch) -> GraphSupplier:
        """See ``GraphPlan``."""
        self._memory, self._scratch = memory, scratch
        return CaptureOnSecondUse(memory.arena.device, scratch, keep=True)

    def begin(self, steps: DecodeSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        self._steps, self._graphs = steps, graphs

    def record(self) -> RecordedGraphs:
        """Captures all sizes, proves them, and writes them down. Every part of the stage is in
        place, and no request is.

        Raises:
            NotRecorded: by the name of what stands in the way.
        """
        steps, memory, scratch = self._steps, self._memory, self._scratch
        if steps is None or memory is None or scratch is None or not steps.has_trials:
            raise NotRecorded(
                "steps", "no steps of this model are captured, or they have no trials"
            )
        if self._graphs is not None and self._graphs.graphs:
            raise NotRecorded("used", "steps of this stage were captured before")
        # The largest first: the others then fit into what it leaves of the pool.
        found = {rows: self._captured(steps, rows) for rows in reversed(self._sizes)}
        pool_bytes = scratch.graphs.mapped_bytes
        self._require_independent(steps, memory, pool_bytes, found)
        dump = self._dump(memory, steps)
        log.info("graphs recorded", action="graphs_recorded", pool_bytes=pool_bytes, **_facts(dump))
        return RecordedGraphs(
            GraphLayout(
                slot=memory.slot_number,
                places=tuple(
                    GraphPlace(name=name, address=address)
                    for name, address in sorted(places_of(steps).items())
                ),
                pool_bytes=pool_bytes,
                trials=tuple(Trial(rows=rows, digest=found[rows]) for rows in self._sizes),
            ),
            dump.archive,
        )

    def _captured(self, steps: DecodeSteps, rows: int) -> str:
        """The digest of a size's trial. The first one runs eagerly, the second one as a graph."""
        eager = digest_of(steps.trial(rows))
        graph = digest_of(steps.trial(rows))
        assert self._graphs is not None
        if steps.kind_of(rows) not in self._graphs.graphs:
            raise NotRecorded("memory", f"there is no memory to capture {rows} rows")
        if graph != eager:
            raise NotRecorded("varies", f"{rows} rows give other bits as a graph than eagerly")
        return graph

    def _require_independent(
        self, steps: DecodeSteps, memory: StageMemory, pool_bytes: int, found: dict[int, str]
    ) -> None:
        """Refuses graphs that need what an earlier one left in the pool: MEDUSA's permanent
        buffers, of which none is saved.
        """
        for rows in self._sizes:
            memory.graph_pool_bytes(pool_bytes).fill_(POISON)
            if digest_of(steps.trial(rows)) != found[rows]:
                raise NotRecorded("permanent", f"{rows} rows need what lies in the graph pool")

    def _dump(self, memory: StageMemory, steps: DecodeSteps) -> GraphDump:
        try:
            # The arena is a device's: nothing else has graphs.
            arena = cast("CudaArena", memory.arena)
            dump = dump_proved(self._handles(steps), arena.native_arena, arena.native.ordinal)
        except NativeError as error:
            raise NotRecorded("nodes", str(error)) from error
        if dump.addresses_outside:
            raise NotRecorded(
                "addresses", f"{dump.addresses_outside} addresses lie outside of the arena"
            )
        if len(dump.archive) > MAX_GRAPHS_BYTES:
            raise NotRecorded("size", f"the graphs have {len(dump.archive)} bytes")
        device = ArchiveOnDevice(memory, dump.archive)
        try:
            elsewhere = device.check()
        except Nowhere as error:
            raise NotRecorded("addresses", str(error)) from error
        finally:
            device.close()
        log.info("addresses known", action="graph_addresses", elsewhere=elsewhere)
        return dump

    def _handles(self, steps: DecodeSteps) -> dict[int, int]:
        """The driver's, by rows."""
        assert self._graphs is not None
        handles: dict[int, int] = {}
        for rows in self._sizes:
            graph = self._graphs.graphs[steps.kind_of(rows)]
            assert isinstance(graph, torch.cuda.CUDAGraph)
            handles[rows] = graph.raw_cuda_graph()
        return handles


def _facts(dump: GraphDump) -> dict[str, int]:
    return {
        "bytes": len(dump.archive),
        "nodes": dump.nodes,
        "kernels": dump.kernels,
        "images": dump.images,
        "image_bytes": dump.image_bytes,
        "images_whole": dump.images_whole,
        "params_unknown": dump.params_unknown,
        "addresses_inside": dump.addresses_inside,
    }
