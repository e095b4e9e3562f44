"""Models that wait, sorted once for each word of gateways: between two of them there are several
ticks, and of thousands of models none has moved.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import attrgetter

from pilotlight.policy.ids import ModelName
from pilotlight.policy.model import Model
from pilotlight.policy.request import Demand
from pilotlight.policy.turns import TurnRules

Waiter = tuple[float, ModelName, Demand]
"""In the order of the line."""


def waits(demand: Demand, patience_s: float, aged_s: float) -> Waiter:
    """One in the line, in the order of ``turns.line_up``."""
    return -(demand.oldest_age_s + aged_s) / max(patience_s, 1e-9), demand.model, demand


class Waiters:
    """Demand in the order of the line."""

    def __init__(
        self, demand: tuple[Demand, ...], models: Mapping[ModelName, Model], rules: TurnRules
    ) -> None:
        """Of all models that are asked for; those that are not registered are in no line."""
        self.demand = demand
        self.models = models
        self.by_name = {one.model: one for one in demand}
        self.names = frozenset(self.by_name)
        alike = defaultdict[float, list[Demand]](list)
        for one in sorted(demand, key=attrgetter("model")):
            if one.waiting > 0 and one.model in models:
                alike[models[one.model].slo.ttft_ms].append(one)
        oldest = attrgetter("oldest_age_s")
        self._alike = [
            # Of those that are equally old the first names stay the first.
            (rules.patience_s(models[some[0].model]), sorted(some, key=oldest, reverse=True))
            for some in alike.values()
        ]

    def are_of(self, demand: tuple[Demand, ...], models: Mapping[ModelName, Model]) -> bool:
        """Whether these are the same."""
        return self.demand is demand and self.models is models

    def waits_for(self, name: ModelName) -> bool:
        """Whether requests wait for a registered model."""
        one = self.by_name.get(name)
        return one is not None and one.waiting > 0 and name in self.models

    def waiter(self, name: ModelName, rules: TurnRules, aged_s: float) -> Waiter:
        """One that is registered."""
        return waits(self.by_name[name], rules.patience_s(self.models[name]), aged_s)

    def line(self, aged_s: float) -> Iterator[Waiter]:
        """The first of the line first; ``aged_s``: how much older all are than they say."""
        return heapq.merge(
            *((waits(one, patience_s, aged_s) for one in some) for patience_s, some in self._alike)
        )

    def oldest(self, now_s: float, aged_s: float) -> Iterator[tuple[float, Waiter]]:
        """Who came first, with when that was: ``now_s`` less the age that is told."""
        return heapq.merge(
            *(
                ((now_s - one.oldest_age_s, waits(one, patience_s, aged_s)) for one in some)
                for patience_s, some in self._alike
            )
        )
