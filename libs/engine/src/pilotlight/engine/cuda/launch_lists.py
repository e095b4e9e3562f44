"""Steps whose graph is still being made, launched kernel by kernel from what the graph is made of
(design 8).

A list has the kernels, parameters and addresses of its graph, and each node finds done what it
waits for. It gives the graph's bits, then, unless the driver takes a launch otherwise than a node.
So it is proved as a graph is: by its own trial, before its first use. Its graph has its own again:
what a list gives says nothing about a graph.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from pilotlight.engine.cuda.fitting import named
from pilotlight.engine.cuda.graph_device import GraphDevice
from pilotlight.engine.cuda.graphs import StageSteps
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.library import NativeError, OutOfMemory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LaunchList:
    """A ``Replayable``, for one step."""

    device: GraphDevice
    size: int

    def replay(self) -> None:
        """See ``Replayable``."""
        self.device.launch_list(self.size)

    def reset(self) -> None:
        """It holds nothing."""


class LaunchLists:
    """Which sizes can be launched so. For the thread that makes graphs, and the one that runs
    steps.
    """

    def __init__(self, recorded: Mapping[int, str], *, on: bool) -> None:
        """Has none yet.

        Args:
            recorded: what each gives for its trial.
            on: there are to be any.
        """
        self._recorded = recorded
        self._on = on
        self._loaded: set[int] = set()
        self._ready: set[int] = set()
        self.proved: set[int] = set()
        """Those of which steps ran."""

    def load(self, device: GraphDevice, size: int) -> None:
        """The graph of a size is made next: its kernels are loaded before all else of it.

        Raises:
            NativeError: the driver refuses one.
        """
        if self._on:
            with suppress(OutOfMemory):
                # Then there may be some when it is made.
                device.load(size)
                self.loaded(device, size)

    def loaded(self, device: GraphDevice, size: int) -> None:
        """The kernels of a size are there."""
        if not self._on:
            return
        try:
            device.check_list(size)
        except NativeError as error:
            log.warning("no launch list", action="launch_list_refused", size=size, why=str(error))
        else:
            self._loaded.add(size)

    def can(self, device: GraphDevice | None, size: int) -> bool:
        """Whether a step of a size can be launched now, on a stage that has its memory.

        Raises:
            Nowhere: it has an address where nothing is.
        """
        if device is None or size not in self._loaded:
            return False
        if size not in self._ready:
            device.check(size)
            self._ready.add(size)
        return True

    def stop(self) -> None:
        """From now on steps wait for their graphs."""
        self._on = False
        self._loaded.clear()

    def prove(self, device: GraphDevice, steps: StageSteps, size: int) -> LaunchList:
        """What a step of a size runs, proved.

        Raises:
            RestoreFailed: it does not give what was recorded, or the driver refuses it.
        """
        if size not in self.proved:
            recorded = self._recorded[size]
            try:
                require_trial(steps, size, device.launch_list, recorded, "the launch list")
            except NativeError as error:
                raise RestoreFailed(f"the device refuses a launch list: {error}") from error
            self.proved.add(size)
        return LaunchList(device, size)


def require_trial(
    steps: StageSteps, size: int, launch: Callable[[int], None], recorded: str, what: str
) -> None:
    """Runs a trial on the device.

    Args:
        steps: the stage's.
        size: of the trial.
        launch: runs what is proved, on the inputs that are there.
        recorded: the digest that it has to give.
        what: is proved, as a message says it.

    Raises:
        RestoreFailed: it gives another one.
    """
    with steps.trial_inputs(size):
        launch(size)
        found = digest_of(steps.output(size))
    if found != recorded:
        raise RestoreFailed(
            f"{what} of {named(steps.kind_of(size))} gave {found[:16]} for its trial, "
            f"and {recorded[:16]} was recorded"
        )
