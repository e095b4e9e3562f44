"""Workloads by name: what ``pilotlight simulate cache`` and the benchmark run."""

from collections.abc import Callable, Mapping
from functools import partial

from pilotlight.sim.cache.modern import ModernMix, modern_workload
from pilotlight.sim.cache.paper import Drift, Pairing, paper_workload
from pilotlight.sim.cache.workload import Workload

DRIFT = Drift(period_s=300.0)
MODERN: Mapping[str, ModernMix] = {
    "modern": ModernMix(),
    "modern-drift": ModernMix(drift_s=600.0),
    "modern-sessions": ModernMix(requests=5000, requests_per_session=4.0),
}


def _modern(mix: ModernMix, seed: int) -> Workload:
    return modern_workload(seed, mix)


def _paper(pairing: Pairing, drift: Drift | None, seed: int) -> Workload:
    return paper_workload(pairing, seed, drift=drift)


SCENARIOS: Mapping[str, Callable[[int], Workload]] = {
    **{name: partial(_modern, mix) for name, mix in MODERN.items()},
    **{f"paper-{pairing}": partial(_paper, pairing, None) for pairing in Pairing},
    **{f"paper-{pairing}-drift": partial(_paper, pairing, DRIFT) for pairing in Pairing},
}
"""How each is made from a seed."""
DEFAULT = "modern"
TUNED_ON = range(5)
"""Seeds that policies may be tuned on."""
REPORTED_ON = range(5, 15)
"""Seeds whose results are reported."""
