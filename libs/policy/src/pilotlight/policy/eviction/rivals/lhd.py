"""Least hit density (Beckmann, Chen and Cidon, NSDI 2018, sections 4 and 5)."""

import math
import random
from collections.abc import Generator

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.rivals.structured import StructuredPolicy

AGES = 128
"""Ages that are told apart; the last is all that is older."""
AGES_PER_DOUBLING = 8
"""Ages are coarser the greater they are."""
CLASSES = 16
"""By the time between the last hits."""
DECAY = 0.9
"""Of what was counted, with each reconfiguration."""
EVENTS_PER_RECONFIGURATION = 16_000
SAMPLE = 64
"""Copies that victims are looked for among first."""


class Lhd(StructuredPolicy):
    """The least expected hits for each byte and each access that passes while it stays goes first.

    Hits and evictions are counted by age and class. With totals over all ages from a on, the hit
    density at age a is hits / Σ (hits + evictions), the sum of the time that they stay (eq. 5).
    """

    name = "lhd"

    def __init__(self, seed: int = 0) -> None:
        """``seed``: of the samples that victims are looked for among."""
        super().__init__()
        self._random = random.Random(seed)
        self._hits = [[0.0] * AGES for _ in range(CLASSES)]
        self._evictions = [[0.0] * AGES for _ in range(CLASSES)]
        self._density = [
            [(number + 1.0) / math.exp2(age / AGES_PER_DOUBLING) for age in range(AGES)]
            for number in range(CLASSES)
        ]
        """Before anything is known: the longer unused, and the rarer the hits, the less."""
        self._now = 0
        self._last: dict[str, int] = {}
        self._gaps: dict[str, tuple[int, int]] = {}
        """The last two ages at which a copy was hit."""
        self._names: list[str] = []
        self._places: dict[str, int] = {}

    def hit(self, subject: str, access: Access) -> None:
        self._tick()
        age = self._now - self._last[subject]
        self._hits[self._class(subject)][_coarse(age)] += 1.0
        self._gaps[subject] = (age, self._gaps[subject][0])
        self._last[subject] = self._now

    def missed(self, access: Access) -> None:
        self._tick()

    def admit(self, candidate: EvictionCandidate) -> None:
        self._last[candidate.subject] = self._now
        self._gaps[candidate.subject] = (0, 1 << CLASSES)
        self._places[candidate.subject] = len(self._names)
        self._names.append(candidate.subject)

    def drop(self, candidate: EvictionCandidate) -> None:
        subject = candidate.subject
        age = self._now - self._last[subject]
        self._evictions[self._class(subject)][_coarse(age)] += 1.0
        del self._last[subject], self._gaps[subject]
        place, last = self._places.pop(subject), self._names.pop()
        if last != subject:
            self._names[place] = last
            self._places[last] = place

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        sample = self._random.sample(self._names, min(SAMPLE, len(self._names)))
        yield from sorted(sample, key=self._worth)
        looked_at = set(sample)
        rest = [subject for subject in self._names if subject not in looked_at]
        yield from sorted(rest, key=self._worth)

    def _worth(self, subject: str) -> tuple[float, str]:
        age = _coarse(self._now - self._last[subject])
        size_bytes = max(1, self._resident[subject].size_bytes)
        return self._density[self._class(subject)][age] / size_bytes, subject

    def _class(self, subject: str) -> int:
        gaps = sum(self._gaps[subject])
        return max(0, min(CLASSES - 1, CLASSES - int(math.log2(gaps + 1))))

    def _tick(self) -> None:
        self._now += 1
        if self._now % EVENTS_PER_RECONFIGURATION == 0:
            self._reconfigure()

    def _reconfigure(self) -> None:
        for hits, evictions, density in zip(
            self._hits, self._evictions, self._density, strict=True
        ):
            total_hits = total_events = stay = 0.0
            for age in range(AGES - 1, -1, -1):
                total_hits += hits[age]
                total_events += hits[age] + evictions[age]
                stay += total_events * _width(age)
                density[age] = total_hits / stay if stay > 0.0 else 0.0
                hits[age] *= DECAY
                evictions[age] *= DECAY


def _coarse(age: int) -> int:
    return min(AGES - 1, int(AGES_PER_DOUBLING * math.log2(age + 1)))


def _width(age: int) -> float:
    """Accesses that an age stands for."""
    return math.exp2((age + 1) / AGES_PER_DOUBLING) - math.exp2(age / AGES_PER_DOUBLING)
