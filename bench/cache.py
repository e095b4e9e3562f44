"""What waits for loads under each eviction policy, as one JSON object a line: ``make bench-cache``.

``paper``: mCache's four workloads for seven models, at 20 to 100 % of their bytes, beside the exact
optimum; ``paper-drift``: the same with popularity that changes each five minutes; ``drift``: two
of them at other periods. All three with each set of sizes. ``modern``: hundreds of models, beside a
policy that knows the true rates and a lower bound; ``tiers``: the same models on a device and its
host. ``access``: processor time of an access with 10,000 models.

Policies were tuned on seeds 0 to 4; 5 to 14 are reported. Figures are means over seeds.
``cache_results.py`` makes bench/results/cache.json of the lines, of one run or of several. With
``--jobs`` a cell of a part (a workload at a size of the cache) is a piece of work for one of so
many processes, and lines come as cells end; ``access`` is measured alone, before all others.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cache_bound import MAX_REQUESTS, least_reload_s

from pilotlight.policy.arrivals import Access
from pilotlight.policy.eviction.base import (
    EvictionPolicy,
    EvictionRules,
    RoomRequest,
    plan_resident,
)
from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.informed import TrueRates
from pilotlight.sim.cache.modern import ModernMix, modern_workload
from pilotlight.sim.cache.optimum import least_load_s
from pilotlight.sim.cache.paper import SIZE_SETS, Drift, Pairing, paper_workload
from pilotlight.sim.cache.run import CacheResult, copy_of, simulate
from pilotlight.sim.cache.scenarios import DRIFT, MODERN, REPORTED_ON, TUNED_ON
from pilotlight.sim.cache.tiers import simulate_tiers
from pilotlight.sim.cache.workload import CatalogueEntry, Workload

PAPER_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
MODERN_SHARES = (0.05, 0.1, 0.16, 0.4)
TIER_SHARES = ((0.02, 0.1), (0.04, 0.16))
"""Of all models' bytes: the device, and the host's memory."""
Line = dict[str, object]
Cell = Callable[[], list[Line]]
"""A piece of work, and what it has found: a line for each policy."""
CDF_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
PARTS = ("access", "modern", "tiers", "paper", "paper-drift", "drift")
DRIFT_PERIODS_S = (120.0, 300.0, 600.0, 1200.0, None)
DRIFT_PAIRINGS = (Pairing.RANDOM, Pairing.QUANTILE)
"""Models that are almost equally popular, and models that are not."""
DRIFT_SHARES = (0.4, 0.6, 0.8)
SERVED_S = 0.1
"""Of a request whose model is there: ours, for throughput as the paper's Fig. 10 has it. Requests
are served one after the other."""
ACCESS_MODELS = 10_000


def policies(workload: Workload, capacity_bytes: int, names: list[str]) -> Iterator[EvictionPolicy]:
    """Fresh ones, and the one that knows the true rates."""
    for name in names:
        yield make_policy(name, capacity_bytes)
    yield TrueRates(workload.true_rates)


def measured(
    make: Callable[[int], Workload], seeds: range, share: float, names: list[str]
) -> tuple[dict[str, list[CacheResult]], list[Workload], list[int]]:
    """Results of each policy, seed by seed, with workloads and capacities."""
    results: dict[str, list[CacheResult]] = {}
    workloads = [make(seed) for seed in seeds]
    capacities = [int(share * one.total_bytes) for one in workloads]
    for workload, capacity_bytes in zip(workloads, capacities, strict=True):
        for policy in policies(workload, capacity_bytes, names):
            results.setdefault(policy.name, []).append(simulate(policy, workload, capacity_bytes))
    return results, workloads, capacities


def _paper(pairing: Pairing, size_set: str, drift: Drift | None, seed: int) -> Workload:
    return paper_workload(pairing, seed, size_set, drift)


def _modern(mix: ModernMix, seed: int) -> Workload:
    return modern_workload(seed, mix)


def row(results: list[CacheResult]) -> Line:
    """Means over seeds."""
    return {
        "load_s_per_request": fmean(one.load_s_per_request for one in results),
        "reload_s_per_request": fmean(one.reload_s_per_request for one in results),
        "hit_ratio": fmean(one.hit_ratio for one in results),
        "p99_load_s": fmean(one.quantile_s(0.99) for one in results),
        "reloads": fmean(one.reloads for one in results),
        "throughput_per_s": 1.0 / (fmean(one.load_s_per_request for one in results) + SERVED_S),
        "of_each_seed": {
            "load_s_per_request": [round(one.load_s_per_request, 5) for one in results],
            "reload_s_per_request": [round(one.reload_s_per_request, 5) for one in results],
        },
        "load_s_quantiles": {
            str(share): fmean(one.quantile_s(share) for one in results) for share in CDF_QUANTILES
        },
    }


def paper_cells(seeds: range, names: list[str], drift: Drift | None) -> Iterator[Cell]:
    """Figures 6 to 10 and Table 3 of mCache; with drift, the same where popularity changes."""
    for size_set in SIZE_SETS:
        for pairing in Pairing:
            for share in PAPER_SHARES:
                yield partial(
                    paper_cell,
                    "paper" if drift is None else "paper-drift",
                    partial(_paper, pairing, size_set, drift),
                    seeds,
                    share,
                    names,
                    sizes=size_set,
                    pairing=pairing.value,
                    drift_s=None if drift is None else drift.period_s,
                )


def drift_cells(seeds: range, names: list[str]) -> Iterator[Cell]:
    """How the order of policies depends on how long popularity stays as it is."""
    periods = [None if one is None else Drift(period_s=one) for one in DRIFT_PERIODS_S]
    cells = product(SIZE_SETS, DRIFT_PAIRINGS, periods, DRIFT_SHARES)
    for size_set, pairing, drift, share in cells:
        yield partial(
            paper_cell,
            "drift",
            partial(_paper, pairing, size_set, drift),
            seeds,
            share,
            names,
            sizes=size_set,
            pairing=pairing.value,
            drift_s=None if drift is None else drift.period_s,
        )


def paper_cell(
    part: str,
    make: Callable[[int], Workload],
    seeds: range,
    share: float,
    names: list[str],
    **named: object,
) -> list[Line]:
    """All policies on one of the paper's workloads, beside the exact optimum.

    Args:
        part: One of ``PARTS``.
        make: The workload of a seed.
        seeds: That the means are of.
        share: Of all models' bytes: the cache.
        names: Of policies.
        named: What else names the workload in each line.
    """
    results, workloads, capacities = measured(make, seeds, share, names)
    best_s = fmean(
        least_load_s(one.requests, one.catalogue, capacity) / len(one.requests)
        for one, capacity in zip(workloads, capacities, strict=True)
    )
    return [
        dict(
            part=part,
            **named,
            share=share,
            policy=name,
            **row(found),
            optimum_load_s=best_s,
            over_optimum=fmean(one.load_s_per_request for one in found) / best_s,
        )
        for name, found in results.items()
    ]


def modern_cells(seeds: range, names: list[str], scenarios: list[str]) -> Iterator[Cell]:
    """The modern mix: what each policy closes of the gap between LRU and the bound."""
    for scenario in scenarios:
        for share in MODERN_SHARES:
            yield partial(modern_cell, seeds, names, scenario, share)


def modern_cell(seeds: range, names: list[str], scenario: str, share: float) -> list[Line]:
    """All policies on one mix, beside the policy that knows the true rates, and the bound."""
    results, workloads, capacities = measured(
        partial(_modern, MODERN[scenario]), seeds, share, names
    )
    lru_s = fmean(one.reload_s_per_request for one in results["lru"])
    known_s = fmean(one.reload_s_per_request for one in results["true-rates"])
    least_s = (
        fmean(
            least_reload_s(one.requests, one.catalogue, capacity) / len(one.requests)
            for one, capacity in zip(workloads, capacities, strict=True)
        )
        if all(len(one.requests) <= MAX_REQUESTS for one in workloads)
        else None
    )
    lines: list[Line] = []
    for name, found in results.items():
        reload_s = fmean(one.reload_s_per_request for one in found)
        lines.append(
            dict(
                part="modern",
                scenario=scenario,
                share=share,
                policy=name,
                **row(found),
                bound_reload_s=least_s,
                closes_of_true_rates=(lru_s - reload_s) / (lru_s - known_s),
                closes_of_bound=None if least_s is None else (lru_s - reload_s) / (lru_s - least_s),
            )
        )
    return lines


def tier_cells(seeds: range, names: list[str]) -> Iterator[Cell]:
    """The modern mix on a device and its host, each tier under the same policy."""
    for (device_share, share), name in product(TIER_SHARES, names):
        yield partial(tier_cell, seeds, name, device_share, share)


def tier_cell(seeds: range, name: str, device_share: float, share: float) -> list[Line]:
    """One policy with one size of each tier."""
    workloads = [modern_workload(seed) for seed in seeds]
    found = [
        simulate_tiers(
            partial(make_policy, name),
            one,
            int(device_share * one.total_bytes),
            int(share * one.total_bytes),
        )
        for one in workloads
    ]
    return [
        {
            "part": "tiers",
            "scenario": "modern",
            "device_share": device_share,
            "share": share,
            "policy": name,
            "reload_s_per_request": fmean(one.reload_s_per_request for one in found),
            "device_hit_ratio": fmean(one.device_hits / one.requests for one in found),
            "host_hit_ratio": fmean(one.host_hits / one.requests for one in found),
            "of_each_seed": [round(one.reload_s_per_request, 5) for one in found],
        }
    ]


def access_cells(names: list[str]) -> Iterator[Cell]:
    """Processor time of an access, with evictions, in a cache of a fifth of 10,000 models."""
    rng = random.Random(0)
    entries = {
        ModelName(f"m{number}"): CatalogueEntry(
            model=ModelName(f"m{number}"),
            size_bytes=rng.randrange(1, 141) * 10**9,
            load_s=rng.uniform(1.0, 60.0),
        )
        for number in range(ACCESS_MODELS)
    }
    weights = [1.0 / (place + 1) for place in range(ACCESS_MODELS)]
    asked = rng.choices(list(entries), weights, k=60_000)
    capacity_bytes = sum(one.size_bytes for one in entries.values()) // 5
    for name in names:
        yield partial(_access_cost, name, asked, entries, capacity_bytes)


def _access_cost(
    name: str,
    asked: list[ModelName],
    entries: Mapping[ModelName, CatalogueEntry],
    capacity_bytes: int,
) -> list[Line]:
    """Microseconds for each access: told of it alone, and with room made and filled."""
    policy = make_policy(name, capacity_bytes)
    rules = EvictionRules(min_residency_s=0.0)
    resident = {}
    free_bytes, told_s, evicted = capacity_bytes, 0.0, 0
    began_s = time.process_time()
    for now_s, model in enumerate(asked):
        before_s = time.process_time()
        policy.on_access(Access(model=model, count=1, at_s=float(now_s)))
        told_s += time.process_time() - before_s
        if model in resident:
            continue
        size_bytes = entries[model].size_bytes
        room = RoomRequest(need_bytes=size_bytes, free_bytes=free_bytes, now_s=float(now_s))
        for victim in plan_resident(policy, room, resident, rules).victims:
            free_bytes += resident.pop(victim.subject).size_bytes
            policy.on_evict(victim.subject, float(now_s))
            evicted += 1
        free_bytes -= size_bytes
        resident[model] = copy_of(entries[model], float(now_s))
        policy.on_insert(resident[model], float(now_s))
    whole_s = time.process_time() - began_s
    return [
        {
            "part": "access",
            "policy": name,
            "on_access_us": 1e6 * told_s / len(asked),
            "with_room_us": 1e6 * whole_s / len(asked),
            "evictions": float(evicted),
            "models": float(ACCESS_MODELS),
        }
    ]


def worked(cells: list[Cell], jobs: int) -> Iterator[list[Line]]:
    """What cells find, as they end."""
    if jobs == 1:
        for cell in cells:
            yield cell()
        return
    with ProcessPoolExecutor(jobs) as workers:
        for done in as_completed([workers.submit(cell) for cell in cells]):
            yield done.result()


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", type=int, help="so many of those that are reported")
    parser.add_argument(
        "--tuning", action="store_true", help="the seeds that policies are tuned on"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--scenarios", default=",".join(MODERN), help="of the modern mix")
    asked = parser.parse_args()
    names, parts = asked.policies.split(","), asked.parts.split(",")
    seeds = TUNED_ON if asked.tuning else REPORTED_ON
    seeds = seeds[: asked.seeds] if asked.seeds else seeds
    runs: dict[str, Callable[[], Iterator[Cell]]] = {
        "access": partial(access_cells, names),
        "modern": partial(modern_cells, seeds, names, asked.scenarios.split(",")),
        "tiers": partial(tier_cells, seeds, names),
        "paper": partial(paper_cells, seeds, names, None),
        "paper-drift": partial(paper_cells, seeds, names, DRIFT),
        "drift": partial(drift_cells, seeds, names),
    }
    cells = [cell for part in parts if part != "access" for cell in runs[part]()]
    alone = worked(list(runs["access"]()), 1) if "access" in parts else iter(())
    for lines in itertools.chain(alone, worked(cells, asked.jobs)):
        for line in lines:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
