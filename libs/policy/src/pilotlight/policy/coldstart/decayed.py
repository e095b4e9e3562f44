"""What many samples of one figure come to: decayed means with their spread, and decayed lines."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from pilotlight.policy.estimates import WEIGHT

FAR = 4
"""What was this many times as fast shows how fast it can be: what came before it had something else
in its way, such as kernels that were compiled, and says nothing of what comes next."""
PRIOR_WEIGHT = 0.1
"""Of each point of a line's prior, against 1 of the newest sample: it decides what the samples
leave open, such as the slope when all of them are at one place."""


@dataclass(frozen=True, slots=True)
class Mean:
    """An exponentially weighted mean, and how far samples lie from it."""

    value: float
    spread: float
    """Mean absolute deviation of a sample from the mean before it, decayed like the mean. After one
    sample half of its value, as for the round-trip times of TCP."""
    samples: int = 1
    """0: measured offline. The first sample takes its place."""

    def after(self, sample: float) -> "Mean":
        """With one more sample."""
        return Mean(
            (1 - WEIGHT) * self.value + WEIGHT * sample,
            (1 - WEIGHT) * self.spread + WEIGHT * abs(sample - self.value),
            self.samples + 1,
        )


def mean_after(known: Mean | None, sample: float | None, *, of_rates: bool = False) -> Mean | None:
    """The mean with one more sample; begun anew where that is far better than the mean.

    Args:
        known: What there was.
        sample: None, below zero or no number: there is none.
        of_rates: More is better; of times less is.
    """
    if sample is None or not 0 <= sample < math.inf:
        return known
    if known is None or known.samples == 0:
        return Mean(sample, sample / 2)
    better = (known.value, sample) if of_rates else (sample, known.value)
    if sample > 0 and better[0] * FAR < better[1]:
        return Mean(sample, sample / 2, known.samples + 1)
    return known.after(sample)


def offline(known: Mean | None, figure: float) -> Mean | None:
    """A figure that was measured offline, where no sample has shown one; what is known where one
    has, or where the figure is none that is above zero.
    """
    if not 0 < figure < math.inf or (known is not None and known.samples > 0):
        return known
    return known if known is not None and known.value == figure else Mean(figure, figure / 2, 0)


class Point(NamedTuple):
    """A figure ``y`` at a size ``x``."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Line:
    """y = a + b x by exponentially weighted least squares, neither below zero.

    Sums are kept, so the order of samples of one weight does not matter.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    samples: int = 0

    def after(self, point: Point) -> "Line":
        """With one more sample; those before it weigh less, and nothing where it took far less time
        for about as much or more. One without a size, below zero, or that is no number, is none.
        """
        kept, (x, y) = 1 - WEIGHT, point
        if not (0 < x < math.inf and 0 <= y < math.inf):
            return self
        if y * self.weight * FAR < self.y and 2 * x * self.weight > self.x:
            kept = 0.0
        return Line(
            kept * self.weight + 1,
            kept * self.x + x,
            kept * self.y + y,
            kept * self.xx + x * x,
            kept * self.xy + x * y,
            self.samples + 1,
        )

    def at(self, x: float, prior: tuple[Point, Point]) -> float:
        """The figure at a size.

        Args:
            x: The size.
            prior: Two points with sizes above zero that stand for what is believed without samples.
        """
        unit = max(prior[0].x, prior[1].x)
        n, sx, sy = self.weight, self.x / unit, self.y
        sxx, sxy = self.xx / unit / unit, self.xy / unit
        for point in prior:
            at = point.x / unit
            n += PRIOR_WEIGHT
            sx += PRIOR_WEIGHT * at
            sy += PRIOR_WEIGHT * point.y
            sxx += PRIOR_WEIGHT * at * at
            sxy += PRIOR_WEIGHT * at * point.y
        slope = (n * sxy - sx * sy) / (n * sxx - sx * sx)
        intercept = (sy - slope * sx) / n
        if slope < 0:
            slope, intercept = 0.0, sy / n
        elif intercept < 0:
            slope, intercept = sxy / sxx, 0.0
        return intercept + slope * x / unit


NO_LINE = Line()
"""Without a sample."""
