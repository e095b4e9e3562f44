"""Ours beside ``iam`` by what a cache hears of one device: equal choices, as long as none of its
other orders has been cheaper.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from pilotlight.cache.books import Books
from pilotlight.cache.testing import hear
from pilotlight.policy.arrivals import ArrivalCount, CounterLife
from pilotlight.policy.cluster import Copy, DeviceKind, HeldStage, Tier, WorkerFacts
from pilotlight.policy.estimates import ColdStartSample, learn, with_estimates
from pilotlight.policy.eviction.base import EvictionRules, RoomRequest, plan_eviction
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.eviction.forecast import FOLLOWED_AT_LEAST, Forecast, Order
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import GatewayId, ModelName
from pilotlight.policy.plan import Estimate, Estimates
from pilotlight.policy.testing import copy, held, model, node, worker

MODELS = [model(f"m{number}") for number in range(8)]
PLACE, PLACES = 100, 3
GAP_S = 0.5
ESTIMATES_S = 30.0
USUAL_RATE = 1000.0
RULES = EvictionRules()
Feed = Iterator[tuple[ModelName, float]]


def zipf(seed: int, requests: int) -> Feed:
    rng = random.Random(seed)
    weights = [1.0 / (place + 1) ** 1.8 for place in range(len(MODELS))]
    for number, one in enumerate(rng.choices(MODELS, weights, k=requests)):
        yield one.name, 1.0 + GAP_S * (number + rng.random())


@dataclass(slots=True)
class Cluster:
    """One device, and caches that hear of it; the first one decides."""

    names: tuple[str, ...]
    spread: float
    """Of loads: the standard deviation of their logarithms."""
    rng: random.Random
    caches: list[Books] = field(default_factory=list[Books])
    stages: dict[ModelName, HeldStage] = field(default_factory=dict[ModelName, HeldStage])
    used_s: dict[ModelName, float] = field(default_factory=dict[ModelName, float])
    totals: dict[ModelName, int] = field(default_factory=dict[ModelName, int])
    learned: dict[ModelName, Estimate] = field(default_factory=dict[ModelName, Estimate])
    loads: int = 0
    choices: int = 0
    """Evictions with more than one copy to choose from."""
    unlike: int = 0
    """Of them, those in which not all chose alike."""

    def __post_init__(self) -> None:
        self.caches = [
            Books(policies=TierPolicies(name), models=registered(MODELS)) for name in self.names
        ]
        pool = node(copies=tuple(copy(one.name) for one in MODELS))
        for books in self.caches:
            hear(books, replace(pool, copies=tuple(map(_whole, pool.copies))), 0.0)
        self._report(0.0)

    def serve(self, feed: Feed) -> None:
        read_s = 0.0
        for name, now_s in feed:
            if now_s >= read_s + ESTIMATES_S:
                read_s = now_s
                for books in self.caches:
                    books.hear_estimates(self._estimates(), now_s)
            self._tell(name, now_s)
            if name not in self.stages:
                self._load(name, now_s)
            self.used_s[name] = now_s
            self._report(now_s)

    def _tell(self, name: ModelName, now_s: float) -> None:
        self.totals[name] = self.totals.get(name, 0) + 1
        life = CounterLife(gateway_id=GatewayId("g"), number="1", age_s=now_s)
        count = ArrivalCount(model=name, total=self.totals[name], idle_s=0.0)
        for books in self.caches:
            books.hear_arrivals(life, (count,), now_s)

    def _load(self, name: ModelName, now_s: float) -> None:
        if len(self.stages) == PLACES:
            wanted = RoomRequest(need_bytes=PLACE, free_bytes=0, now_s=now_s)
            facts = self._facts(now_s)
            plans = [
                plan_eviction(
                    books.policies.of(Tier.DEVICE), wanted, books.on_device(facts, now_s), RULES
                )
                for books in self.caches
            ]
            chosen = [tuple(one.model for one in plan.victims) for plan in plans]
            if not chosen[0]:
                return  # All are younger than the minimum residency: the request waits elsewhere.
            self.choices += len(plans[0].kept) < PLACES - 1
            self.unlike += len(set(chosen)) > 1
            for victim in chosen[0]:
                del self.stages[victim]
            self._report(now_s)
        self.loads += 1
        self.stages[name] = held(name, f"i{self.loads}", device_bytes=PLACE)
        sample = ColdStartSample(
            model=name,
            device_kind=DeviceKind.SIM,
            ttft_s=1.0,
            load_bytes_per_s=USUAL_RATE * math.exp(self.rng.gauss(0.0, self.spread)),
        )
        self.learned[name] = learn(self.learned.get(name), sample)

    def _estimates(self) -> Estimates:
        return with_estimates({}, self.learned.values())

    def _facts(self, now_s: float) -> WorkerFacts:
        stages = (
            replace(one, idle_s=now_s - self.used_s.get(name, now_s))
            for name, one in self.stages.items()
        )
        return worker(memory_bytes=PLACE * PLACES, held_stages=tuple(stages))

    def _report(self, now_s: float) -> None:
        for books in self.caches:
            hear(books, self._facts(now_s), now_s)


def _whole(one: Copy) -> Copy:
    return replace(one, parts=tuple(range(6)))


@pytest.mark.parametrize("spread", [0.0, 0.6, 1.2])
def test_by_what_a_cache_hears_ours_chooses_as_iam(spread: float) -> None:
    """A load has a subject of its own, and its cost is a noisy estimate."""
    cluster = Cluster(("pilotlight", "iam"), spread, random.Random(7))
    cluster.serve(zipf(5, 2 * FOLLOWED_AT_LEAST))
    ours = cluster.caches[0].policies.of(Tier.DEVICE)
    assert isinstance(ours, Forecast)
    assert ours.order is Order.IMPORTANCE
    assert cluster.choices > 50
    assert cluster.unlike == 0


def test_recency_would_have_chosen_otherwise() -> None:
    cluster = Cluster(("pilotlight", "lru"), 0.6, random.Random(7))
    cluster.serve(zipf(5, 2 * FOLLOWED_AT_LEAST))
    assert cluster.unlike > 10
