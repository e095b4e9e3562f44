"""Which graphs have given what was recorded for their trials (``cuda.trials``), and which trials
are under way on the device.

A trial can be launched long before anybody asks what it gave. Those of the graphs that a request
waits for are launched behind the last copy of its model: the device runs them when that has
arrived, and the host has not waited for anything::

    host     order the last part | launch trials | wait for it | look at what the prompt's gave, launch the prompt
    device   [ last copies ............................. )[ prompt's trial )[ decode step's )[ prompt ... )
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from pilotlight.engine.cuda.fitting import named
from pilotlight.engine.cuda.graphs import StageSteps
from pilotlight.engine.cuda.trials import HOST_ROWS, digest_of
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.library import NativeError


class Told:
    """Values on their way from a device to the host's memory, or there already."""

    def __init__(self, values: Tensor) -> None:
        """Begins to copy; the values may be overwritten behind that on the device's stream."""
        on_device = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_device)
        self._values.copy_(values, non_blocking=on_device)
        self._there: torch.cuda.Event | None = None
        if on_device:
            self._there = torch.cuda.Event()
            self._there.record()

    def wait(self) -> Tensor:
        """The values, when they are there."""
        if self._there is not None:
            self._there.synchronize()
        return self._values


class TrialUnderWay:
    """A trial that was launched."""

    def __init__(self, steps: StageSteps, size: int, launch: Callable[[int], None]) -> None:
        """Launches it. Waits for the device only where there are more than ``HOST_ROWS`` rows of
        logits or hidden states, whose digest is computed there.

        Args:
            steps: the stage's.
            size: of the trial.
            launch: runs what is proved, on the inputs that are there.
        """
        self._name = named(steps.kind_of(size))
        self._output: Told | None = None
        with steps.trial_inputs(size):
            launch(size)
            output = steps.output(size)
            if len(output) <= HOST_ROWS:
                self._output = Told(output)
            else:
                self._digest = digest_of(output)

    def require(self, recorded: str, what: str) -> None:
        """Waits for what it gave.

        Args:
            recorded: the digest that it has to have.
            what: is proved, as a message says it.

        Raises:
            RestoreFailed: it has another one.
        """
        if self._output is not None:
            self._digest, self._output = digest_of(self._output.wait()), None
        if self._digest != recorded:
            raise RestoreFailed(
                f"{what} of {self._name} gave {self._digest[:16]} for its trial, "
                f"and {recorded[:16]} was recorded"
            )


class Proofs:
    """Of a stage's graphs. For the thread that runs steps; ``proved`` for any."""

    def __init__(self, recorded: Mapping[int, str]) -> None:
        """Nothing is proved yet.

        Args:
            recorded: the digest of each size's trial.
        """
        self._recorded = recorded
        self._under_way: dict[int, TrialUnderWay] = {}
        self.proved: set[int] = set()
        """Sizes."""

    def ahead(self, steps: StageSteps, sizes: Iterable[int], launch: Callable[[int], None]) -> None:
        """Launches trials whose graphs are ready, each once, as far as that waits for nothing.

        Raises:
            RestoreFailed: the driver refuses a graph.
        """
        try:
            for size in sizes:
                known = size in self.proved or size in self._under_way
                if not known and len(steps.output(size)) <= HOST_ROWS:
                    self._under_way[size] = TrialUnderWay(steps, size, launch)
        except NativeError as error:
            raise RestoreFailed(f"the device refuses restored graphs: {error}") from error

    def require(self, steps: StageSteps, size: int, launch: Callable[[int], None]) -> None:
        """Looks at what a trial gave, after launching it if that is yet to be done.

        Raises:
            RestoreFailed: it is not what was recorded.
        """
        trial = self._under_way.pop(size, None) or TrialUnderWay(steps, size, launch)
        trial.require(self._recorded[size], "the graph")
        self.proved.add(size)
