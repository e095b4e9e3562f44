"""IAM as published and as design.md has it: utilities by hand, order against brute force."""

import math
import random
from functools import partial

import evicted_copies
import pytest
from evicted_copies import access
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.hysteresis import HysteresisRules
from pilotlight.policy.eviction.iam import Iam, importance, utility
from pilotlight.policy.eviction.iam_paper import REBUILT_PER_EVENT, REFRESH_S, IamPaper
from pilotlight.policy.eviction.rates import DecayedRates, EwmaRates, Rates, WindowRates
from pilotlight.policy.ids import ModelName

copy = partial(evicted_copies.copy, size_bytes=10)


class Fixed:
    """Rates that a test sets."""

    def __init__(self, **rates: float) -> None:
        self.rates = rates

    def on_access(self, access: Access) -> None:
        pass

    def rate_per_s(self, model: ModelName, now_s: float) -> float:
        return self.rates.get(model, 0.0)


def order(policy: Iam | IamPaper, now_s: float) -> list[str]:
    looking = policy.ranked(now_s)
    found = list(looking)
    looking.close()
    return found


def test_utility_and_importance_are_equations_1_and_2() -> None:
    assert utility(copy("a", size_bytes=20, penalty_s=5.0), 0.4) == pytest.approx(0.1)
    utilities = [0.1, 0.2, 0.2, 0.7]
    ranks = [importance(utilities, one) for one in utilities]
    assert ranks == [0.0, math.log(2), math.log(2), math.log(4)]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_importance_orders_as_utility_does(values: list[float]) -> None:
    ascending = sorted(values)
    ranks = [importance(ascending, one) for one in ascending]
    assert ranks == sorted(ranks)
    for (a, rank_a), (b, rank_b) in zip(
        zip(ascending, ranks, strict=True),
        zip(ascending[1:], ranks[1:], strict=True),
        strict=False,
    ):
        assert (a < b) == (rank_a < rank_b)


def test_rates_of_a_window_a_moving_average_and_a_decayed_count() -> None:
    window, average = WindowRates(window_s=100.0), EwmaRates(weight=0.5)
    decayed = DecayedRates(half_life_s=100.0, prior_count=0.0, prior_s=0.0)
    for at_s in (0.0, 10.0, 20.0, 60.0):
        for rates in (window, average, decayed):
            rates.on_access(access("m", at_s))
    m = ModelName("m")
    assert window.rate_per_s(m, 60.0) == pytest.approx(4 / 60)
    assert window.rate_per_s(m, 115.0) == pytest.approx(2 / 100), "20 and 60 are left"
    assert average.rate_per_s(m, 60.0) == pytest.approx(1 / 25), "10, 10, 40 become 10, 10, 25"
    count = sum(2 ** (-(160 - at_s) / 100) for at_s in (0, 10, 20, 60))
    seen_s = 100 / math.log(2) * (1 - 2**-1.6)
    assert decayed.rate_per_s(m, 160.0) == pytest.approx(count / seen_s)
    for rates in (window, average, decayed):
        assert rates.rate_per_s(ModelName("never"), 160.0) == 0.0


def test_a_prior_speaks_for_what_was_never_asked_for() -> None:
    rates = DecayedRates(half_life_s=1000.0, prior_count=1.0, prior_s=100.0)
    never = ModelName("never")
    assert rates.rate_per_s(never, 0.0) == pytest.approx(1 / 100)
    rates.on_access(access("other", 0.0))
    assert 0.0 < rates.rate_per_s(never, 500.0) < 1 / 100, "silence counts against it"


@pytest.mark.parametrize("rates", [WindowRates(50.0), EwmaRates(), DecayedRates(500.0)])
def test_rates_of_a_steady_stream_come_near_the_truth(rates: Rates) -> None:
    for tick in range(4000):
        rates.on_access(access("m", tick / 2))
    assert rates.rate_per_s(ModelName("m"), 2000.0) == pytest.approx(2.0, rel=0.5)


def test_the_expected_time_is_never_below_the_time_since_the_last_request() -> None:
    policy = Iam(Fixed(often=1.0, rare=0.05))
    policy.on_access(access("often", 0.0))
    policy.on_access(access("rare", 90.0))
    for name in ("often", "rare"):
        policy.on_insert(copy(name), 90.0)
    assert order(policy, 100.0) == ["often", "rare"], "1/100 against 0.05"
    policy.on_access(access("often", 100.0))
    assert order(policy, 101.0) == ["rare", "often"]


def test_equals_go_by_recency() -> None:
    policy = Iam(Fixed())
    for at_s, name in ((1.0, "b"), (2.0, "a"), (3.0, "c")):
        policy.on_access(access(name, at_s))
        policy.on_insert(copy(name), at_s)
    assert order(policy, 4.0) == ["b", "a", "c"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["access", "insert", "evict"]),
        st.integers(0, 11),
        st.floats(0.0, 40.0),
        st.integers(1, 50),
    ),
    min_size=1,
    max_size=120,
)


@given(EVENTS)
def test_victims_agree_with_utilities_after_any_events(
    events: list[tuple[str, int, float, int]],
) -> None:
    """The heap's lazy entries agree with a plain sort once every resident has had its turn."""
    policy, rates, rules = Iam(), DecayedRates(), HysteresisRules()
    resident: dict[str, EvictionCandidate] = {}
    gone_s: dict[str, float] = {}
    came_back_s: dict[str, list[float]] = {}
    last_s: dict[str, float] = {}
    now_s = 0.0
    for kind, number, step_s, size in events:
        now_s += step_s
        name = f"m{number}"
        if kind == "access":
            policy.on_access(access(name, now_s))
            rates.on_access(access(name, now_s))
            last_s[name] = now_s
        elif kind == "insert":
            if now_s - gone_s.pop(name, -math.inf) <= rules.soon_s:
                came_back_s.setdefault(name, []).append(now_s)
            resident[name] = copy(name, size_bytes=size, penalty_s=float(size % 7), now_s=now_s)
            policy.on_insert(resident[name], now_s)
        else:
            gone = resident.pop(name, None)
            if gone is not None:
                gone_s.pop(name, None)
            if gone is not None and last_s.get(name, -math.inf) <= gone.resident_since_s:
                gone_s[name] = now_s
            policy.on_evict(name, now_s)
    for _ in range(12):  # Every resident has its turn, now.
        policy.on_access(access("other", now_s))
        rates.on_access(access("other", now_s))

    def worth(one: EvictionCandidate) -> tuple[float, float, str]:
        since_s = last_s.get(one.model, one.resident_since_s)
        rate = rates.rate_per_s(one.model, now_s)
        if now_s > since_s:
            rate = min(rate, 1.0 / (now_s - since_s))
        ages_s = (now_s - at_s for at_s in came_back_s.get(one.model, ()))
        count = sum(2 ** (-age_s / rules.half_life_s) for age_s in ages_s)
        settled = 1.0 - math.exp((one.resident_since_s - now_s) / rules.settled_s)
        stays = 1.0 + rules.margin * (1.0 - 1.0 / max(1.0, count)) * settled
        return utility(one, rate) * stays, since_s, one.subject

    wanted = sorted(resident.values(), key=worth)
    assert order(policy, now_s) == [one.subject for one in wanted]


def test_published_ranks_are_those_of_insertion() -> None:
    """A hit does not change a stored score: Algorithm 1, lines 4 and 5."""
    rates = Fixed(a=0.3, b=0.2, c=0.1)
    policy = IamPaper(rates)
    for name in "abc":
        policy.on_access(access(name, 0.0))
        policy.on_insert(copy(name), 0.0)
    assert order(policy, 1.0) == ["a", "b", "c"], "each had rank log(b_0) when it came"
    rates.rates["a"] = 9.0
    policy.on_access(access("a", 2.0))
    assert order(policy, 2.0) == ["a", "b", "c"]


def test_the_shadow_queue_takes_over_when_it_is_whole() -> None:
    names = [f"m{number}" for number in range(2 * REBUILT_PER_EVENT)]
    rates = Fixed(**{name: float(place + 1) for place, name in enumerate(reversed(names))})
    policy = IamPaper(rates)
    for name in names:
        policy.on_access(access(name, 0.0))
        policy.on_insert(copy(name), 0.0)
    stale = order(policy, 1.0)
    policy.on_access(access(names[0], REFRESH_S))
    assert order(policy, REFRESH_S) == stale, "the queue in use stays while the shadow is made"
    policy.on_evict(stale[0], REFRESH_S)
    policy.on_insert(copy("new"), REFRESH_S)
    for _ in range(3):
        policy.on_access(access(names[1], REFRESH_S))
    wanted = [
        "new",
        *sorted((one for one in names if one != stale[0]), key=rates.rates.__getitem__),
    ]
    found = order(policy, REFRESH_S)
    assert set(found) == set(wanted)
    assert [one for one in found if one != "new"] == wanted[1:]


def test_published_and_ours_agree_where_ranks_are_fresh() -> None:
    rng = random.Random(3)
    rates = Fixed(**{f"m{number}": rng.random() for number in range(30)})
    copies = [
        copy(f"m{number}", size_bytes=rng.randrange(1, 99), penalty_s=rng.random())
        for number in range(30)
    ]
    plain, paper = Iam(rates), IamPaper(rates)
    assert [one.subject for one in plain.ordered(copies, 0.0)] == [
        one.subject for one in paper.ordered(copies, 0.0)
    ]


class Counting(Iam):
    """Counts the scores that it makes: each goes into the heap once, at O(log n)."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = 0

    def score(self, candidate: EvictionCandidate, last_s: float, now_s: float) -> tuple[float, ...]:
        self.scores += 1
        return super().score(candidate, last_s, now_s)


def scores_of_an_access(residents: int, accesses: int = 2_000) -> float:
    """In mean, each with the eviction and the insertion of a miss."""
    policy, rng = Counting(), random.Random(5)
    there = [f"m{number}" for number in range(residents)]
    for number, name in enumerate(there):
        policy.on_access(access(name, number * 0.1))
        policy.on_insert(copy(name, penalty_s=rng.uniform(1.0, 60.0)), number * 0.1)
    policy.scores = 0
    for number in range(accesses):
        now_s, name = residents * 0.1 + number, f"new{number}"
        policy.on_access(access(rng.choice(there), now_s))
        policy.on_access(access(name, now_s))
        looking = policy.ranked(now_s)
        victim = next(looking)
        looking.close()
        policy.on_evict(victim, now_s)
        policy.on_insert(copy(name, penalty_s=rng.uniform(1.0, 60.0)), now_s)
    return policy.scores / accesses


def test_an_access_looks_at_a_few_copies_however_many_there_are() -> None:
    few, many = scores_of_an_access(1_000), scores_of_an_access(16_000)
    assert few < 10
    assert many < 10
