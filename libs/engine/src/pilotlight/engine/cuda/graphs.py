"""Plain decode steps, captured once for each number of rows and layer range, and replayed.

A step of n rows runs as the next size of ``SIZES``; the rows beyond are nobody's: they read nothing of the cache and store nothing.
The first step of a size runs eagerly, which loads its kernels; the second is captured.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.policy.types import Stage

SIZES = (1, 2, 4, *range(8, 257, 8))
"""Rows of captured steps."""


def size_for(rows: int) -> int | None:
    """The least size that holds so many rows; None beyond the largest."""
    index = bisect_left(SIZES, rows)
    return SIZES[index] if index < len(SIZES) else None


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


class Graphs:
    """Captured steps of one stage. Their memory is one pool: only the output of the last one replayed is valid."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._captured: dict[tuple[Stage, int], _Captured] = {}
        self._seen: set[tuple[Stage, int]] = set()

    def run(self, layers: Stage, size: int, step: Callable[[], Tensor]) -> Tensor:
        """Runs a step whose inputs are in place.

        Args:
            layers: the range.
            size: rows, one of ``SIZES``.
            step: launches it, on inputs that always lie in the same places.

        Returns:
            What it gave, valid until the next run.
        """
        key = layers, size
        captured = self._captured.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen.add(key)
                return step()
            captured = self._captured[key] = self._capture(step)
        captured.graph.replay()
        return captured.output

    def _capture(self, step: Callable[[], Tensor]) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # Not ``torch.cuda.graph``: that collects garbage and empties torch's cache each time.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = step()
            finally:
                graph.capture_end()
        return _Captured(graph, output)
