"""Graphs captured in this process, of what comes again.

The first step of a kind runs eagerly, which loads its kernels; before the second one runs, it is
captured.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from pilotlight.engine.cuda.graphs import GraphStep, Kind
from pilotlight.engine.cuda.pools import clear_cublas_workspaces
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.faults import out_of_memory
from pilotlight.engine.watching import compiling

CAPTURES = 2
"""Times that a capture is tried, if there is no memory for it."""


@cache
def keep_generator_memory(device: torch.device) -> torch.cuda.CUDAGraph:
    """Makes torch keep the words of its generator that every graph needs: a graph of nothing, which
    is never replayed and stays.

    torch allocates them outside all pools when a capture begins and no other graph is there. On a
    full device that fails, and ends the process: the graph cannot be destroyed then.
    """
    word, stream = torch.zeros(1, device=device), torch.cuda.Stream(device)
    word.add_(1)  # Its kernel is loaded.
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        word.add_(1)
        graph.capture_end()
    return graph


class CaptureOnSecondUse:
    """A ``GraphSupplier``: captures a kind when it comes for the second time."""

    def __init__(self, device: torch.device, scratch: Scratch, *, keep: bool = False) -> None:
        """Captures nothing yet.

        Args:
            device: where the steps run.
            scratch: the slot's; graphs take its memory for graphs.
            keep: graphs can be written down; takes memory of the host.
        """
        self._scratch = scratch
        self._keep = keep
        self._stream = torch.cuda.Stream(device)
        self._seen: set[Kind] = set()
        self._eager_only: set[Kind] = set()
        """There was no memory to capture them."""

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        """See ``GraphSupplier.supply``."""
        if kind in self._eager_only:
            return None
        if kind not in self._seen:
            self._seen.add(kind)
            return None
        for left in reversed(range(CAPTURES)):
            try:
                with compiling():
                    return self._capture(step, output())
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            if left:
                # Eager steps may have left what is missing.
                self._scratch.eager.trim()
        self._eager_only.add(kind)
        return None

    def expect(self, tokens: int) -> bool:
        """See ``GraphSupplier.expect``: nothing is captured before it runs."""
        return False

    def extended(self) -> None:
        """See ``GraphSupplier.extended``: nothing is captured before it runs."""

    def arriving(self, requests: int) -> None:
        """See ``GraphSupplier.arriving``: no graph is there before it has run."""

    def sampled(self) -> None:
        """See ``GraphSupplier.sampled``: nothing is made beside steps."""

    def close(self) -> None:
        """See ``GraphSupplier.close``: graphs hold their memory themselves."""

    def _capture(self, step: Callable[[], Tensor], output: Tensor) -> GraphStep:
        graph = torch.cuda.CUDAGraph(keep_graph=self._keep)
        # Not ``torch.cuda.graph``: that collects garbage and empties torch's cache each time.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        # cuBLAS asks for its workspace anew: within the capture it comes from the graph pool, and
        # is free for the next capture.
        clear_cublas_workspaces()
        with self._scratch.graphs.selected(), torch.cuda.stream(self._stream):
            graph.capture_begin(
                cast("Any", self._scratch.graphs.id), capture_error_mode="thread_local"
            )
            try:
                output.copy_(step())
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                graph.reset()
                raise
            graph.capture_end()
            clear_cublas_workspaces()
        return GraphStep(graph, output)
