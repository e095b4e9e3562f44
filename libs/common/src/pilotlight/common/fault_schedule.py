"""Which messages meet which fault, as a seed says."""

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """What can become of a message."""

    LOST = "lost"
    LATE = "late"
    TWICE = "twice"
    OVERTAKEN = "overtaken"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Share of messages that meet each fault, and how late a message may be."""

    lost: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    overtaken: float = 0.0
    max_late_s: float = 0.1

    def __post_init__(self) -> None:
        if min(self.lost, self.late, self.twice, self.overtaken) < 0 or self.total > 1:
            raise ValueError(f"shares of messages lie within [0, 1] together, not {self}")

    @property
    def total(self) -> float:
        """Share of messages that something happens to."""
        return self.lost + self.late + self.twice + self.overtaken


@dataclass(frozen=True, slots=True)
class Drawn:
    """What becomes of one message."""

    fault: Fault | None
    late_s: float = 0.0
    on_the_way_back: bool = False
    """Of a request: it is the reply that this happens to."""


NOTHING = Drawn(None)


class FaultSchedule:
    """Decides for every edge of a system. Shared by the buses of its processes."""

    def __init__(self, seed: int = 0, rates: FaultRates | None = None) -> None:
        self._edges: dict[str, random.Random] = {}
        self.counts: Counter[Fault] = Counter()
        """Faults that were dealt out under this seed."""
        self.seed = seed
        self.rates = rates or FaultRates()

    def begin(self, seed: int, rates: FaultRates) -> None:
        """Go on under another seed; every edge counts from its first message again."""
        self.seed, self.rates = seed, rates
        self._edges.clear()
        self.counts.clear()

    def calm(self) -> None:
        """From now on nothing happens to any message."""
        self.rates = FaultRates()

    def draw(self, edge: str) -> Drawn:
        """What becomes of an edge's next message."""
        rng = self._edges.get(edge)
        if rng is None:
            rng = self._edges[edge] = random.Random(f"{self.seed} {edge}")
        chance, size = rng.random(), rng.random()
        rates = self.rates
        for fault, share in (
            (Fault.LOST, rates.lost),
            (Fault.LATE, rates.late),
            (Fault.TWICE, rates.twice),
            (Fault.OVERTAKEN, rates.overtaken),
        ):
            if chance < share:
                self.counts[fault] += 1
                return Drawn(fault, size * rates.max_late_s, chance < share / 2)
            chance -= share
        return NOTHING
