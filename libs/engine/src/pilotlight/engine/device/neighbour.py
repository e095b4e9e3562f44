"""Where parameters of a stage come from beside the host's memory: the device of a neighbour."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol


class Came(Enum):
    """How far a part has come from a neighbour."""

    HERE = auto()
    """It is in its place, whole."""
    WAITS = auto()
    NOT = auto()
    """It does not come from there, and nothing writes to its place."""


class Neighbour(Protocol):
    """Fills places of parts by itself, beside batches."""

    def look(self, part: int, monotonic_s: Callable[[], float]) -> Came:
        """How far a part has come that could be had from the host's memory now."""
        ...

    def refuse(self, part: int, why: str) -> None:
        """What came is not the part."""
        ...

    def why(self, part: int) -> str:
        """Why a part does not come though it was expected; empty: it was not."""
        ...

    def settle(self) -> None:
        """Waits until nothing is written any more: what is not here does not come."""
        ...
