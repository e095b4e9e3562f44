"""The lower bound of ``make bench-cache``: below the exact optimum, and equal where nothing need be
kept in part."""

import random
from pathlib import Path

import pytest

from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.optimum import least_load_s
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest

BENCH = Path(__file__).resolve().parents[3] / "bench"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def drawn(
    seed: int, largest: int
) -> tuple[list[TimedRequest], dict[ModelName, CatalogueEntry], float]:
    """Requests, a catalogue, and the seconds of first loads."""
    rng = random.Random(seed)
    entries = {
        name: CatalogueEntry(
            model=name, size_bytes=rng.randint(1, largest) * MIB, load_s=rng.uniform(1.0, 9.0)
        )
        for name in map(ModelName, "abcdefg")
    }
    requests = [TimedRequest(float(at), rng.choice(list(entries))) for at in range(80)]
    first_s = sum(entries[name].load_s for name in {one.model for one in requests})
    return requests, entries, first_s


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_lies_below_the_optimum_and_not_far(seed: int) -> None:
    from cache_bound import least_reload_s

    requests, entries, first_s = drawn(seed, largest=6)
    for capacity in (4, 9, 14):
        exact_s = least_load_s(requests, entries, capacity * MIB) - first_s
        bound_s = least_reload_s(requests, entries, capacity * MIB)
        assert bound_s <= exact_s + 1e-6
        assert bound_s >= 0.5 * exact_s - 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_copies_of_one_size_are_never_kept_in_part(seed: int) -> None:
    from cache_bound import least_reload_s

    requests, entries, first_s = drawn(seed, largest=1)
    for capacity in (1, 2, 4, 7):
        exact_s = least_load_s(requests, entries, capacity * MIB) - first_s
        assert least_reload_s(requests, entries, capacity * MIB) == pytest.approx(exact_s)
