"""Steps, captured once for each number of rows and layer range, and replayed.

A plain decode step of n rows runs as the next size of ``SIZES``; the rows beyond are nobody's: they read nothing of the cache and store
nothing. One short prompt alone runs padded the same way, see ``cuda.prompts``. The first step of a kind runs eagerly, which loads its
kernels; the second is captured.

A captured step reads and writes memory at addresses that follow from the model alone: parameters, KV, inputs and scratch in their places
of the slot, what it takes for itself (intermediate results, logits, cuBLAS's workspace) in the slot's graph pool, in the order of the
captures. So KV that grows or shrinks in place leaves every graph valid, and so does a range that is joined by others: nothing moves. The
longer range has graphs of its own, captured as it is used.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pilotlight.engine.cuda.pools import run_in
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.faults import out_of_memory
from pilotlight.engine.watching import compiling
from pilotlight.policy.types import Stage

SIZES = (1, 2, 4, *range(8, 257, 8))
"""Rows of captured decode steps."""
CAPTURES = 2
"""Times that a capture is tried, if there is no memory for it."""


def size_for(rows: int) -> int | None:
    """The least size that holds so many rows; None beyond the largest."""
    index = bisect_left(SIZES, rows)
    return SIZES[index] if index < len(SIZES) else None


@dataclass(frozen=True, slots=True)
class Kind:
    """Steps that one graph runs."""

    layers: Stage
    rows: int
    """Padding included."""
    prompt: bool = False
    """The rows are one prompt's; otherwise each is somebody's next token."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


class Graphs:
    """Captured steps of one stage. All write their logits to the same place: only those of the last step are valid."""

    def __init__(self, device: torch.device, scratch: Scratch, *, keep: bool = False) -> None:
        """Captures nothing yet.

        Args:
            device: where the steps run.
            scratch: the slot's. Its memory for graphs is this object's from now on.
            keep: graphs can be written down; takes memory of the host.
        """
        self._scratch = scratch
        self._keep = keep
        self._stream = torch.cuda.Stream(device)
        self._captured: dict[Kind, _Captured] = {}
        self._seen: set[Kind] = set()
        self._eager_only: set[Kind] = set()
        """There was no memory to capture them."""
        self._logits: Tensor | None = None

    @property
    def captured(self) -> dict[Kind, torch.cuda.CUDAGraph]:
        """What there is, in the order in which it was captured."""
        return {kind: captured.graph for kind, captured in self._captured.items()}

    @property
    def sequence(self) -> tuple[int, int]:
        """Of the graph pool; see ``TorchMemory.sequence``."""
        return self._scratch.graphs.sequence

    def logits(self, rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Where captured steps leave their logits: [rows, vocab_size], of the most rows of any step."""
        if self._logits is None:
            with self._scratch.graphs.use():
                self._logits = torch.empty(rows, vocab_size, dtype=dtype, device=self._stream.device)
        return self._logits

    def run(self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]) -> Tensor:
        """Runs a step whose inputs are in place.

        Args:
            kind: of the step.
            step: launches it, on inputs that always lie in the same places.
            output: where a captured one leaves what it gives, always the same place.

        Returns:
            What it gave, valid until the next run.
        """
        captured = self._captured.get(kind)
        if captured is None:
            captured = self._capture_if_seen(kind, step, output)
        if captured is None:
            return run_in(self._scratch.eager, step)
        captured.graph.replay()
        return captured.output

    def _capture_if_seen(self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]) -> _Captured | None:
        """Captures a kind that comes for the second time; None where it is to run eagerly."""
        if kind in self._eager_only:
            return None
        if kind not in self._seen:
            self._seen.add(kind)
            return None
        for left in reversed(range(CAPTURES)):
            try:
                with compiling():
                    captured = self._captured[kind] = self._capture(step, output())
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            else:
                return captured
            if left:
                # Eager steps may have left what is missing.
                self._scratch.eager.trim()
        self._eager_only.add(kind)
        return None

    def _capture(self, step: Callable[[], Tensor], output: Tensor) -> _Captured:
        graph = torch.cuda.CUDAGraph(keep_graph=self._keep)
        # Not ``torch.cuda.graph``: that collects garbage and empties torch's cache each time.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        _forget_workspaces()
        with self._scratch.graphs.selected(), torch.cuda.stream(self._stream):
            graph.capture_begin(cast("Any", self._scratch.graphs.id), capture_error_mode="thread_local")
            try:
                output.copy_(step())
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                graph.reset()
                raise
            graph.capture_end()
            _forget_workspaces()
        return _Captured(graph, output)

    def close(self) -> None:
        """Gives the graphs' memory back; none of them may run any more."""
        # By its graph alone: a name for what was captured would keep its output, and so the pool, until this method ends.
        for graph in self.captured.values():
            graph.reset()
        self._captured.clear()
        self._logits = None
        self._scratch.graphs.close()


def _forget_workspaces() -> None:
    """Has cuBLAS ask for its workspace anew: within a capture it comes from the graph pool then, and is free for the next capture.

    There is no public way; torch's own compiler does the same around its captures.
    """
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
