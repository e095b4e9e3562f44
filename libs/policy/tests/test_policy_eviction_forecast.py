"""Our policy: what it foretells, and that it follows the order whose misses cost the least."""

import math
import random
from dataclasses import replace

import pytest
from evicted_copies import SmallCache, access, copy
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.eviction.forecast import (
    FOLLOWED_AT_LEAST,
    MAX_SHADOWED,
    Forecast,
    Order,
)
from pilotlight.policy.eviction.gaps import FIT_EVERY, GapLaw
from pilotlight.policy.eviction.iam import Iam
from pilotlight.policy.eviction.popularity import HALF_LIVES, PRIOR, Popularity
from pilotlight.policy.ids import ModelName


def test_probabilities_add_up_to_one() -> None:
    rng, popularity = random.Random(0), Popularity()
    names = [f"m{number}" for number in range(40)]
    asked_for = {"unknown"}
    for _ in range(3000):
        asked_for.add(name := names[min(39, int(rng.expovariate(0.2)))])
        popularity.on_access(access(name))
    total = sum(popularity.probability(ModelName(name)) for name in asked_for)
    assert total == pytest.approx(1.0, abs=1e-3)


def test_a_probability_is_the_formula_of_its_counts() -> None:
    popularity = Popularity()
    for name in "aab":
        popularity.on_access(access(name))
    found = popularity.probability(ModelName("a"))
    each: list[float] = []
    for half_life in HALF_LIVES:
        a = math.exp2(-2 / half_life) + math.exp2(-1 / half_life)
        each.append((a + PRIOR) / (a + 1.0 + 3 * PRIOR))
    assert min(each) * 0.999 <= found <= max(each) * 1.001


def test_popularity_that_changes_is_followed() -> None:
    rng, popularity = random.Random(1), Popularity()
    for name, others in (("old", "new"), ("new", "old")):
        for _ in range(12_000):
            drawn = rng.random()
            popularity.on_access(access(name if drawn < 0.3 else others if drawn < 0.32 else "x"))
    assert popularity.probability(ModelName("new")) > 5 * popularity.probability(ModelName("old"))


def test_a_change_among_a_handful_is_followed_within_some_tens_of_accesses() -> None:
    rng, popularity = random.Random(2), Popularity()
    before, after = ModelName("m0"), ModelName("m6")
    for weights, accesses in (((9, 1, 1, 1, 1, 1, 1), 2_000), ((1, 1, 1, 1, 1, 1, 9), 80)):
        for number in rng.choices(range(7), weights, k=accesses):
            popularity.on_access(access(f"m{number}"))
    assert popularity.probability(after) > 2 * popularity.probability(before)


def test_counts_stay_finite_over_many_half_lives() -> None:
    popularity = Popularity()
    popularity.on_access(access("once"))
    for _ in range(120):
        popularity.on_access(access("often", count=10_000))
    popularity.on_access(access("burst", count=10**9))
    for _ in range(200):
        popularity.on_access(access("often", count=5_000))
    assert 0.9 < popularity.probability(ModelName("often")) < 1.0
    assert 0.0 < popularity.probability(ModelName("once")) < 0.01


def test_a_message_of_many_accesses_counts_as_many() -> None:
    """But for the order of what comes together."""
    together, apart = Popularity(), Popularity()
    for _ in range(30):
        for name, count in (("a", 50), ("b", 100)):
            together.on_access(access(name, count=count))
        for name in ("a", "b", "b") * 50:
            apart.on_access(access(name))
    for name in ("a", "b"):
        found, wanted = together.probability(ModelName(name)), apart.probability(ModelName(name))
        assert found == pytest.approx(wanted, rel=0.1)


def gaps_of(law: GapLaw, rng: random.Random, sessions: bool, accesses: int) -> None:
    models = [ModelName(f"m{number}") for number in range(100)]
    if not sessions:
        for _ in range(accesses):
            law.on_access(rng.choice(models))
        return
    for _ in range(accesses // 10):  # Two models by turns, for a while.
        pair = rng.sample(models, 2)
        for _ in range(5):
            law.on_access(pair[0])
            law.on_access(pair[1])


def test_independent_requests_have_gaps_of_an_exponential_law() -> None:
    law = GapLaw(lambda model: 0.01)
    gaps_of(law, random.Random(2), sessions=False, accesses=20 * FIT_EVERY)
    law.on_access(ModelName("m0"))
    for _ in range(50):
        assert law.factor(ModelName("m0"), 0.01) == pytest.approx(1.0, abs=0.35)
        law.on_access(ModelName("m1"))


def test_a_model_in_a_session_is_worth_more_and_less_after_it() -> None:
    law = GapLaw(lambda model: 0.01)
    gaps_of(law, random.Random(3), sessions=True, accesses=20 * FIT_EVERY)
    law.on_access(ModelName("m0"))
    assert law.factor(ModelName("m0"), 0.01) > 10.0
    for _ in range(30):
        law.on_access(ModelName("m1"))
    assert law.factor(ModelName("m0"), 0.01) < 2.0


def our_cache(capacity_bytes: int) -> SmallCache[Forecast]:
    return SmallCache(Forecast(capacity_bytes), capacity_bytes)


def test_independent_requests_are_ordered_by_rates() -> None:
    rng, cache = random.Random(4), our_cache(100)
    copies = [copy(f"m{number}", rng.randrange(1, 9), rng.random()) for number in range(100)]
    weights = [1 / (place + 1) for place in range(100)]
    for one in rng.choices(copies, weights, k=15_000):
        cache.ask(one.subject, one.size_bytes, one.penalty_s)
    assert cache.policy.order is not Order.RECENCY
    assert copies[0].subject in cache.resident


def test_sessions_are_not_ordered_by_rates_alone() -> None:
    rng, cache = random.Random(5), our_cache(10)
    for _ in range(5 * FOLLOWED_AT_LEAST):
        working_set = rng.sample(range(200), 8)
        for number in working_set * 3:
            cache.ask(f"m{number}")
    assert cache.policy.order in {Order.GAPS, Order.RECENCY}
    assert cache.misses < 1.3 * 8 * 5 * FOLLOWED_AT_LEAST, "a session's models stay to its end"


def test_a_changed_size_reaches_the_shadow_caches() -> None:
    cache = our_cache(10)
    cache.ask("a", size_bytes=4)
    cache.policy.on_insert(copy("a", size_bytes=9), 1.0)
    for number in range(50):
        cache.policy.on_access(access("a", float(number)))
    assert cache.policy.order is Order.IMPORTANCE


def test_shadow_caches_have_a_part_of_many_models_and_as_small_a_part_of_the_room() -> None:
    rng, cache = random.Random(6), our_cache(4_000)
    for number in rng.sample(range(5 * MAX_SHADOWED), 5 * MAX_SHADOWED):
        cache.ask(f"m{number}", size_bytes=1 + number % 5)
    policy = cache.policy
    assert MAX_SHADOWED / 4 < len(policy._shadowed) <= MAX_SHADOWED
    assert policy._one_of == 8
    for shadow in policy._shadows.values():
        held = [one.size_bytes for one in shadow._resident.values()]
        assert shadow._free_bytes >= 0
        assert sum(held) + shadow._free_bytes == 4_000 // 8
        assert sum(held) > 0.9 * 4_000 // 8
        assert set(shadow._resident) <= set(policy._shadowed)


def test_the_next_instance_of_a_model_is_no_second_copy_in_shadow_caches() -> None:
    """Services have a subject for each load."""
    policy = Forecast(10)
    for number in range(30):
        policy.on_access(access("a", float(number)))
        instance = replace(copy("a", 4), subject=f"i{number}")
        policy.on_insert(instance, float(number))
        policy.on_evict(f"i{number}", number + 0.5)
    for shadow in policy._shadows.values():
        assert list(shadow._resident) == ["a"]
        assert shadow._free_bytes == 6
        assert shadow.cost_s == 0.0, "it was there for all accesses that it was asked about"


def test_what_a_copy_costs_now_is_what_it_costs_shadow_caches() -> None:
    cache = our_cache(10)
    cache.ask("a", 4, penalty_s=0.001)
    cache.policy.on_insert(copy("a", 4, penalty_s=0.5), 1.0)
    cache.policy.on_access(access("a", 2.0))
    for shadow in cache.policy._shadows.values():
        assert shadow._resident["a"].penalty_s == 0.5


@given(st.lists(st.integers(0, 7), max_size=FOLLOWED_AT_LEAST - 1), st.integers(1, 5))
def test_until_another_order_was_cheaper_it_is_that_of_iam(asked: list[int], places: int) -> None:
    """Of what comes with a question, as services ask."""
    cache, ours = SmallCache(Iam(), places), Forecast(places)
    for number in asked:
        here = dict(cache.resident)
        ours.on_access(access(f"m{number}", cache.now_s + 1.0))
        cache.ask(f"m{number}")
        for subject in here.keys() - cache.resident.keys():
            ours.on_evict(subject, cache.now_s)
        for subject in cache.resident.keys() - here.keys():
            ours.on_insert(cache.resident[subject], cache.now_s)
    copies, later_s = tuple(cache.resident.values()), cache.now_s + 5.0
    assert ours.ordered(copies, later_s) == cache.policy.ordered(copies, later_s)
