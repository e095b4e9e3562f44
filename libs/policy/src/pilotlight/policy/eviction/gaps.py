"""The law of the gaps between a model's accesses, learned over all models.

A gap is measured in units of the gap that is expected of its model: 1 is the mean of an exponential
law, whose hazard is 1 at every age. Sessions and schedules have another: much above 1 soon after an
access, much below 1 later. Models are put into classes by their expected gap, because a session
lasts some minutes whatever the model.
"""

import math
from collections.abc import Callable

from pilotlight.policy.ids import ModelName

CLASSES = 9
OCTAVES_PER_CLASS = 1.5
FIRST_OCTAVE = 3.0
"""Models that have more than one of 2^3 accesses are in the first class."""
BINS = 34
BINS_PER_OCTAVE = 2
LEAST_OCTAVE = -10
"""Of ages: the first bin is all below 2^-10 of the expected gap."""
FIT_EVERY = 500
"""Accesses; where more models are known, as many as these: a fit looks at each."""
KEPT = 0.97
"""Of what was counted, with each fit."""
GOLDEN = 0.6180339887498949
"""Its multiples are spread evenly between whole numbers."""
PRIOR_GAPS = 20.0
"""Gaps of an exponential law that each bin begins with."""

_EDGES = [
    0.0,
    *(math.exp2(LEAST_OCTAVE + number / BINS_PER_OCTAVE) for number in range(1, BINS + 1)),
]
_WIDTHS = [_EDGES[number + 1] - _EDGES[number] for number in range(BINS)]


class GapLaw:
    """What a copy is worth by its model's class and age: 1 under an exponential law."""

    def __init__(self, probability: Callable[[ModelName], float]) -> None:
        """``probability``: that the next access is for a model; its inverse is the expected gap."""
        self._probability = probability
        self._accesses = 0
        self._last: dict[ModelName, int] = {}
        self._ended = [[0.0] * BINS for _ in range(CLASSES)]
        self._worth = [[1.0] * BINS for _ in range(CLASSES)]
        self._fit_at = FIT_EVERY

    def on_access(self, model: ModelName, count: int = 1) -> None:
        """A model was asked for; its probability is still that of before."""
        last = self._last.get(model)
        if last is not None:
            probability = self._probability(model)
            # Accesses are whole numbers: a gap of k is taken to have ended between k - 1 and k.
            gap = (self._accesses + 1 - last - self._accesses * GOLDEN % 1.0) * probability
            self._ended[_class(probability)][_bin(gap)] += 1.0
        self._accesses += count
        self._last[model] = self._accesses
        if self._accesses >= self._fit_at:
            self._fit_at = self._accesses + max(FIT_EVERY, len(self._last))
            self._fit()

    def forget(self, model: ModelName) -> None:
        """A model is not known any more."""
        self._last.pop(model, None)

    def factor(self, model: ModelName, probability: float) -> float:
        """How much more often than its probability says a model will be asked for while a copy is
        kept as long as it is worth it.

        Args:
            model: Whose copy it is.
            probability: That the next access is for it.
        """
        age = (self._accesses - self._last.get(model, self._accesses)) * probability
        return self._worth[_class(probability)][_bin(age)]

    def _fit(self) -> None:
        """Hazards from gaps that have ended and those that last; what they make a copy worth."""
        lasting = [[0.0] * BINS for _ in range(CLASSES)]
        for model, last in self._last.items():
            probability = self._probability(model)
            age = (self._accesses - last) * probability
            lasting[_class(probability)][_bin(age)] += 1.0
        for kind in range(CLASSES):
            self._worth[kind] = _worth(_hazards(self._ended[kind], lasting[kind]))
            self._ended[kind] = [KEPT * one for one in self._ended[kind]]


def _hazards(ended: list[float], lasting: list[float]) -> list[float]:
    """Gaps that ended at each age, for each unit of time that gaps spent there."""
    hazards = [1.0] * BINS
    older = 0.0
    for place in range(BINS - 1, -1, -1):
        here = ended[place] + lasting[place]
        spent = (older + here / 2.0) * _WIDTHS[place]
        prior = PRIOR_GAPS * min(1.0, _WIDTHS[place])
        hazards[place] = (ended[place] + prior) / (spent + prior)
        older += here
    return hazards


def _worth(hazards: list[float]) -> list[float]:
    """For each age: expected hits for each unit of time, of a copy that is kept until the next
    access, or until the age at which that ratio is best (Gittins' index).
    """
    worth = [0.0] * BINS
    for begin in range(BINS):
        hits = spent = best = 0.0
        surviving = 1.0
        for place in range(begin, BINS):
            stays = math.exp(-hazards[place] * _WIDTHS[place])
            hits += surviving * (1.0 - stays)
            spent += surviving * (1.0 - stays) / hazards[place]
            surviving *= stays
            best = max(best, hits / spent)
        worth[begin] = best
    return worth


def _class(probability: float) -> int:
    octave = -math.log2(probability) - FIRST_OCTAVE
    return max(0, min(CLASSES - 1, int(octave / OCTAVES_PER_CLASS)))


def _bin(age: float) -> int:
    if age <= _EDGES[1]:
        return 0
    return min(BINS - 1, int(BINS_PER_OCTAVE * (math.log2(age) - LEAST_OCTAVE)))
