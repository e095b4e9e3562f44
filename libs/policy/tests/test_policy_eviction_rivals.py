"""Our few lines of each rival against libCacheSim's, where both exist, and against papers'
examples.
"""

import random
from collections import Counter
from collections.abc import Callable

import libcachesim
import pytest
from evicted_copies import SmallCache, copy

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.choice import make_policy
from pilotlight.policy.ids import ModelName


def zipf_trace(count: int, models: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    weights = [1 / (place + 1) ** 0.9 for place in range(models)]
    return rng.choices(range(models), weights, k=count)


def misses_of_libcachesim(
    made: Callable[[int], libcachesim.CacheBase], trace: list[int], capacity: int
) -> list[bool]:
    cache = made(capacity)
    return [
        not cache.get(libcachesim.Request(obj_id=one + 1, obj_size=1, op=libcachesim.ReqOp.OP_GET))
        for one in trace
    ]


@pytest.mark.parametrize(
    ("name", "made", "tolerance"),
    [
        ("lru", libcachesim.LRU, 0.0),
        ("lfu", libcachesim.LFU, 0.01),
        ("arc", libcachesim.ARC, 0.01),
        ("gdsf", libcachesim.GDSF, 0.01),
        ("s3-fifo", libcachesim.S3FIFO, 0.02),
        ("lhd", libcachesim.LHD, 0.03),
    ],
)
@pytest.mark.parametrize("capacity", [20, 100])
def test_misses_are_those_of_libcachesim(
    name: str, made: Callable[[int], libcachesim.CacheBase], tolerance: float, capacity: int
) -> None:
    trace = zipf_trace(6000, 400, seed=capacity)
    theirs = misses_of_libcachesim(made, trace, capacity)
    cache = SmallCache(make_policy(name, capacity), capacity)
    ours = [not cache.ask(f"m{one}") for one in trace]
    assert abs(sum(ours) - sum(theirs)) <= tolerance * len(trace), (sum(ours), sum(theirs))
    if tolerance == 0.0:
        assert ours == theirs


def in_turn(policy: str, names: str, capacity: int) -> tuple[str, set[str]]:
    """Hits and misses as a word of H and M, and what is there at the end."""
    cache = SmallCache(make_policy(policy, capacity), capacity)
    said = "".join("H" if cache.ask(name) else "M" for name in names)
    return said, set(cache.resident)


def test_srrip_keeps_what_was_used_again_from_a_scan() -> None:
    """Jaleel et al., Fig. 3: a scan between two uses of a working set; LRU loses it, SRRIP with
    two bits does not."""
    trace = "ab" + "ab" + "wxyz" + "ab"
    assert in_turn("srrip", trace, 4)[0][-2:] == "HH"
    assert in_turn("lru", trace, 4)[0][-2:] == "MM"


def test_srrip_ages_until_one_may_go() -> None:
    said, there = in_turn("srrip", "aabbc" + "d", 3)
    assert said == "MHMHMM"
    assert there == {"a", "b", "d"}, "c came with RRPV 2, a and b were at 0"
    assert in_turn("srrip", "aabbc" + "dee" + "f", 3)[1] == {"e", "b", "f"}, "a was the oldest at 0"


def test_arc_remembers_what_went_and_adapts() -> None:
    """What went from T1 and comes back goes to T2 and enlarges T1's target."""
    said, there = in_turn("arc", "aabcd" + "b", 3)
    assert said == "MHMMMM"
    assert "a" in there
    assert "b" in there


def test_s3_fifo_moves_what_was_used_out_of_the_small_queue() -> None:
    """Algorithm 1: ten copies that were hit twice go to the main queue while k makes a look for a
    victim; there a hit is another turn."""
    trace = "".join(3 * name for name in "abcdefghij")
    said, there = in_turn("s3-fifo", trace + "k", 10)
    assert said == 10 * "MHH" + "M"
    assert there == set("bcdefghijk"), "a is the head of the main queue"
    assert in_turn("s3-fifo", trace + "kbl", 10)[1] == set("bdefghijkl"), "b has another turn"


def test_cost_keeps_the_dear_model() -> None:
    for name, keeps in (("gdsf", True), ("idle-over-cost", True), ("lru", False)):
        cache = SmallCache(make_policy(name, 3), 3)
        cache.ask("dear", penalty_s=50.0)
        for other in "abcd":
            cache.ask(other)
        assert ("dear" in cache.resident) is keeps, name


def test_gdsf_ages_what_is_not_used() -> None:
    cache = SmallCache(make_policy("gdsf", 2), 2)
    cache.ask("dear", penalty_s=5.0)
    for number in range(12):
        cache.ask(f"m{number}")
    assert "dear" not in cache.resident


def test_time_to_live_lets_go_of_the_idle_and_of_the_oldest_before() -> None:
    policy = make_policy("ttl", 10)
    for name, at_s in (("old", 0.0), ("young", 200.0)):
        policy.on_insert(copy(name, now_s=at_s), at_s)
    assert policy.expired(299.0) == []
    assert policy.expired(300.0) == ["old"]
    policy.on_access(Access(model=ModelName("old"), count=1, at_s=300.0))
    assert policy.expired(499.0) == []
    assert policy.expired(501.0) == ["young"]
    looking = policy.ranked(499.0)
    assert list(looking) == ["young", "old"]


def test_hit_density_prefers_small_copies_of_equal_use() -> None:
    rng = random.Random(1)
    cache = SmallCache(make_policy("lhd", 120), 120)
    there = Counter[str]()
    for _ in range(8000):
        name = f"{'small' if rng.random() < 0.5 else 'large'}{rng.randrange(20)}"
        cache.ask(name, size_bytes=2 if name.startswith("small") else 20)
        there.update(one[:5] for one in cache.resident)
    assert there["small"] > 4 * there["large"]
