"""Shadow caches hit what a cache with their policy would, within their capacity and at a bounded
cost.
"""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.choice import make_policy
from pilotlight.policy.eviction.shadows import QUIET_S, RIVALS, SAMPLED, Shadow, Shadows
from pilotlight.policy.ids import Digest, ModelName, NodeId
from pilotlight.sim.cache.run import simulate
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest, Workload


def candidate(name: str, size_bytes: int = 10) -> EvictionCandidate:
    return EvictionCandidate(
        subject=name,
        model=ModelName(name),
        digest=Digest(name),
        tier=Tier.DEVICE,
        node_id=NodeId(""),
        size_bytes=size_bytes,
        resident_since_s=0.0,
        last_used_s=0.0,
        penalty_s=2.0,
    )


def access(name: str, at_s: float, count: int = 1) -> Access:
    return Access(model=ModelName(name), count=count, at_s=at_s)


def test_lru_in_a_shadow_is_lru() -> None:
    shadow, recent = Shadow("lru", 30), list[str]()
    hits = 0
    for at, name in enumerate("abcadbcaddbacdbca"):
        hits += name in recent[-3:]
        recent = [one for one in recent if one != name] + [name]
        shadow.ask(access(name, float(at)), candidate(name))
    assert shadow.count.hits == hits > 0
    assert (shadow.count.requests, shadow.count.loads) == (17, 17 - hits)
    assert shadow.count.load_s == 2.0 * shadow.count.loads


@pytest.mark.parametrize("name", RIVALS)
@given(st.lists(st.tuples(st.integers(0, 7), st.floats(0.5, 900.0)), min_size=1, max_size=60))
def test_a_shadow_hits_what_the_simulator_says_of_its_policy(
    name: str, asked: list[tuple[int, float]]
) -> None:
    """Of every policy, those with a time to live too."""
    entries = {
        ModelName(f"m{number}"): CatalogueEntry(
            model=ModelName(f"m{number}"), size_bytes=5 + number, load_s=2.0
        )
        for number in range(8)
    }
    times = itertools.accumulate(gap_s for _, gap_s in asked)
    requests = [
        TimedRequest(at_s, ModelName(f"m{number}"))
        for at_s, (number, _) in zip(times, asked, strict=True)
    ]
    shadow = Shadow(name, 30)
    for request in requests:
        size_bytes = entries[request.model].size_bytes
        fresh = replace(candidate(request.model, size_bytes), resident_since_s=request.time_s)
        shadow.ask(access(request.model, request.time_s), fresh)
    workload = Workload(name="w", catalogue=entries, requests=requests)
    said = simulate(make_policy(name, 30), workload, 30)
    assert (shadow.count.hits, shadow.count.load_s) == (said.hits, pytest.approx(said.load_s))


ASKED = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 3), st.floats(0.1, 9.0), st.integers(20, 60)),
    max_size=40,
)


@given(st.sampled_from(RIVALS), ASKED)
def test_no_shadow_holds_more_than_it_may(
    name: str, asked: list[tuple[int, int, float, int]]
) -> None:
    shadow, now_s, requests = Shadow(name, 40), 0.0, 0
    for number, count, gap_s, capacity_bytes in asked:
        now_s += gap_s
        requests += count
        shadow.resize(capacity_bytes)
        loads = shadow.count.loads
        shadow.ask(access(f"m{number}", now_s, count), candidate(f"m{number}", 5 + number))
        if shadow.count.loads > loads:
            assert shadow.used_bytes <= capacity_bytes
    assert shadow.count.requests == requests
    assert shadow.count.hits + shadow.count.loads == requests


def test_models_are_sampled_so_that_the_cost_is_bounded() -> None:
    shadows = Shadows(("lru",))
    shadows.resize(1000, 10)
    assert all(shadows.samples(f"m{number}") for number in range(10))
    shadows.resize(1000, 10_000)
    sampled = [number for number in range(10_000) if shadows.samples(f"m{number}")]
    assert 0.7 * SAMPLED < len(sampled) < 1.3 * SAMPLED
    shadows.resize(1000, 12_000)
    assert sampled == [number for number in range(10_000) if shadows.samples(f"m{number}")]


def test_what_comes_within_a_moment_is_a_hit_and_costs_nothing() -> None:
    shadows = Shadows(("lru", "iam"))
    shadows.resize(100, 1)
    for at_s in (0.0, QUIET_S / 2, QUIET_S, QUIET_S * 1.5):
        shadows.ask(access("m", at_s, 2), candidate("m"))
    for shadow in shadows.of.values():
        assert (shadow.count.requests, shadow.count.hits, shadow.count.loads) == (8, 7, 1)
