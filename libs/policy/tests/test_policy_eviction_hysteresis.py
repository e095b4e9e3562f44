"""Models in turn over too few places: reloads are bounded, nobody waits beyond its patience for it,
and where nothing comes back nothing waits.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionRules,
    RoomRequest,
    plan_eviction,
)
from pilotlight.policy.eviction.choice import make_policy
from pilotlight.policy.eviction.hysteresis import Hysteresis, Newcomer
from pilotlight.policy.eviction.thrash import Thrash, ThrashWatch
from pilotlight.policy.ids import Digest, ModelName, NodeId
from pilotlight.policy.model import Slo

RULES = Hysteresis(first_s=2.0, longest_s=60.0, margin=2.0)
STEP_S = 0.05


class Turns:
    """Models of one size over some places, each asked for as soon as the one before is served."""

    def __init__(self, models: int, places: int, load_s: float, patience_s: float) -> None:
        self.places, self.load_s, self.patience_s = places, load_s, patience_s
        self.names = [ModelName(f"m{number}") for number in range(models)]
        self.watch, self.policy = ThrashWatch(), make_policy("iam", places)
        self.here: dict[ModelName, tuple[float, float]] = {}
        """Since when, and when each was used last."""
        self.told: list[Thrash] = []
        self.loads_s: list[float] = []
        self.now_s = self.longest_wait_s = 0.0

    def ask(self, name: ModelName, *, hysteresis: bool) -> None:
        self.policy.on_access(Access(model=name, count=1, at_s=self.now_s))
        began_s = self.now_s
        while name not in self.here and not self.make_room(
            name, self.now_s - began_s, hysteresis=hysteresis
        ):
            self.now_s += STEP_S
            assert self.now_s - began_s < 1000.0, "it starves"
        self.longest_wait_s = max(self.longest_wait_s, self.now_s - began_s)
        if name not in self.here:
            self.now_s += self.load_s
            self.loads_s.append(self.now_s)
            found = self.watch.loaded(name, self.now_s)
            self.told += [] if found is None else [found]
        since_s, _ = self.here.get(name, (self.now_s, 0.0))
        self.here[name] = since_s, self.now_s

    def make_room(self, name: ModelName, waited_s: float, *, hysteresis: bool) -> bool:
        newcomer = Newcomer(loss=1.0, waited_s=waited_s, patience_s=self.patience_s)
        room = RoomRequest(
            need_bytes=1,
            free_bytes=self.places - len(self.here),
            now_s=self.now_s,
            newcomer=newcomer if hysteresis else None,
        )
        rules = EvictionRules(min_residency_s=0.0, hysteresis=RULES)
        plan = plan_eviction(self.policy, room, map(self.candidate, self.here), rules)
        for victim in plan.victims:
            del self.here[victim.model]
            self.watch.evicted(victim.model, 1, self.now_s)
        return plan.enough

    def candidate(self, name: ModelName) -> EvictionCandidate:
        since_s, used_s = self.here[name]
        return EvictionCandidate(
            subject=name,
            model=name,
            digest=Digest(name),
            tier=Tier.DEVICE,
            node_id=NodeId("n"),
            size_bytes=1,
            resident_since_s=since_s,
            last_used_s=used_s,
            penalty_s=1.0,
            arrivals_per_s=1.0,
            reloads=self.watch.reloads(self.now_s).get(name, 0),
        )

    def per_hour(self) -> float:
        """Loads of the second half."""
        late = [one for one in self.loads_s if one >= self.now_s / 2]
        return 3600.0 * len(late) / (self.now_s / 2)


@settings(deadline=None, max_examples=25)
@given(
    places=st.integers(1, 5),
    load_s=st.sampled_from([0.1, 0.5, 3.0]),
    patience_s=st.sampled_from([1.0, 4.0]),
)
def test_in_turn_over_one_place_too_few_reloads_are_bounded_and_none_starves(
    places: int, load_s: float, patience_s: float
) -> None:
    turns = Turns(places + 1, places, load_s, patience_s)
    for number in range(40 * (places + 1)):
        turns.ask(turns.names[number % (places + 1)], hysteresis=True)
    turn_s = load_s + (1.0 - 1.0 / RULES.margin) * patience_s
    assert turns.per_hour() <= 1.1 * 3600.0 / turn_s
    assert turns.longest_wait_s <= patience_s + STEP_S
    assert turns.told, "an operator is told"
    assert all(set(one.models) == set(turns.names) for one in turns.told[1:])


def test_without_it_there_are_several_times_as_many() -> None:
    held, free = Turns(3, 2, 0.1, 4.0), Turns(3, 2, 0.1, 4.0)
    for number in range(120):
        held.ask(held.names[number % 3], hysteresis=True)
        free.ask(free.names[number % 3], hysteresis=False)
    assert free.per_hour() > 5 * held.per_hour()


def test_nothing_waits_where_nothing_was_loaded_again() -> None:
    turns = Turns(40, 3, 0.5, 4.0)
    for name in turns.names:
        turns.ask(name, hysteresis=True)
    assert turns.longest_wait_s == 0.0


def test_nothing_more_important_goes_in_the_place_of_what_came_back() -> None:
    """The newcomer waits: it would have taken the place of the one that is asked for all the
    time."""
    turns = Turns(3, 2, 0.1, 4.0)
    turns.here = {ModelName("m0"): (-100.0, 0.0), ModelName("m1"): (0.0, 0.0)}
    turns.watch.evicted(ModelName("m1"), 1, 0.0)
    turns.watch.loaded(ModelName("m1"), 0.0)
    for _ in range(50):
        turns.policy.on_access(Access(model=ModelName("m0"), count=1, at_s=0.0))
    turns.ask(ModelName("m2"), hysteresis=True)
    assert set(turns.here) == {"m0", "m2"}
    assert turns.longest_wait_s > 0.0


@pytest.mark.parametrize(
    ("reloads", "age_s", "loss", "waited_s", "may_go"),
    [
        (0, 0.0, 0.0, 0.0, True),
        (1, 1.9, 1.0, 0.0, False),
        (1, 2.0, 1.0, 0.0, True),
        (2, 3.9, 1.0, 0.0, False),
        (30, 59.9, 1.0, 0.0, False),
        (30, 60.0, 1.0, 0.0, True),
        (5, 0.0, 2.1, 0.0, True),
        (5, 0.0, 2.0, 0.0, False),
        (5, 0.0, 1.0, 1.9, False),
        (5, 0.0, 1.0, 2.1, True),
        (5, 0.0, 0.0, 3.9, False),
        (5, 0.0, 0.0, 4.0, True),
    ],
)
def test_when_a_copy_may_go(
    reloads: int, age_s: float, loss: float, waited_s: float, may_go: bool
) -> None:
    """The candidate's loss is 1, the patience 4 s."""
    newcomer = Newcomer(loss=loss, waited_s=waited_s, patience_s=4.0)
    assert (RULES.why_kept(reloads, 1.0, age_s, newcomer) is None) == may_go
    assert RULES.why_kept(reloads, 1.0, age_s, None) is None


def test_patience_is_what_a_load_leaves() -> None:
    slo = Slo(ttft_ms=2000, tpot_ms=100)
    assert [RULES.patience_s(slo, load_s) for load_s in (0.0, 0.5, 2.0, 9.0)] == [2.0, 1.5, 0, 0]


def test_worth_has_no_bound_but_patience() -> None:
    worths = [Newcomer(loss=1.0, waited_s=at, patience_s=2.0).worth for at in (0.0, 1.0, 1.5, 2.0)]
    assert worths == [1.0, 2.0, 4.0, math.inf]
    assert Newcomer(loss=0.0, waited_s=0.0, patience_s=0.0).worth == math.inf
