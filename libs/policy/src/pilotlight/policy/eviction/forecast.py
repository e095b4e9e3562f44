"""Ours: the utility of IAM with a better forecast of the next request.

What it takes from its rivals, and what it adds:

- penalty over size, as GDSF with cost and IAM: mCache, eq. (1)
- counts that decay, as IAM; but with several half-lives at once, weighted by how well each has
  foretold which model is asked for next, so that steady and drifting popularity need no setting
- time is counted in accesses: a burst or a silence of all models together changes no order
- the distribution of gaps instead of its mean, as LHD; but of gaps in units of each model's own
  expected gap, with the gaps that still last (``gaps``)
- which of four orders is the best one is measured, not assumed: that of ``iam``, by rates, by rates
  and the distribution of gaps, by recency. Each has a shadow cache, which counts what its misses
  would have cost; the cheapest one is followed, that of ``iam`` until another one has been cheaper.
  Where there are many models, the shadow caches have a part of them, drawn by name, and as small a
  part of the room (SHARDS: Waldspurger et al., FAST 2015)
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.gaps import GapLaw
from pilotlight.policy.eviction.heap import Priority
from pilotlight.policy.eviction.hysteresis import Hysteresis
from pilotlight.policy.eviction.iam import worth
from pilotlight.policy.eviction.popularity import Popularity
from pilotlight.policy.eviction.rates import DecayedRates
from pilotlight.policy.eviction.scored import ScoredPolicy
from pilotlight.policy.ids import ModelName

COST_KEPT = 0.9995
"""Of what a shadow cache's misses have cost, with each access."""
CHEAPER = 0.93
"""Another shadow cache is followed when its misses cost less than this share: no to and fro."""
FOLLOWED_AT_LEAST = 200
"""Accesses: then another order may be followed. A change scores every resident copy anew."""
MAX_SHADOWED = 1_024
"""Models in shadow caches: with more, every second of them goes."""


class Order(StrEnum):
    """What the least worth is measured by."""

    IMPORTANCE = "importance"
    """That of ``iam``, with its margin for what comes back."""
    RATES = "rates"
    GAPS = "gaps"
    RECENCY = "recency"


class _Forecasts:
    """What is known of the next request; one for a policy and its shadows."""

    def __init__(self) -> None:
        self.popularity = Popularity()
        self.gaps = GapLaw(self.popularity.probability)
        self.rates = DecayedRates()

    def note(self, access: Access) -> ModelName | None:
        """Take an access. Returns the model that is forgotten for it, if one is."""
        self.gaps.on_access(access.model, access.count)
        self.rates.on_access(access)
        forgotten = self.popularity.on_access(access)
        if forgotten is not None:
            self.gaps.forget(forgotten)
        return forgotten

    def score(
        self,
        order: Order,
        candidate: EvictionCandidate,
        last_s: float,
        now_s: float,
        hysteresis: Hysteresis | None,
    ) -> Priority:
        """What a copy is worth by one of the orders: P/S times the rate that is forecast, or when
        its model was asked for last.
        """
        if order is Order.RECENCY:
            return last_s, 0.0
        if order is Order.IMPORTANCE:
            rate_per_s = self.rates.rate_per_s(candidate.model, now_s)
            return worth(candidate, rate_per_s, last_s, now_s, hysteresis)
        rate = self.popularity.probability(candidate.model)
        if order is Order.GAPS:
            rate *= self.gaps.factor(candidate.model, rate)
        return candidate.penalty_s * rate / max(1, candidate.size_bytes), last_s


class _Shadow(ScoredPolicy):
    """A cache without copies: what it would hold, and what its misses would cost."""

    name = "shadow"
    renewed_per_access = 1

    def __init__(
        self,
        forecasts: _Forecasts,
        last_s: dict[ModelName, float],
        capacity_bytes: int,
        order: Order,
    ) -> None:
        """Empty.

        Args:
            forecasts: What all shadows have in common.
            last_s: When each model was asked for last; their owner keeps it.
            capacity_bytes: Of this cache.
            order: By which it evicts.
        """
        super().__init__(Hysteresis() if order is Order.IMPORTANCE else None)
        self.cost_s = 0.0
        self._forecasts = forecasts
        self._last_s = last_s
        self._order = order
        self._free_bytes = capacity_bytes
        if order is Order.RECENCY:
            self.renewed_per_access = 0  # What it orders by changes with an access alone.

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        return self._forecasts.score(self._order, candidate, last_s, now_s, self._hysteresis)

    def note(self, access: Access) -> None:
        """What scores are made from has an owner, which was told."""

    def ask(self, access: Access, candidate: EvictionCandidate) -> None:
        """Count an access for a model whose copy is known. What a miss costs now is what it costs
        all shadow caches: a copy that stays is compared with one that has just been measured.
        """
        held = self._resident.get(candidate.subject)
        if held is not None and held.penalty_s != candidate.penalty_s:
            self._resident[candidate.subject] = replace(held, penalty_s=candidate.penalty_s)
        self.on_access(access)
        self.cost_s *= COST_KEPT
        if held is None:
            self.cost_s += candidate.penalty_s
            self.admit(candidate, access.at_s)

    def admit(self, candidate: EvictionCandidate, now_s: float) -> None:
        """Hold a copy, in place of those that are worth the least."""
        self.drop(candidate.subject, now_s)
        if self._make_room(candidate.size_bytes, now_s):
            self._free_bytes -= candidate.size_bytes
            self.on_insert(replace(candidate, resident_since_s=now_s), now_s)

    def shrink(self, less_bytes: int, now_s: float) -> None:
        """Have less room from now on."""
        self._free_bytes -= less_bytes
        self._make_room(0, now_s)

    def _make_room(self, need_bytes: int, now_s: float) -> bool:
        """Let go of those that are worth the least, if that makes room enough."""
        victims: list[str] = []
        freed_bytes = self._free_bytes
        subjects = self.ranked(now_s)
        while freed_bytes < need_bytes:
            victim = next(subjects, None)
            if victim is None:
                break
            victims.append(victim)
            freed_bytes += self._resident[victim].size_bytes
        subjects.close()
        if freed_bytes < need_bytes:
            return False
        for victim in victims:
            self.drop(victim, now_s)
        return True

    def grow(self, by_bytes: int) -> None:
        """Have more room, or less: then what is held goes with the next admissions."""
        self._free_bytes += by_bytes

    def drop(self, subject: str, now_s: float) -> None:
        """Let a copy go, if it is held."""
        candidate = self._resident.get(subject)
        if candidate is not None:
            self._free_bytes += candidate.size_bytes
            self.on_evict(subject, now_s)


class Forecast(ScoredPolicy):
    """The least P/S times the forecast rate goes first; ties by recency."""

    name = "pilotlight"
    renewed_per_access = 1

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: of the cache that it is for, and of each shadow cache."""
        super().__init__(Hysteresis())
        self._capacity_bytes = capacity_bytes
        self._forecasts = _Forecasts()
        self._shadow_bytes = capacity_bytes
        self._shadows = {
            order: _Shadow(self._forecasts, self._last_s, capacity_bytes, order) for order in Order
        }
        self._order = Order.IMPORTANCE
        self._followed_for = 0
        self._one_of = 1
        """Shadow caches have one of so many models; a power of two."""
        self._shadowed: dict[ModelName, EvictionCandidate] = {}
        """Copies as they were last, of models that were resident at some time: those that shadow
        caches may have."""

    @property
    def order(self) -> Order:
        """The order that is followed."""
        return self._order

    @property
    def costs_s(self) -> Mapping[Order, float]:
        """What misses would have cost by each order: seconds, of which each access forgets a little
        (``COST_KEPT``).
        """
        return {order: shadow.cost_s for order, shadow in self._shadows.items()}

    def note(self, access: Access) -> None:
        super().note(access)
        forgotten = self._forecasts.note(access)
        if forgotten is not None:
            self._leave_out(forgotten, access.at_s)
        candidate = self._shadowed.get(access.model)
        if candidate is not None:
            for shadow in self._shadows.values():
                shadow.ask(access, candidate)
        self._followed_for += 1
        if self._followed_for >= FOLLOWED_AT_LEAST:
            self._follow_cheapest(access.at_s)

    def on_insert(self, candidate: EvictionCandidate, now_s: float) -> None:
        super().on_insert(candidate, now_s)
        if not self._drawn(candidate.model):
            return
        before = self._shadowed.get(candidate.model)
        # A model's next instance has another subject, and is the same copy to a shadow cache.
        candidate = replace(candidate, subject=candidate.model)
        self._shadowed[candidate.model] = candidate
        if before is None or before.size_bytes != candidate.size_bytes:
            for shadow in self._shadows.values():
                shadow.admit(candidate, now_s)
        if len(self._shadowed) > MAX_SHADOWED:
            self._draw_fewer(now_s)

    def resize(self, capacity_bytes: int) -> None:
        by_bytes, self._capacity_bytes = capacity_bytes - self._capacity_bytes, capacity_bytes
        for shadow in self._shadows.values():
            shadow.grow(by_bytes)

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> Priority:
        return self._forecasts.score(self._order, candidate, last_s, now_s, self._hysteresis)

    def _follow_cheapest(self, now_s: float) -> None:
        costs_s = self.costs_s
        cheapest = min(costs_s, key=costs_s.__getitem__)
        if costs_s[cheapest] >= CHEAPER * costs_s[self._order]:
            return
        self._order, self._followed_for = cheapest, 0
        for subject in self._resident:
            self._renew(subject, now_s)

    def _drawn(self, model: ModelName) -> bool:
        """Whether shadow caches may have a model. What is drawn with fewer was drawn with more."""
        return zlib.crc32(model.encode()) % self._one_of == 0

    def _draw_fewer(self, now_s: float) -> None:
        """Halve the models in shadow caches, and their room."""
        self._one_of *= 2
        for model in [one for one in self._shadowed if not self._drawn(one)]:
            self._leave_out(model, now_s)
        less_bytes = self._shadow_bytes - self._shadow_bytes // 2
        self._shadow_bytes -= less_bytes
        for shadow in self._shadows.values():
            shadow.shrink(less_bytes, now_s)

    def _leave_out(self, model: ModelName, now_s: float) -> None:
        candidate = self._shadowed.pop(model, None)
        if candidate is not None:
            for shadow in self._shadows.values():
                shadow.drop(candidate.subject, now_s)
