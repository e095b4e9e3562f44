"""One micro-batch on a stage of a pipeline whose parts still come: it runs as far as they are in
place, and goes on with the next ones, as a batch on a whole model does (``ResidentStage``).
"""

from dataclasses import dataclass

from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage


@dataclass(frozen=True, slots=True)
class _UnderWay:
    batch: Batch
    inputs: Tensor
    """Of ``next_layer``: see ``RangeRunner.run``."""
    next_layer: int


class ArrivingLayers:
    """Runs micro-batches through a stage, one at a time."""

    def __init__(self, resident: ResidentStage) -> None:
        self._resident = resident
        self._going: _UnderWay | None = None

    @property
    def waits(self) -> bool:
        """A micro-batch has not run through all layers."""
        return self._going is not None

    @property
    def can_go(self) -> bool:
        """Some layer would run: of the micro-batch under way, or the first one of a new one."""
        at = self._resident.stage.start if self._going is None else self._going.next_layer
        return self._resident.reach > at

    def begin(self, batch: Batch, inputs: Tensor, layers: Stage) -> None:
        """Takes a micro-batch in.

        Args:
            batch: its segments, with this stage's blocks.
            inputs: of the first layer.
            layers: those that run here.
        """
        self._going = _UnderWay(batch, inputs, layers.start)

    def go(self, layers: Stage) -> Tensor | None:
        """Runs what can be run; what the last layer gave, or None while parts of some are missing.

        Args:
            layers: as for ``begin``.
        """
        going = self._going
        assert going is not None, "a micro-batch is under way"
        reach = min(self._resident.reach, layers.stop)
        inputs = going.inputs
        if reach > going.next_layer:
            inputs = self._resident.run(going.batch, inputs, Stage(going.next_layer, reach))
        if reach < layers.stop:
            self._going = _UnderWay(going.batch, inputs, max(reach, going.next_layer))
            return None
        self._going = None
        return inputs

    def drop(self) -> None:
        """Forgets the micro-batch under way."""
        self._going = None
