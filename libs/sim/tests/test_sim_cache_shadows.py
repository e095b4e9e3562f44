"""A shadow cache of the live service hits what the simulator says of its policy."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.choice import make_policy
from pilotlight.policy.eviction.shadows import RIVALS, Shadow
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.run import copy_of, simulate
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest, Workload


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
        access = Access(model=request.model, count=1, at_s=request.time_s)
        shadow.ask(access, copy_of(entries[request.model], request.time_s))
    workload = Workload(name="w", catalogue=entries, requests=requests)
    said = simulate(make_policy(name, 30), workload, 30)
    assert (shadow.count.hits, shadow.count.load_s) == (said.hits, pytest.approx(said.load_s))
