"""A batch that has run as far as parts of its model are in place."""

from dataclasses import dataclass

from torch import Tensor

from pilotlight.engine.core.batch import Plan


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A batch that waits for parts.

    Nothing of it is booked before it has run: without it, its requests are where they were.
    """

    plan: Plan
    inputs: Tensor
    """Of ``next_layer``: see ``RangeRunner.run``."""
    next_layer: int
