"""Steps of fixed shapes as graphs: replayed where there is one, run eagerly where there is none.

A plain decode step of n rows runs as the next size of ``SIZES``. The rows beyond n are padding:
they read nothing of the cache and store nothing. One short prompt alone runs padded the same way,
see ``cuda.prompts``. Where a graph comes from is the supplier's concern: ``cuda.capture`` captures
it in this process.

A graph reads and writes memory at addresses that follow from the model alone: parameters, KV,
inputs and scratch in their places of the slot, what it takes for itself (intermediate results,
logits, cuBLAS's workspace) in the slot's graph pool, in the order of the captures. So KV that grows
or shrinks in place leaves every graph valid, and so does a range that is joined by others: nothing
moves. The longer range has graphs of its own, supplied as it is used.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pilotlight.engine.cuda.pools import run_in
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.model import Stage

SIZES = (1, 2, 4, *range(8, 257, 8))
"""Rows of captured decode steps."""


def size_for(rows: int) -> int | None:
    """The least size that holds ``rows`` rows; None beyond the largest."""
    index = bisect_left(SIZES, rows)
    return SIZES[index] if index < len(SIZES) else None


@dataclass(frozen=True, slots=True)
class Kind:
    """Steps that one graph runs."""

    layers: Stage
    rows: int
    """Padding included."""
    prompt: bool = False
    """The rows are one prompt's; otherwise each is the next token of a request."""

    @property
    def size(self) -> int:
        """What graphs of the same layers are known by."""
        return prompt_size(self.rows) if self.prompt else self.rows


class Replayable(Protocol):
    """A graph that is ready on the device. ``torch.cuda.CUDAGraph`` is one."""

    def replay(self) -> None:
        """Launches it."""
        ...

    def reset(self) -> None:
        """Gives its memory back; it is never launched again."""
        ...


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step as a graph, and where it leaves what it gives."""

    graph: Replayable
    output: Tensor
    once: bool = False
    """For this step alone: the next one of its kind asks again."""


class GraphSupplier(Protocol):
    """Where graphs come from. ``cuda.capture.CaptureOnSecondUse`` captures them."""

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        """The graph of a kind that has none yet, before a step of it runs.

        The supplier keeps no reference to it.

        Args:
            kind: of the step.
            step: launches it, on inputs that always lie in the same places.
            output: where the graph leaves what it gives, always the same place.

        Returns:
            None where this step is to run eagerly. The next step of the kind asks again.
        """
        ...

    def expect(self, tokens: int) -> bool:
        """A request has come whose prompt has so many tokens: its steps come next. Asked again of
        the same one, nothing changes.

        Returns:
            Its prompt has a graph, of all layers: it is faster to run it when all parts are there
            than piece by piece, as they come.
        """
        ...

    def extended(self) -> None:
        """The stage has memory for a longer range, which it does not run yet."""
        ...

    def arriving(self, requests: int) -> None:
        """The last part of the stage is on its way, and this thread's work on the device waits for
        it there: what of the first steps can be launched behind it is launched.

        Args:
            requests: those that wait for it. The prompts of several are no steps of one graph.

        Raises:
            RestoreFailed: the driver refuses a graph.
        """
        ...

    def sampled(self) -> None:
        """All of a step is launched, what samples its tokens with it: the host waits for the device
        next, or has nothing to do.
        """
        ...

    def close(self) -> None:
        """Gives up what it holds in the slot's memory for graphs. None of them runs any more."""
        ...


class StageSteps(Protocol):
    """Captured steps of one range of a stage's layers. ``cuda.steps.RangeSteps`` are some.

    A size is rows of a decode step, or ``prompt_size`` of those of one prompt alone.
    """

    @property
    def layers(self) -> Stage:
        """The range."""
        ...

    @property
    def places(self) -> Mapping[str, int]:
        """Addresses of what they read and write beside parameters, KV and the graph pool."""
        ...

    def logits(self) -> Tensor:
        """Where the whole model's leave theirs: what the graph pool begins with, whatever the
        range.
        """
        ...

    @property
    def has_trials(self) -> bool:
        """Trials can be run of them (``cuda.trials``), as soon as they are ``present``."""
        ...

    @property
    def present(self) -> bool:
        """The stage has memory for all of the range."""
        ...

    def trial_inputs(self, size: int) -> AbstractContextManager[None]:
        """Within it, a trial is what a step of a size runs."""
        ...

    def trial(self, size: int) -> Tensor:
        """Runs a trial as any other step; its logits, or hidden states where the range has no head,
        valid until the next run.
        """
        ...

    def kind_of(self, size: int) -> Kind:
        """The range's step of a size."""
        ...

    def output(self, size: int) -> Tensor:
        """Where captured steps of a size leave what their trial gives."""
        ...


class HasSteps(Protocol):
    """A stage that has captured steps. ``cuda.runner.CudaRangeRunner`` runs them."""

    def steps_of(self, layers: Stage | None = None) -> StageSteps:
        """Those of a range; None: the whole model's."""
        ...


class GraphSet:
    """The graphs of one stage.

    All write their logits to the same place: only those of the last step are valid.
    """

    def __init__(self, device: torch.device, scratch: Scratch, supplier: GraphSupplier) -> None:
        """Has no graph yet.

        Args:
            device: where the steps run.
            scratch: the slot's. Its memory for graphs is this object's from now on.
            supplier: gives the graphs, in that memory.
        """
        self._device = device
        self._scratch = scratch
        self._supplier = supplier
        self._steps: dict[Kind, GraphStep] = {}
        self.uses: dict[Kind, int] = {}
        """Steps that ran, of each kind."""
        self._logits: Tensor | None = None

    @property
    def graphs(self) -> Mapping[Kind, Replayable]:
        """What there is, in the order in which it was supplied."""
        return {kind: step.graph for kind, step in self._steps.items()}

    @property
    def sequence(self) -> tuple[int, int]:
        """Of the graph pool; see ``TorchMemory.sequence``."""
        return self._scratch.graphs.sequence

    def logits(self, rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Where graphs leave their logits: [rows, vocab_size], of the most rows of any step."""
        if self._logits is None:
            with self._scratch.graphs.use():
                self._logits = torch.empty(rows, vocab_size, dtype=dtype, device=self._device)
        return self._logits

    def run(self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]) -> Tensor:
        """Runs a step whose inputs are in place. For the arguments see ``GraphSupplier.supply``.

        Returns:
            What it gave, valid until the next run.
        """
        self.uses[kind] = self.uses.get(kind, 0) + 1
        known = self._steps.get(kind)
        if known is None:
            known = self._supplier.supply(kind, step, output)
            if known is None:
                return run_in(self._scratch.eager, step)
            if not known.once:
                self._steps[kind] = known
        known.graph.replay()
        return known.output

    def close(self) -> None:
        """Gives the graphs' memory back; none of them may run any more."""
        # By its graph alone: a name for a step would keep its output, and so the pool, until this
        # method ends.
        for graph in self.graphs.values():
            graph.reset()
        self._supplier.close()
        self._steps.clear()
        self._logits = None
        self._scratch.graphs.close()
