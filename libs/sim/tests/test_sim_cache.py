"""The cache simulation: workloads, what a run counts, bounds against brute force."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.informed import TrueRates
from pilotlight.sim.cache.modern import ModernMix, modern_workload, shapes
from pilotlight.sim.cache.optimum import least_load_s
from pilotlight.sim.cache.paper import REQUESTS, Drift, Pairing, catalogue, paper_workload
from pilotlight.sim.cache.run import simulate
from pilotlight.sim.cache.scenarios import SCENARIOS
from pilotlight.sim.cache.workload import (
    BadWorkload,
    CatalogueEntry,
    TimedRequest,
    Workload,
    read_catalogue,
    read_trace,
)


def entry(name: str, size_bytes: int, load_s: float) -> CatalogueEntry:
    return CatalogueEntry(model=ModelName(name), size_bytes=size_bytes, load_s=load_s)


def workload(names: str, *entries: CatalogueEntry) -> Workload:
    return Workload(
        name="by hand",
        catalogue={one.model: one for one in entries},
        requests=[TimedRequest(float(at), ModelName(name)) for at, name in enumerate(names)],
    )


@st.composite
def small_workloads(draw: st.DrawFn) -> tuple[Workload, int]:
    entries = [
        entry(name, draw(st.integers(1, 6)), float(draw(st.integers(1, 9)))) for name in "abcd"
    ]
    names = draw(st.text("abcd", min_size=1, max_size=12))
    return workload(names, *entries), draw(st.integers(1, 14))


def by_brute_force(given: Workload, capacity_bytes: int) -> float:
    """The least load time over every choice of what stays."""

    def least(place: int, held: frozenset[ModelName]) -> float:
        if place == len(given.requests):
            return 0.0
        model = given.requests[place].model
        one = given.catalogue[model]
        if one.size_bytes > capacity_bytes:
            return one.load_s + least(place + 1, held)
        cost_s = 0.0 if model in held else one.load_s
        others = held - {model}
        return cost_s + min(
            least(place + 1, frozenset({model, *kept}))
            for count in range(len(others) + 1)
            for kept in itertools.combinations(sorted(others), count)
            if sum(given.catalogue[each].size_bytes for each in (model, *kept)) <= capacity_bytes
        )

    return least(0, frozenset())


@settings(max_examples=40, deadline=None)
@given(small_workloads())
def test_the_optimum_is_that_of_brute_force(given: tuple[Workload, int]) -> None:
    found, capacity_bytes = given
    least_s = least_load_s(found.requests, found.catalogue, capacity_bytes)
    assert least_s == pytest.approx(by_brute_force(found, capacity_bytes))


@settings(max_examples=60, deadline=None)
@given(small_workloads(), st.sampled_from([*POLICIES, "true-rates"]))
def test_no_policy_beats_the_optimum_and_counts_add_up(
    given: tuple[Workload, int], name: str
) -> None:
    found, capacity_bytes = given
    policy = TrueRates([(0.0, {})]) if name == "true-rates" else make_policy(name, capacity_bytes)
    result = simulate(policy, found, capacity_bytes)
    assert result.load_s >= least_load_s(found.requests, found.catalogue, capacity_bytes) - 1e-9
    assert result.hits + result.first_loads + result.reloads == len(found.requests)
    assert result.first_loads == len({one.model for one in found.requests})
    assert result.load_s_sorted[-1] <= max(one.load_s for one in found.catalogue.values())


def test_a_run_by_hand() -> None:
    """LRU with room for two of size 1: a b hit, c evicts b, b comes back."""
    found = workload("abacb", entry("a", 1, 1.0), entry("b", 1, 2.0), entry("c", 1, 4.0))
    result = simulate(Lru(), found, 2)
    assert (result.hits, result.first_loads, result.reloads, result.evictions) == (1, 3, 1, 2)
    assert result.load_s == 9.0
    assert result.reload_s_per_request == pytest.approx(2.0 / 5)
    assert [result.quantile_s(share) for share in (0.2, 0.4, 0.99)] == [0.0, 1.0, 4.0]


def test_a_model_that_never_fits_evicts_nothing() -> None:
    found = workload("abba", entry("a", 1, 1.0), entry("b", 5, 3.0))
    result = simulate(Lru(), found, 2)
    assert (result.hits, result.reloads, result.evictions, result.load_s) == (1, 1, 0, 7.0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_equal_seeds_give_equal_workloads(name: str) -> None:
    once, again, other = (SCENARIOS[name](seed) for seed in (3, 3, 4))
    assert once == again
    assert once.requests != other.requests
    times = [one.time_s for one in once.requests]
    assert times == sorted(times)


def test_the_paper_s_workloads_have_its_shape() -> None:
    for pairing in Pairing:
        found = paper_workload(pairing, 1)
        assert len(found.requests) == REQUESTS
        assert set(found.catalogue) == set(catalogue())
    shares = Counter(one.model for one in paper_workload(Pairing.ROUND_ROBIN, 1).requests)
    assert max(shares.values()) < 2.5 * min(shares.values()), "nearly equal popularity"
    slow, fast = ModelName("gpt2"), ModelName("resnet50")
    for pairing, popular in ((Pairing.QUANTILE, slow), (Pairing.QUANTILE_R, fast)):
        shares = Counter(one.model for one in paper_workload(pairing, 1).requests)
        assert shares.most_common(1)[0][0] == popular


def test_drift_changes_popularity_and_says_so() -> None:
    found = paper_workload(Pairing.QUANTILE, 1, drift=Drift(period_s=600.0))
    assert [began_s for began_s, _ in found.true_rates] == [600.0 * number for number in range(6)]
    rates = [tuple(each.values()) for _, each in found.true_rates]
    assert len(set(rates)) > 1
    assert len(found.requests) == REQUESTS


def test_the_modern_mix_follows_its_law_and_its_shapes() -> None:
    found = modern_workload(2)
    assert len(found.requests) == pytest.approx(ModernMix().requests, abs=2)
    sizes = [one.size_bytes for one in found.catalogue.values()]
    assert 0.5e9 <= min(sizes) < 0.7e9
    assert 100e9 < max(sizes) <= 140e9
    ((_, rates),) = found.true_rates
    counts = Counter(one.model for one in found.requests)
    for model, rate in sorted(rates.items(), key=lambda one: -one[1])[:5]:
        assert counts[model] == pytest.approx(3600 * rate, rel=0.15)
    assert {name: sum(shape) for name, shape in shapes().items()} == {
        "conversations": 19_366,
        "code": 8_819,
    }


def test_knowing_the_rates_is_better_than_recency() -> None:
    found = modern_workload(0, ModernMix(models=100, requests=4000))
    capacity_bytes = found.total_bytes // 5
    known = simulate(TrueRates(found.true_rates), found, capacity_bytes)
    assert known.load_s < 0.95 * simulate(Lru(), found, capacity_bytes).load_s


@pytest.mark.parametrize("period_s", [300.0, 900.0])
def test_ours_is_not_behind_recency_where_popularity_drifts(period_s: float) -> None:
    ours_s = recency_s = 0.0
    for pairing, seed in itertools.product((Pairing.RANDOM, Pairing.QUANTILE), range(2)):
        found = paper_workload(pairing, seed, drift=Drift(period_s=period_s))
        capacity_bytes = int(0.6 * found.total_bytes)
        ours_s += simulate(make_policy("pilotlight", capacity_bytes), found, capacity_bytes).load_s
        recency_s += simulate(Lru(), found, capacity_bytes).load_s
    assert ours_s < 1.02 * recency_s


def test_a_trace_and_a_catalogue_are_read() -> None:
    entries = read_catalogue(["load_s,model,size_bytes", "1.5, a ,100", "", "2,b,3e9"])
    assert entries[ModelName("b")] == entry("b", 3_000_000_000, 2.0)
    found = read_trace(["time_s,model,user", "2,a,x", "1,b,y"], entries)
    assert found == [TimedRequest(1.0, ModelName("b")), TimedRequest(2.0, ModelName("a"))]


@pytest.mark.parametrize(
    ("catalogue_lines", "trace_lines", "said"),
    [
        (["model,size_bytes", "a,1"], [], "the first line must name"),
        (["model,size_bytes,load_s"], [], "catalogue is empty"),
        (["model,size_bytes,load_s", "a,0,1"], [], "line 2: a size above 0"),
        (["model,size_bytes,load_s", "a,x,1"], [], "'x' is not a number"),
        (["model,size_bytes,load_s", "a,nan,1"], [], "not a finite number"),
        (["model,size_bytes,load_s", "a,1"], [], "line 2: 3 columns"),
        (["model,size_bytes,load_s", "a,1,1", "a,2,1"], [], "line 3: a is there already"),
        (["model,size_bytes,load_s", "a,1,1"], ["time_s,model"], "trace is empty"),
        (["model,size_bytes,load_s", "a,1,1"], ["time_s,model", "1,z"], "z is not in"),
    ],
)
def test_what_cannot_be_used_is_named(
    catalogue_lines: list[str], trace_lines: list[str], said: str
) -> None:
    with pytest.raises(BadWorkload, match=said):
        read_trace(trace_lines, read_catalogue(catalogue_lines))


def test_random_policies_stay_within_the_cache() -> None:
    """Capacity is never exceeded: the run would evict what is not there."""
    rng = random.Random(0)
    entries = [entry(f"m{number}", rng.randrange(1, 30), rng.random()) for number in range(40)]
    requests = [TimedRequest(float(at), rng.choice(entries).model) for at in range(1500)]
    found = Workload(
        name="random", catalogue={one.model: one for one in entries}, requests=requests
    )
    for name in POLICIES:
        result = simulate(make_policy(name, 60), found, 60)
        assert result.evictions > 0
        assert 0 < result.hits < 1500
