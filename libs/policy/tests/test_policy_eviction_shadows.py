"""Shadow caches hit what a cache with their policy would, within their capacity and at a bounded
cost.
"""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.shadows import QUIET_S, RIVALS, SAMPLED, Shadow, Shadows
from pilotlight.policy.ids import Digest, ModelName, NodeId


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
