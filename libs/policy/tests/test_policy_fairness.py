"""Turns of tenants: shares follow weights, a flood delays nobody by more than a bound, and one
tenant alone is served in its own order.
"""

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.fairness import FairTurns, Holding, makes_way

COST = st.floats(1, 100)
WEIGHT = st.floats(0.1, 10)


@given(
    weights=st.lists(WEIGHT, min_size=2, max_size=6),
    costs=st.lists(COST, min_size=50, max_size=300),
)
def test_what_backlogged_tenants_get_differs_by_a_request_of_each(
    weights: list[float], costs: list[float]
) -> None:
    turns, got = FairTurns(), [0.0] * len(weights)
    for tenant in range(len(weights)):
        turns.begin(str(tenant))
    for cost in costs:
        tenant = int(turns.next())
        turns.served(str(tenant), cost, weights[tenant])
        got[tenant] += cost
        for one, its in enumerate(weights):
            for other, others in enumerate(weights[:one]):
                apart = abs(got[one] / its - got[other] / others)
                assert apart <= 100 / its + 100 / others + 1e-6


def test_shares_converge_to_weights() -> None:
    turns, got, weights = FairTurns(), Counter[str](), {"a": 3.0, "b": 1.0}
    for tenant in weights:
        turns.begin(tenant)
    for _ in range(4000):
        tenant = turns.next()
        turns.served(tenant, 10, weights[tenant])
        got[tenant] += 10
    assert abs(got["a"] / got["b"] - 3) < 0.01


@given(flood=st.integers(1, 400), costs=st.lists(COST, min_size=401, max_size=401), weight=WEIGHT)
def test_a_flood_delays_another_by_a_bound_whatever_its_length(
    flood: int, costs: list[float], weight: float
) -> None:
    """A request of one that asks little waits for one of the flood's requests, and for what the
    flood had got ahead by, of equal cost by weight.
    """
    turns, waiting = FairTurns(), deque(costs[:flood])
    turns.begin("flood")
    for _ in range(flood // 2):
        assert turns.next() == "flood"
        turns.served("flood", waiting.popleft(), 1.0)
    turns.begin("little")
    before = 0.0
    while waiting and turns.next() == "flood":
        before += waiting[0]
        turns.served("flood", waiting.popleft(), 1.0)
    assert before <= 100  # one of its requests
    # From then on, each request of its own is worth as much of the flood's, by weight.
    if waiting:
        turns.served("little", 50, weight)
        before = 0.0
        while waiting and turns.next() == "flood":
            before += waiting[0]
            turns.served("flood", waiting.popleft(), 1.0)
        assert before <= 50 / weight + 2 * 100


def test_nothing_is_saved_up_while_nothing_is_asked_for() -> None:
    turns = FairTurns()
    turns.begin("early")
    turns.begin("late")
    turns.end("late")
    for _ in range(100):
        turns.served("early", 1, 1.0)
    turns.begin("late")
    got = Counter[str]()
    for _ in range(20):
        tenant = turns.next()
        turns.served(tenant, 1, 1.0)
        got[tenant] += 1
    assert abs(got["early"] - got["late"]) <= 2


def test_leaving_and_coming_back_gives_no_claim() -> None:
    turns, got = FairTurns(), Counter[str]()
    turns.begin("stays")
    for _ in range(100):
        turns.begin("flits")
        tenant = turns.next()
        turns.served(tenant, 1, 1.0)
        got[tenant] += 1
        turns.end("flits")
    assert got["flits"] <= 51


def test_nobody_owes_anything_once_nobody_waits() -> None:
    turns = FairTurns()
    turns.begin("a")
    turns.served("a", 1_000_000, 1.0)
    turns.end("a")
    turns.begin("b")
    turns.begin("a")
    turns.served("b", 1, 1.0)
    assert turns.next() == "a"
    assert len(turns) == 2


def test_who_has_most_by_weight_makes_way_and_nobody_is_driven_out_in_turns() -> None:
    new = Holding("new", 0)
    assert makes_way([Holding("flood", 10), Holding("some", 3)], new) == "flood"
    assert makes_way([Holding("flood", 10, weight=10), Holding("some", 3)], new) == "some"
    assert makes_way([Holding("new", 4)], Holding("new", 4)) is None
    assert makes_way([Holding("a", 2), Holding("new", 1)], Holding("new", 1)) is None
    assert makes_way([], new) is None


@given(places=st.lists(st.integers(1, 40), min_size=1, max_size=6), weight=WEIGHT)
def test_places_settle(places: list[int], weight: float) -> None:
    """A newcomer that goes on asking ends with its share, and then takes nothing more."""
    held = {f"t{n}": count for n, count in enumerate(places)} | {"new": 0}
    for _ in range(sum(places) + 1):
        holdings = [Holding(who, count) for who, count in held.items() if who != "new"]
        way = makes_way(holdings, Holding("new", held["new"], weight))
        if way is None:
            break
        held[way] -= 1
        held["new"] += 1
    else:
        raise AssertionError("it goes on for ever")
    assert sum(held.values()) == sum(places)
    rest = max(count for who, count in held.items() if who != "new")
    assert rest >= held["new"] / weight - 1e-9 or held["new"] == 0
