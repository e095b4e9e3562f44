"""A prompt's pooled states, gathered while its chunks run."""

import struct
from dataclasses import dataclass

from pilotlight.policy.pooling import Pooled


class PooledPrompt:
    """What is known of one request's vector.

    Chunks come in order of their positions. One that runs again, as after a preemption, comes
    again, and overwrites what followed it.
    """

    __slots__ = ("_sums", "asked", "vector")

    def __init__(self, asked: Pooled) -> None:
        self.asked = asked
        self._sums: dict[int, tuple[float, ...]] = {}
        self.vector = b""
        """The answer, float32 and lowest byte first, when the whole prompt has run."""

    def take(self, start: int, values: tuple[float, ...]) -> None:
        """Takes in what the rows from position ``start`` on come to: their sum, or the one state
        that counts.
        """
        self._sums = {place: sums for place, sums in self._sums.items() if place < start}
        self._sums[start] = values

    @property
    def summed(self) -> tuple[float, ...]:
        """Over all chunks so far."""
        sums = tuple(self._sums.values())
        return sums[0] if len(sums) == 1 else tuple(map(sum, zip(*sums, strict=True)))

    def answer(self, values: tuple[float, ...]) -> None:
        """Says what the vector is."""
        self.vector = struct.pack(f"<{len(values)}f", *values)


@dataclass(frozen=True, slots=True)
class PoolReading:
    """Rows of a batch of which a prompt's vector is made."""

    rows: slice
    """Among all rows of the batch."""
    start: int
    """Position of the first in the request."""
    prompt_tokens: int
    pooled: PooledPrompt
