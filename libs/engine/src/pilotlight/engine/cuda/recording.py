"""Records a stage's graphs, so that another process makes them again (MEDUSA, section 4;
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
from pilotlight.engine.cuda.fitting import named, places_of
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice
from pilotlight.engine.cuda.graphs import SIZES, GraphSet, GraphSupplier, HasSteps, StageSteps
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.cuda.restored import POISON
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.graphs import GraphDump
from pilotlight.native.library import NativeError, Nowhere
from pilotlight.native.proving import dump_proved
from pilotlight.policy.graphs.restoring import PROMPTS, prompt_size
from pilotlight.policy.materialized import MAX_GRAPHS_BYTES, GraphLayout, GraphPlace, Trial
from pilotlight.policy.model import Stage

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

    def __init__(self, sizes: Sequence[int] = SIZES, lengths: Sequence[int] = LENGTHS) -> None:
        """Records nothing yet.

        Args:
            sizes: rows of the decode steps to record.
            lengths: rows of the prompts.
        """
        self._sizes = tuple(sorted(sizes))
        self._lengths = tuple(sorted(lengths))
        self._prompts_refused = ""
        self._memory: StageMemory | None = None
        self._scratch: Scratch | None = None
        self._stage: HasSteps | None = None
        self._graphs: GraphSet | None = None

    def supplier(self, memory: StageMemory, scratch: Scratch) -> GraphSupplier:
        """See ``GraphPlan``."""
        self._memory, self._scratch = memory, scratch
        return CaptureOnSecondUse(memory.arena.device, scratch, keep=True)

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        self._stage, self._graphs = stage, graphs

    def record(self, layers: Stage | None = None) -> RecordedGraphs:
        """Captures all sizes, proves them, and writes them down. Every part of the stage is in
        place, and no request is.

        Ranges come behind the whole model: their graphs then write where its own do, and a stage
        that becomes whole needs no more of the graph pool than it.

        Args:
            layers: of the range; None: the whole model.

        Raises:
            NotRecorded: by the name of what stands in the way.
        """
        stage, memory, scratch = self._stage, self._memory, self._scratch
        if stage is None or memory is None or scratch is None:
            raise NotRecorded("steps", "no steps of this model are captured")
        steps = stage.steps_of(layers)
        if not steps.has_trials:
            raise NotRecorded("steps", "the steps of this model have no trials")
        if not stage.steps_of().present:
            raise NotRecorded("stage", "graphs are recorded in stages of whole models alone")
        if self._graphs is not None and any(
            kind.layers == steps.layers for kind in self._graphs.graphs
        ):
            raise NotRecorded("used", "steps of these layers were captured before")
        self._prompts_refused = ""
        # The largest first: the others then fit into what it leaves of the pool.
        prompts = self._prompts(steps, tuple(map(prompt_size, reversed(self._lengths))))
        found = {rows: self._captured(steps, rows) for rows in reversed(self._sizes)}
        pool_bytes = scratch.graphs.mapped_bytes
        for rows in self._sizes:
            self._require_independent(steps, memory, pool_bytes, rows, found[rows])
        prompts = self._independent(steps, memory, pool_bytes, prompts)
        try:
            dump = self._dump(memory, steps, (*self._sizes, *prompts))
        except NotRecorded as refused:
            if not prompts:
                raise
            self._leave_out(refused, *prompts)
            prompts = {}
            dump = self._dump(memory, steps, self._sizes)
        facts = {"start": steps.layers.start, "stop": steps.layers.stop, **_facts(dump)}
        log.info("graphs recorded", action="graphs_recorded", pool_bytes=pool_bytes, **facts)
        return RecordedGraphs(
            GraphLayout(
                slot=memory.slot_number,
                places=tuple(
                    GraphPlace(name=name, address=address)
                    for name, address in sorted(places_of(steps).items())
                ),
                pool_bytes=pool_bytes,
                trials=tuple(Trial(rows=rows, digest=found[rows]) for rows in self._sizes),
                prompts=tuple(
                    Trial(rows=size - PROMPTS, digest=prompts[size]) for size in sorted(prompts)
                ),
                prompts_refused=self._prompts_refused,
            ),
            dump.archive,
        )

    def _captured(self, steps: StageSteps, size: int) -> str:
        """The digest of a size's trial. The first one runs eagerly, the second one as a graph."""
        eager = digest_of(steps.trial(size))
        graph = digest_of(steps.trial(size))
        kind = steps.kind_of(size)
        assert self._graphs is not None
        if kind not in self._graphs.graphs:
            raise NotRecorded("memory", f"there is no memory to capture {named(kind)}")
        if graph != eager:
            raise NotRecorded("varies", f"{named(kind)} give other bits as a graph than eagerly")
        return graph

    def _prompts(self, steps: StageSteps, sizes: Sequence[int]) -> dict[int, str]:
        """Digests of the prompts that can be recorded."""
        found: dict[int, str] = {}
        for size in sizes:
            try:
                found[size] = self._captured(steps, size)
            except NotRecorded as refused:
                self._leave_out(refused, size)
        return found

    def _require_independent(
        self, steps: StageSteps, memory: StageMemory, pool_bytes: int, size: int, found: str
    ) -> None:
        """Refuses a graph that needs what an earlier one left in the pool: MEDUSA's permanent
        buffers, of which none is saved.
        """
        memory.graph_pool_bytes(pool_bytes).fill_(POISON)
        if digest_of(steps.trial(size)) != found:
            name = named(steps.kind_of(size))
            raise NotRecorded("permanent", f"{name} need what lies in the graph pool")

    def _independent(
        self, steps: StageSteps, memory: StageMemory, pool_bytes: int, prompts: dict[int, str]
    ) -> dict[int, str]:
        """Those of the prompts that need nothing of the pool."""
        left: dict[int, str] = {}
        for size, found in prompts.items():
            try:
                self._require_independent(steps, memory, pool_bytes, size, found)
            except NotRecorded as refused:
                self._leave_out(refused, size)
            else:
                left[size] = found
        return left

    def _leave_out(self, refused: NotRecorded, *sizes: int) -> None:
        """Prompts are not recorded; the decode steps are."""
        self._prompts_refused = self._prompts_refused or refused.field
        log.warning(
            "prompts not recorded",
            action="prompts_not_recorded",
            field=refused.field,
            why=str(refused),
            rows=[size - PROMPTS for size in sizes],
        )

    def _dump(self, memory: StageMemory, steps: StageSteps, sizes: Sequence[int]) -> GraphDump:
        try:
            # The arena is a device's: nothing else has graphs.
            arena = cast("CudaArena", memory.arena)
            dump = dump_proved(
                self._handles(steps, sizes), arena.native_arena, arena.native.ordinal
            )
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
            elsewhere = sum(device.check(size) for size in sizes)
        except Nowhere as error:
            raise NotRecorded("addresses", str(error)) from error
        finally:
            device.close()
        log.info("addresses known", action="graph_addresses", elsewhere=elsewhere)
        return dump

    def _handles(self, steps: StageSteps, sizes: Sequence[int]) -> dict[int, int]:
        """The driver's, by size."""
        assert self._graphs is not None
        handles: dict[int, int] = {}
        for size in sizes:
            graph = self._graphs.graphs[steps.kind_of(size)]
            assert isinstance(graph, torch.cuda.CUDAGraph)
            handles[size] = graph.raw_cuda_graph()
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
