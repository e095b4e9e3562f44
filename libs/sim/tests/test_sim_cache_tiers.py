"""Two tiers of one node: a run by hand, and what holds for every policy."""

import random

import pytest

from pilotlight.policy.eviction.base import EvictionPolicy
from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.run import simulate
from pilotlight.sim.cache.tiers import from_host_s, simulate_tiers
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest, Workload


def workload(names: str, **load_s: float) -> Workload:
    entries = {
        ModelName(name): CatalogueEntry(model=ModelName(name), size_bytes=1, load_s=one)
        for name, one in load_s.items()
    }
    requests = [TimedRequest(float(at), ModelName(name)) for at, name in enumerate(names)]
    return Workload(name="by hand", catalogue=entries, requests=requests)


def test_a_run_by_hand() -> None:
    """Room for one on the device, for two in the host: c drives a from the host, not from below."""
    found = workload("aabacbb", a=1.0, b=2.0, c=4.0)
    result = simulate_tiers(lambda _: Lru(), found, 1, 2)
    fetch_s = from_host_s(found.catalogue[ModelName("a")])
    # a load, a device, b load, a host, c load (b goes from the host), b load, b device
    assert (result.device_hits, result.host_hits) == (2, 1)
    assert result.load_s == pytest.approx(1.0 + 2.0 + 4.0 + 2.0 + 5 * fetch_s)
    assert result.first_load_s == pytest.approx(1.0 + 2.0 + 4.0 + 3 * fetch_s)
    assert result.reload_s_per_request == pytest.approx((2.0 + 2 * fetch_s) / 7)


@pytest.mark.parametrize("name", POLICIES)
def test_a_second_tier_saves_loads_and_no_tier_is_overfull(name: str) -> None:
    rng = random.Random(7)
    entries = {
        model: CatalogueEntry(
            model=model, size_bytes=rng.randrange(1, 30), load_s=rng.uniform(5.0, 9.0)
        )
        for model in (ModelName(f"m{number}") for number in range(30))
    }
    weights = [1 / (place + 1) for place in range(30)]
    drawn = rng.choices(list(entries), weights, k=1200)
    requests = [TimedRequest(float(at), model) for at, model in enumerate(drawn)]
    found = Workload(name="drawn", catalogue=entries, requests=requests)

    def make(capacity_bytes: int) -> EvictionPolicy:
        return make_policy(name, capacity_bytes)

    both = simulate_tiers(make, found, 60, 180)
    alone = simulate(make_policy(name, 60), found, 60)
    assert both.device_hits + both.host_hits <= both.requests
    assert both.host_hits > 0
    assert both.load_s < alone.load_s
