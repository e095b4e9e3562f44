"""Graphs of all sizes, captured one by one while the stage has nothing to do.

A size that is met for the first time runs kernel by kernel, and the second time it is captured
first: 25 to 30 ms of the host on an H200, in which every stream waits. Where many answers end
together, a batch goes through sizes that it never had. So trials of all kinds run (``cuda.trials``,
which harm no request) while there are none: the first of a kind loads its kernels, the second is
captured.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from pilotlight.engine.cuda.graphs import SIZES, GraphSet, StageSteps
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.faults import out_of_memory
from pilotlight.policy.graphs.restoring import prompt_size

log = structlog.get_logger()

TRIALS = 2
"""Of a kind: eagerly, and captured."""
LEAST_SPARE_BYTES = 3 << 29
"""Of what is not for stages, for steps that run eagerly, kernels and libraries: graphs lie in the
driver's memory, some 5 MiB each, and are no stage's."""


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

    def __init__(self, steps: StageSteps, graphs: GraphSet, spare_bytes: Callable[[], int]) -> None:
        """Captures nothing yet.

        Args:
            steps: the stage's, of the range whose graphs are wanted.
            graphs: the stage's.
            spare_bytes: says what the device has now that is not for stages.
        """
        self._steps, self._graphs, self._spare_bytes = steps, graphs, spare_bytes
        sizes = (*SIZES, *map(prompt_size, LENGTHS)) if steps.has_trials else ()
        self._left = deque(size for size in sizes for _ in range(TRIALS))

    @property
    def is_over(self) -> bool:
        """See ``Prepares``; where too little memory is to spare, there may be more later."""
        return not self._left or self._spare_bytes() < LEAST_SPARE_BYTES

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
