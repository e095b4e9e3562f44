"""Kernels for restored graphs without images of theirs, as MEDUSA has them (section 5): the first
layer is run and captured for each size, which makes the libraries load their modules, and the
driver names all kernels of those.

What the first layer does not trigger comes from the archive's images, and what has one name twice.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice
from pilotlight.engine.cuda.graphs import SIZES, GraphSet, HasSteps
from pilotlight.engine.cuda.indirect import Anywhere
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.native.handles import triggered_kernels
from pilotlight.policy.materialized import GraphLayout
from pilotlight.policy.model import Stage

FIRST = Stage(0, 1)


class RunsLayers(Protocol):
    """Runs some of a stage's layers. ``cuda.runner.CudaRangeRunner`` does."""

    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """See ``RangeRunner.run``."""
        ...


class TriggeredGraphs(RestoredGraphs):
    """Restored graphs that wait until the first layer was run."""

    def __init__(
        self,
        recorded: GraphLayout,
        read: Callable[[], bytes],
        *,
        anywhere: bool = False,
        sizes: Sequence[int] = SIZES,
        rest_s: float = 0.0,
        uses: Mapping[int, int] | None = None,
    ) -> None:
        """Does nothing yet.

        Args:
            recorded: see ``RestoredGraphs``.
            read: see ``RestoredGraphs``.
            anywhere: addresses are written anew (``cuda.indirect``).
            sizes: rows of the steps that are run.
            rest_s: see ``RestoredGraphs``.
            uses: see ``RestoredGraphs``.
        """
        self._sizes = tuple(sizes)
        self._gate = threading.Event()
        self._runner: RunsLayers | None = None
        self._set: GraphSet | None = None

        def when_triggered() -> bytes:
            self._gate.wait()
            return read()

        way = Anywhere(self._kernels)
        capture = partial(CaptureOnSecondUse, keep=True)
        if anywhere:
            super().__init__(
                recorded,
                when_triggered,
                open_archive=way.open,
                fit=way.fit,
                capture=capture,
                rest_s=rest_s,
                uses=uses,
            )
        else:
            in_place = partial(ArchiveOnDevice, kernels=self._kernels)
            super().__init__(
                recorded,
                when_triggered,
                open_archive=in_place,
                capture=capture,
                rest_s=rest_s,
                uses=uses,
            )

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        # What has a stage's steps runs its layers, too.
        self._runner, self._set = cast("RunsLayers", stage), graphs
        super().begin(stage, graphs)

    def trigger(self) -> None:
        """Runs the first layer eagerly and captures it, for each size; its parts and those before
        it are in place. Other graphs are made from then on.
        """
        assert self._runner is not None
        try:
            for rows in self._sizes:
                segments = tuple(Segment(0, 1, (0,), wants_logits=True) for _ in range(rows))
                for _ in range(2):
                    self._runner.run(Batch(segments), torch.zeros(rows, dtype=torch.int64), FIRST)
        finally:
            self._gate.set()

    def close(self) -> None:
        """See ``GraphSupplier``."""
        self._gate.set()
        super().close()

    def _kernels(self) -> dict[str, list[int]]:
        assert self._set is not None
        graphs = [graph for kind, graph in self._set.graphs.items() if kind.layers == FIRST]
        return triggered_kernels(
            graph.raw_cuda_graph() for graph in graphs if isinstance(graph, torch.cuda.CUDAGraph)
        )
