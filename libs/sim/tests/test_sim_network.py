"""Flows over shared links."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.coldstart.contention import LinkName
from pilotlight.sim.cluster.events import Events
from pilotlight.sim.cluster.network import Flow, Network, max_min, shared

A, B, C = LinkName("a"), LinkName("b"), LinkName("c")


def _flow(*links: LinkName, limit: float = float("inf")) -> Flow:
    return Flow(links, 1.0, 1.0, lambda: None, limit)


def test_what_a_limited_flow_leaves_goes_to_the_others() -> None:
    """The textbook's example: two flows over one link, one of which is bound elsewhere."""
    bound, free = _flow(A, B), _flow(A)
    assert max_min([bound, free], {A: 10.0, B: 2.0}) == {bound: 2.0, free: 8.0}
    limited = _flow(A, limit=1.0)
    assert max_min([limited, free], {A: 10.0}) == {limited: 1.0, free: 9.0}


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_rates_are_max_min_fair(seed: int) -> None:
    """No link carries more than it can; each flow is bound by its limit, or by a full link on which
    no flow has more.
    """
    rng = random.Random(seed)
    links = [LinkName(f"l{number}") for number in range(5)]
    capacities = {link: rng.uniform(1, 20) for link in links}
    flows = [
        _flow(*rng.sample(links, rng.randint(1, 3)), limit=rng.choice([0.5, 3.0, float("inf")]))
        for _ in range(rng.randint(1, 9))
    ]
    rates = max_min(flows, capacities)
    used = {link: sum(rates[one] for one in flows if link in one.links) for link in links}
    assert all(used[link] <= capacities[link] * (1 + 1e-6) for link in links)
    for one in flows:
        full = [link for link in one.links if used[link] >= capacities[link] * (1 - 1e-6)]
        most = [
            max(rates[other] for other in flows if link in other.links) <= rates[one] * (1 + 1e-6)
            for link in full
        ]
        assert rates[one] >= one.limit_bytes_per_s * (1 - 1e-6) or any(most)


def test_bytes_take_the_time_that_their_share_gives() -> None:
    """Two flows share a link; the second has all of it when the first has ended; a third is given
    up.
    """
    events = Events()
    network = Network(events, {A: 10.0, C: 1.0})
    ended: dict[str, float] = {}
    network.start((A,), 50.0, lambda: ended.setdefault("first", events.now_s))
    network.start((A,), 100.0, lambda: ended.setdefault("second", events.now_s))
    given_up = network.start((C,), 5.0, lambda: ended.setdefault("third", events.now_s))
    events.at(2.0, lambda: network.stop(given_up))
    while events.step(100.0):
        pass
    assert ended == {"first": 10.0, "second": 15.0}


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_what_yields_takes_nothing_from_the_others(seed: int) -> None:
    """Rates of the others are those that they have alone; those behind share what is left."""
    rng = random.Random(seed)
    links = [LinkName(f"l{number}") for number in range(4)]
    capacities = {link: rng.uniform(1, 20) for link in links}
    flows = [
        Flow(tuple(rng.sample(links, rng.randint(1, 2))), 1.0, 1.0, lambda: None, yields=number > 3)
        for number in range(9)
    ]
    rates = shared(flows, capacities)
    first = [one for one in flows if not one.yields]
    assert {one: rates[one] for one in first} == max_min(first, capacities)
    for link in links:
        assert sum(rates[one] for one in flows if link in one.links) <= capacities[link] * 1.000001
    idle = [link for link in links if not any(link in one.links for one in first)]
    assert all(rates[one] > 0 for one in flows if one.yields and set(one.links) <= set(idle))


def test_what_something_waits_for_yields_no_more() -> None:
    events = Events()
    network = Network(events, {A: 10.0})
    ended: dict[str, float] = {}
    network.start((A,), 100.0, lambda: ended.setdefault("first", events.now_s))
    behind = network.start(
        (A,), 20.0, lambda: ended.setdefault("behind", events.now_s), yields=True
    )
    assert behind.bytes_per_s == 0.0
    events.at(2.0, lambda: network.hurry(behind))
    while events.step(100.0):
        pass
    assert ended == {"behind": 6.0, "first": 12.0}
