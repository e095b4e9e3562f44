"""Graphs of all sizes, captured one by one while the stage has nothing to do.

A size that is met for the first time runs kernel by kernel, and the second time it is captured
first: 25 to 30 ms of the host on an H200, in which every stream waits. Where many answers end
together, a batch goes through sizes that it never had. So trials of all kinds run (``cuda.trials``,
which harm no request) while there are none: the first of a kind loads its kernels, the second is
captured.
"""

from collections import deque
from typing import Protocol

import structlog

from pilotlight.engine.cuda.graphs import SIZES, GraphSet, StageSteps
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.faults import out_of_memory
from pilotlight.policy.graphs.restoring import prompt_size

log = structlog.get_logger()

TRIALS = 2
"""Of a kind: eagerly, and captured."""


class Prepares(Protocol):
    """What a stage can do for later. ``CaptureAhead`` captures; ``WholePrompts`` has cuDNN prepare
    for lengths.
    """

    @property
    def is_over(self) -> bool:
        """There is nothing to do now."""
        ...

    def one(self) -> None:
        """Does some of it. The stage has all of its parameters, and runs nothing.

        Raises:
            RuntimeError: of a kind that the stage's steps would raise, too; never that there is no
                memory.
        """
        ...


class CaptureAhead:
    """Captures what a stage has no graph of; the least sizes first."""

    def __init__(self, steps: StageSteps, graphs: GraphSet) -> None:
        """Captures nothing yet.

        Args:
            steps: the stage's, of the range whose graphs are wanted.
            graphs: the stage's.
        """
        self._steps, self._graphs = steps, graphs
        sizes = (*SIZES, *map(prompt_size, LENGTHS)) if steps.has_trials else ()
        self._left = deque(size for size in sizes for _ in range(TRIALS))

    @property
    def is_over(self) -> bool:
        """See ``Prepares``."""
        return not self._left

    def one(self) -> None:
        """See ``Prepares``: one step, of the first size that has no graph."""
        while self._left:
            size = self._left.popleft()
            if self._steps.kind_of(size) in self._graphs.graphs:
                continue
            try:
                self._steps.trial(size)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                log.warning("no memory for graphs ahead", action="not_captured", why=str(error))
                self._left.clear()
            return
