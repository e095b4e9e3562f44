"""What a service asks (``ordered``) and what a simulator asks (``ranked``) have one answer: the
live cache evicts as the evidence says.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from evicted_copies import RULES, SmallCache, access, copy
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    RoomRequest,
    Scoring,
    plan_eviction,
)
from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.policy.eviction.rivals.structured import StructuredPolicy
from pilotlight.policy.eviction.scored import ScoredPolicy

CAPACITY = 60


def as_reported(cache: SmallCache, last_s: dict[str, float]) -> Sequence[EvictionCandidate]:
    """The copies as reports show them, with the time of their last use."""
    return [replace(one, last_used_s=last_s[one.model]) for one in cache.resident.values()]


@pytest.mark.parametrize("name", POLICIES)
@given(st.integers(0, 10_000), st.integers(1, 400))
def test_a_service_has_the_order_that_the_simulator_has(name: str, seed: int, asked: int) -> None:
    rng = random.Random(seed)
    cache = SmallCache(make_policy(name, CAPACITY), CAPACITY)
    last_s: dict[str, float] = {}
    for _ in range(asked):
        number = min(int(rng.paretovariate(0.6)), 30)
        cache.ask(f"m{number}", size_bytes=1 + number % 7, penalty_s=1.0 + number % 5)
        last_s[f"m{number}"] = cache.now_s
    if isinstance(cache.policy, ScoredPolicy) and cache.policy.renewed_per_access:
        for one in cache.resident.values():  # Each score that is renewed in turn has its turn.
            cache.policy.on_insert(one, cache.now_s)
    ranked = cache.policy.ranked(cache.now_s)
    wanted = list(ranked)
    ranked.close()
    found = cache.policy.ordered(as_reported(cache, last_s), cache.now_s)
    assert [one.subject for one in found] == wanted
    if isinstance(cache.policy, Scoring):
        scores = [cache.policy.stated(one, cache.now_s) for one in found]
        assert scores == sorted(scores), "what is recorded of victims agrees with their order"


@pytest.mark.parametrize("name", POLICIES)
def test_a_victim_says_its_score_and_those_of_what_would_have_gone_next(name: str) -> None:
    policy = make_policy(name, CAPACITY)
    copies = [copy(one, size_bytes=10, penalty_s=penalty) for one, penalty in (("a", 1), ("b", 9))]
    for at_s, one in enumerate(copies):
        policy.on_access(access(one.model, float(at_s)))
        policy.on_insert(one, float(at_s))
    room = RoomRequest(need_bytes=10, free_bytes=0, now_s=100.0)
    (victim,) = plan_eviction(policy, room, copies, RULES).victims
    (next_one,) = victim.spared
    if isinstance(policy, StructuredPolicy):
        assert (victim.score, next_one.score) == (None, None)
    else:
        assert victim.score is not None
        assert next_one.score is not None
        assert victim.score <= next_one.score


@pytest.mark.parametrize("name", ["gdsf", "iam-paper", "iam", "pilotlight"])
def test_a_copy_of_another_tier_has_a_worth_of_its_own(name: str) -> None:
    """A disk's order is asked of the host pool's policy: what is dear to bring to the pool may be
    cheap to bring to a disk.
    """
    policy = make_policy(name, CAPACITY)
    copies = [copy(one, size_bytes=10, penalty_s=cost) for one, cost in (("a", 1.0), ("b", 9.0))]
    for one in copies:
        policy.on_access(access(one.model))
    for one in copies:
        policy.on_insert(one, 0.0)
    on_disk = [
        replace(one, tier=Tier.DISK, penalty_s=10.0 - one.penalty_s, last_used_s=0.0)
        for one in copies
    ]
    assert [one.subject for one in policy.ordered(copies, 1.0)] == ["a", "b"]
    assert [one.subject for one in policy.ordered(on_disk, 1.0)] == ["b", "a"]
