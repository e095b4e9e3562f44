"""What is done for later steps while the stage has nothing to do: graphs of all sizes are captured
one by one, and kernels made ready that no trial has.

A size that is met for the first time runs kernel by kernel, and the second time it is captured
first: 25 to 30 ms of the host on an H200, in which every stream waits. Where many answers end
together, a batch goes through sizes that it never had. So trials of all kinds run (``cuda.trials``,
which harm no request) while there are none: the first of a kind loads its kernels, the second is
captured.

A trial is of streams alone, or of a prompt alone. Where both share a step, the streams' attention
is a kernel of its own, and it takes a second to compile: under load, as it comes up there, that is
a second of all streams, and of the row behind it.
"""

from collections import deque
from collections.abc import Callable, Iterable
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
    """What a stage can do for later. ``CaptureAhead`` captures; ``KernelsAhead`` compiles;
    ``WholePrompts`` has cuDNN prepare for lengths.
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


class KernelsAhead:
    """Has each of some kinds of a kernel launched once, on nothing of any request."""

    def __init__(self, rehearse: Callable[[int], None], kinds: Iterable[int]) -> None:
        """Launches nothing yet.

        Args:
            rehearse: launches one kind.
            kinds: all of them.
        """
        self._rehearse, self._left = rehearse, deque(kinds)

    @property
    def is_over(self) -> bool:
        """See ``Prepares``."""
        return not self._left

    def one(self) -> None:
        """See ``Prepares``: one kind."""
        if not self._left:
            return
        kind = self._left.popleft()
        try:
            self._rehearse(kind)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            # What is first used then may find some.
            log.warning("nothing rehearsed", action="not_rehearsed", why=str(error))


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
