"""Which model is asked for next: decayed counts with several half-lives, weighted by their success
so far.
"""

import math

from pilotlight.policy.arrivals import MAX_MODELS, Access
from pilotlight.policy.ids import ModelName

HALF_LIVES = (15.0, 150.0, 2_000.0, 8_000.0, 32_000.0)
"""Accesses of all models after which one counts half. The short ones follow a handful of models
whose popularity changes within minutes; among hundreds they foretell little and weigh nothing."""
PRIOR = 0.7
"""Accesses that each model has before its first."""
FORGET = 0.999
"""Of what the half-lives have earned, with each access."""
LEAST_WEIGHT = 1e-5
"""A half-life that was wrong for long is believed again within some tens of accesses."""
FORGOTTEN_AFTER = 100
"""Half-lives within one message: what came before them counts nothing beside it."""
RESCALED_AT = 1e200
"""An access counts more the later it comes; at this the counts of a half-life are scaled down."""


class Popularity:
    """How probable it is, for each model, that the next access is for it.

    Counts decay by growing what an access adds, so that a model that is not asked for costs
    nothing.
    """

    def __init__(self) -> None:
        self._growth = [math.exp2(1.0 / half_life) for half_life in HALF_LIVES]
        self._adds = [1.0] * len(HALF_LIVES)
        """What an access adds now, by half-life."""
        self._totals = [0.0] * len(HALF_LIVES)
        self._weights = [1.0 / len(HALF_LIVES)] * len(HALF_LIVES)
        self._counts: dict[ModelName, list[float]] = {}
        self._known = 0
        """Models in the table, the one that is asked for at the moment among them."""
        self._unknown = 0.0
        """The probability of a model that is not known."""
        self._per_count = [0.0] * len(HALF_LIVES)
        """What each of a model's counts adds to that."""
        self._weigh()

    def on_access(self, access: Access) -> ModelName | None:
        """Take an access. Returns the model that is forgotten for it, if one is."""
        model = access.model
        counts = self._counts.pop(model, None)
        forgotten: ModelName | None = None
        if counts is not None:
            self._learn(counts)
        else:
            counts = [0.0] * len(HALF_LIVES)
            if len(self._counts) >= MAX_MODELS:
                forgotten = next(iter(self._counts))
                gone = self._counts.pop(forgotten)
                self._totals = [a - b for a, b in zip(self._totals, gone, strict=True)]
        self._counts[model] = counts
        self._known = len(self._counts)
        accesses, adds, totals = access.count, self._adds, self._totals
        for number, growth in enumerate(self._growth):
            if accesses == 1:
                adds[number] = added = adds[number] * growth
            else:  # As many one by one: a geometric series.
                grown = growth ** min(accesses, FORGOTTEN_AFTER * HALF_LIVES[number])
                added = adds[number] * (grown - 1.0) / (1.0 - 1.0 / growth)
                adds[number] *= grown
            counts[number] += added
            totals[number] += added
            if added > RESCALED_AT:
                self._rescale(number)
        self._weigh()
        return forgotten

    def probability(self, model: ModelName) -> float:
        """That the next access is for a model: for each half-life (count + prior) / (total + prior
        for each model), weighted. Over all models that are known they add up to one, but for the
        share that is kept for a model that is not known yet.
        """
        counts = self._counts.get(model)
        if counts is None:
            return self._unknown
        a, b, c, d, e = counts  # A product written out: each score asks for it.
        per_a, per_b, per_c, per_d, per_e = self._per_count
        return self._unknown + per_a * a + per_b * b + per_c * c + per_d * d + per_e * e

    def _weigh(self) -> None:
        """What all probabilities have in common until the next access."""
        prior_total = PRIOR * (self._known + 1)
        shares = [
            weight / (total / add + prior_total)
            for weight, total, add in zip(self._weights, self._totals, self._adds, strict=True)
        ]
        self._unknown = PRIOR * sum(shares)
        self._per_count = [share / add for share, add in zip(shares, self._adds, strict=True)]

    def _learn(self, counts: list[float]) -> None:
        """Weigh half-lives by what each foretold of the access that came.

        Args:
            counts: Of its model, before it.
        """
        prior_total = PRIOR * (self._known + 1)
        earned = [
            weight**FORGET * (count / add + PRIOR) / (total / add + prior_total)
            for weight, count, total, add in zip(
                self._weights, counts, self._totals, self._adds, strict=True
            )
        ]
        total_earned = sum(earned)
        self._weights = [max(LEAST_WEIGHT, one / total_earned) for one in earned]

    def _rescale(self, number: int) -> None:
        scale = 1.0 / self._adds[number]
        self._adds[number] = 1.0
        self._totals[number] *= scale
        for counts in self._counts.values():
            counts[number] *= scale
