"""One model more than there are places, in turn: reloads are bounded, no model starves, an operator
is told; and what is more important by more than the margin stays whatever came back.
"""

import random

import pytest
from evicted_copies import access, copy
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionPolicy,
    EvictionRules,
    RoomRequest,
    plan_resident,
)
from pilotlight.policy.eviction.forecast import Forecast
from pilotlight.policy.eviction.hysteresis import Hysteresis, HysteresisRules
from pilotlight.policy.eviction.iam import Iam
from pilotlight.policy.eviction.thrash import Thrash, ThrashWatch
from pilotlight.policy.ids import ModelName

RULES = HysteresisRules()
NONE = HysteresisRules(margin=0.0)
M = ModelName("m")


class Turns:
    """Models of one size over some places, each asked for as soon as the one before is served."""

    def __init__(self, places: int, policy: EvictionPolicy, residency_s: float = 0.0) -> None:
        self.places, self.residency_s = places, residency_s
        self.names = [f"m{number}" for number in range(places + 1)]
        self.policy, self.watch = policy, ThrashWatch()
        self.here: dict[str, EvictionCandidate] = {}
        self.told: list[Thrash] = []
        self.loads_s: list[float] = []
        self.now_s = self.longest_wait_s = 0.0

    def ask(self, name: str, load_s: float, service_s: float) -> None:
        self.policy.on_access(access(name, self.now_s))
        began_s = self.now_s
        if name not in self.here:
            while not self._make_room():
                self.now_s += 0.1
                assert self.now_s - began_s < 1000.0, "it starves"
            self.now_s += load_s
            self.loads_s.append(self.now_s)
            self.here[name] = one = copy(name, 1, load_s, now_s=self.now_s)
            self.policy.on_insert(one, self.now_s)
            found = self.watch.loaded(ModelName(name), self.now_s)
            self.told += [] if found is None else [found]
        self.longest_wait_s = max(self.longest_wait_s, self.now_s - began_s)
        self.now_s += service_s

    def _make_room(self) -> bool:
        room = RoomRequest(need_bytes=1, free_bytes=self.places - len(self.here), now_s=self.now_s)
        rules = EvictionRules(min_residency_s=self.residency_s)
        plan = plan_resident(self.policy, room, self.here, rules)
        for victim in plan.victims:
            del self.here[victim.subject]
            self.policy.on_evict(victim.subject, self.now_s)
            self.watch.evicted(victim.model, 1, self.now_s)
        return plan.enough


def iam(rules: HysteresisRules = RULES) -> Iam:
    return Iam(hysteresis=Hysteresis(rules))


def in_turn(places: int, policy: EvictionPolicy, service_s: float, rounds: int = 60) -> Turns:
    turns = Turns(places, policy)
    for number in range(rounds * (places + 1)):
        turns.ask(turns.names[number % (places + 1)], load_s=0.1, service_s=service_s)
    return turns


@pytest.mark.parametrize("service_s", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("places", [2, 3, 5, 8])
def test_all_but_one_place_keep_their_models(places: int, service_s: float) -> None:
    """Two loads a round are those of the last place, which two models share."""
    turns = in_turn(places, iam(), service_s)
    late = sum(one >= turns.now_s / 2 for one in turns.loads_s)
    assert late <= 2.5 * 30
    assert turns.told
    assert "Any of these ends it" in turns.told[0].advice


@pytest.mark.parametrize("places", [2, 7, 8])
def test_without_it_there_are_more_reloads(places: int) -> None:
    held, free = (len(in_turn(places, iam(rules), 2.0).loads_s) for rules in (RULES, NONE))
    assert held < 0.8 * free


@pytest.mark.parametrize("places", [3, 7, 15])
def test_ours_keeps_most_places_too(places: int) -> None:
    """By its choice among orders: recency would load for each request."""
    turns = in_turn(places, Forecast(places), 2.0, rounds=300)
    late = sum(one >= turns.now_s / 2 for one in turns.loads_s)
    assert late <= 150 * (places + 1) * 0.6


@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("ours", [False, True])
@given(
    places=st.integers(1, 6),
    load_s=st.sampled_from([0.1, 1.0, 5.0]),
    residency_s=st.sampled_from([1.0, 4.0]),
    service_s=st.sampled_from([0.0, 0.5, 3.0]),
    seed=st.none() | st.integers(0, 99),
)
def test_reloads_are_bounded_and_none_starves_in_any_order(
    ours: bool, places: int, load_s: float, residency_s: float, service_s: float, seed: int | None
) -> None:
    """A place changes its model no oftener than once in a load and the minimum residency."""
    policy = Forecast(places) if ours else iam()
    turns, rng = Turns(places, policy, residency_s), random.Random(seed)
    for _ in range(12):
        names = turns.names if seed is None else rng.sample(turns.names, len(turns.names))
        for name in names:
            turns.ask(name, load_s, service_s)
    for first, later in zip(turns.loads_s, turns.loads_s[2 * places :], strict=False):
        assert later - first >= load_s + residency_s - 1e-6
    assert turns.longest_wait_s <= residency_s + load_s + 0.1 + 1e-6


@given(
    st.lists(st.tuples(st.sampled_from("guc"), st.floats(0.0, 400.0)), max_size=30),
    st.floats(0.0, 1e4),
)
def test_the_margin_is_never_exceeded(events: list[tuple[str, float]], age_s: float) -> None:
    hysteresis, now_s, comebacks = Hysteresis(RULES), 0.0, 0
    gone_s: float | None = None
    for kind, gap_s in events:
        now_s += gap_s
        if kind in "gu":
            hysteresis.gone(M, now_s, used=kind == "u")
            gone_s = now_s if kind == "g" else None
        else:
            hysteresis.came(M, now_s)
            comebacks += gone_s is not None and now_s - gone_s <= RULES.soon_s
            gone_s = None
    factor = hysteresis.factor(M, now_s - age_s, now_s)
    assert 1.0 <= factor <= 1.0 + RULES.margin
    if comebacks < 2:
        assert factor == 1.0, "once may be chance"
    assert hysteresis.factor(ModelName("other"), now_s - age_s, now_s) == 1.0


def test_a_factor_by_hand() -> None:
    hysteresis = Hysteresis(HysteresisRules(margin=1.0, settled_s=10.0, half_life_s=100.0))
    for at_s in (0.0, 10.0, 20.0, 30.0):
        hysteresis.gone(M, at_s, used=False)
        hysteresis.came(M, at_s)
    count = sum(2 ** -((30 - at_s) / 100) for at_s in (0, 10, 20, 30))
    settled = 1 - 2.718281828459045 ** -(20 / 10)
    assert hysteresis.factor(M, 10.0, 30.0) == pytest.approx(1 + (count - 1) / count * settled)
    assert hysteresis.factor(M, 10.0, 3000.0) == 1.0, "it is forgotten"


def test_what_is_more_important_by_more_than_the_margin_stays() -> None:
    turns = in_turn(2, iam(), 1.0)
    settled = min(turns.here.values(), key=lambda one: one.resident_since_s)
    dear = copy("dear", 1, 100.0 * settled.penalty_s, now_s=turns.now_s)
    turns.policy.on_access(access("dear", turns.now_s))
    turns.policy.on_insert(dear, turns.now_s)
    assert list(turns.policy.ranked(turns.now_s))[-1] == "dear"
