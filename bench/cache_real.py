"""Eviction policies in the whole system beside their simulation: ``make bench-cache-real``.

``--models`` copies of the demo model and one worker whose device holds ``--room`` of them. Requests
follow a trace with a seed: the arrivals of Azure's conversations, ten minutes of them in
``--duration-s``, over a Zipf law of models. Each policy of ``--policies`` serves the same trace
``--repeats`` times, by turns with the others, each time in a system of its own, which
``PILOTLIGHT_EVICTION_POLICY`` tells of it. No round begins that would not end ``--within-s``
seconds after the first: four policies take 30 minutes. Prints one JSON document.

Simulated and real loads are counted alike: each time that a model comes onto the device, its first
time apart. What is expected comes from the simulated cluster (``cache_expected.py``), whose loads
take time; beside it, as ``timeless_reloads``, stands the cache alone, whose loads take none. Two
policies that differ by more than ``--apart`` of the worse one's expected reloads are expected to
keep their order, by the medians of their repeats: ``order_kept`` says whether all such ``pairs``
do. The exit status is 1 where one does not, or where a request failed.

400 requests in 200 s over a Zipf law of 1.8 were chosen by LRU's loads in the timeless cache
alone, before other policies were looked at: with 0.6 s for each the device loads for 0.3 of the
time. ``loading_share`` says what it was, ``reloads_of`` which models came again, and
``orders_followed`` by which orders ours evicted after that of ``iam``, with which it begins.

It says something on a machine that does nothing else: waiting requests share a load, so a busy one
evens policies out. ``load_before`` is the load average as each system began.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from cache_expected import LOADS_S, Asked, device_bytes, expected_reloads
from cold_start import POOL_BYTES, machine
from openai import AsyncOpenAI
from starvation import TIMEOUT_S, Load, Tally, ask, events, register, seconds_of

from pilotlight.cli.client import AdminClient
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.telemetry import configure_logging
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.eviction.choice import make_policy
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.modern import shapes
from pilotlight.sim.cache.run import simulate
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest, Workload, draw

SETTING = "PILOTLIGHT_EVICTION_POLICY"
TRACE_S = 600.0
"""Of the recorded shape, whose bins are of ten seconds, the first that are compressed."""
BIN_S = 10.0
LOAD_S = 0.5
"""Of the demo model on two cores; equal for all, so that policies differ by order alone."""
ONE_MODEL_BYTES = 1
"""Of the timeless cache: models are equal."""
SLO_MS = 2000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is asked of each policy."""

    models: int
    room: int
    requests: int
    duration_s: float
    zipf: float
    max_tokens: int
    seed: int

    def names(self) -> list[ModelName]:
        """As ``starvation.register`` calls them, the most popular first."""
        return [ModelName(f"ember-{number}") for number in range(self.models)]

    def workload(self) -> Workload:
        """The trace; equal seeds give equal ones."""
        rng = random.Random(f"cache-real/{self.seed}")
        shape = shapes()["conversations"][: int(TRACE_S / BIN_S)]
        bins = rng.choices(range(len(shape)), weights=shape, k=self.requests)
        times = sorted((one + rng.random()) / len(shape) * self.duration_s for one in bins)
        weights = {name: 1.0 / (place + 1) ** self.zipf for place, name in enumerate(self.names())}
        drawn = draw(weights, self.requests, rng)
        return Workload(
            name="real",
            catalogue={
                name: CatalogueEntry(model=name, size_bytes=ONE_MODEL_BYTES, load_s=LOAD_S)
                for name in self.names()
            },
            requests=list(map(TimedRequest, times, drawn)),
        )

    def asked(self) -> Asked:
        """The trace, for the simulated cluster."""
        return Asked(
            models=self.names(),
            room=self.room,
            requests=self.workload().requests,
            max_tokens=self.max_tokens,
            slo_ms=SLO_MS,
        )


def timeless(trial: Trial, policies: Sequence[str]) -> dict[str, int]:
    """Reloads that each policy takes where loads take no time."""
    workload, capacity_bytes = trial.workload(), trial.room * ONE_MODEL_BYTES
    rules = EvictionRules(min_residency_s=0.0)
    return {
        name: simulate(make_policy(name, capacity_bytes), workload, capacity_bytes, rules).reloads
        for name in policies
    }


async def served(home: Home, policy: str, trial: Trial) -> dict[str, Any]:
    """Serve the trace with a system of its own."""
    load_before = os.getloadavg()[0]
    os.environ[SETTING] = policy
    os.environ["PILOTLIGHT_DEVICE_BYTES"] = str(device_bytes(trial.room))
    options = SystemOptions(port=free_port(), workers=1, pool_bytes=POOL_BYTES)
    load = Load(
        models=trial.models,
        places=trial.room,
        clients=0,
        duration_s=trial.duration_s,
        slo_ms=SLO_MS,
        max_tokens=trial.max_tokens,
    )
    tally, clock = Tally(), SystemClock()
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            await asyncio.to_thread(register, home, admin, load)
        async with AsyncOpenAI(
            base_url=f"{options.url}/v1",
            api_key=home.api_key.read_text().strip(),
            max_retries=0,
            timeout=TIMEOUT_S,
        ) as client:
            began_s = clock.monotonic_s()
            async with asyncio.TaskGroup() as requests:
                for number, request in enumerate(trial.workload().requests):
                    await asyncio.sleep(max(0.0, began_s + request.time_s - clock.monotonic_s()))
                    requests.create_task(
                        ask(client, request.model, number, trial.max_tokens, tally)
                    )
            took_s = clock.monotonic_s() - began_s
        loads = Counter(
            event.get("model")
            for event in events(home.logs, "worker")
            if event.get("action") == "stage_loading"
        )
    reloads = sum(loads.values()) - len(loads)
    loaded_s = loading_s(events(home.logs, "scheduler"))
    followed = [
        event["order"]
        for event in events(home.logs, "cache")
        if event.get("action") == "order_followed" and event["tier"] == "device"
    ]
    return {
        "requests": trial.requests,
        "errors": dict(tally.errors),
        "took_s": round(took_s, 1),
        "reloads": reloads,
        "reloads_of": {str(name): loads[name] - 1 for name in trial.names() if loads[name]},
        "orders_followed": followed,
        "reloads_per_hour": round(3600.0 * reloads / took_s),
        "loading_share": round(loaded_s / took_s, 3),
        "mean_load_s": round(loaded_s / max(1, sum(loads.values())), 3),
        "ttft_s": seconds_of(tally.ttft_s),
        "load_before": round(load_before, 2),
    }


def loading_s(happened: Iterable[Mapping[str, Any]]) -> float:
    """Seconds from the plans of instances until they were ready, of all together.

    Args:
        happened: What the scheduler has logged.
    """
    planned: dict[str, datetime] = {}
    total_s = 0.0
    for event in happened:
        if event.get("action") not in ("instance_planned", "instance_ready"):
            continue
        at = datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00"))
        if event["action"] == "instance_planned":
            planned[event["instance_id"]] = at
        elif event["instance_id"] in planned:
            total_s += (at - planned.pop(event["instance_id"])).total_seconds()
    return total_s


def told_apart(expected: Mapping[str, float], apart: float) -> list[tuple[str, str]]:
    """Pairs of policies that simulation tells apart: the better one, and the worse.

    Args:
        expected: Reloads in simulation.
        apart: The least difference, as a share of the worse one's.
    """
    ordered = (
        sorted(pair, key=expected.__getitem__) for pair in itertools.combinations(expected, 2)
    )
    return [
        (better, worse)
        for better, worse in ordered
        if expected[worse] - expected[better] > apart * expected[worse]
    ]


def verdict(
    expected: Mapping[str, float], found: Mapping[str, Sequence[int]], apart: float
) -> dict[str, Any]:
    """Whether the real system orders policies as simulation does, where that tells them apart.

    Args:
        expected: Reloads in simulation.
        found: Reloads of the system, of each repeat.
        apart: As ``told_apart`` has it.
    """
    pairs: list[dict[str, Any]] = []
    for better, worse in told_apart(expected, apart):
        medians = {name: median(found[name]) for name in (better, worse)}
        pairs.append(
            {
                "better": better,
                "worse": worse,
                "simulated_reloads": [expected[better], expected[worse]],
                "median_reloads": [medians[better], medians[worse]],
                "kept": medians[better] < medians[worse],
            }
        )
    return {"order_kept": all(pair["kept"] for pair in pairs), "apart": apart, "pairs": pairs}


def summary(
    simulated_reloads: float, timeless_reloads: int, repeats: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One policy: what was expected, medians over its repeats, and each of them."""
    p99_ttft_s = [one["ttft_s"]["p99"] for one in repeats if one["ttft_s"]]
    return {
        "simulated_reloads": simulated_reloads,
        "timeless_reloads": timeless_reloads,
        "median_reloads": median(one["reloads"] for one in repeats),
        "median_reloads_per_hour": median(one["reloads_per_hour"] for one in repeats),
        "median_p99_ttft_s": median(p99_ttft_s) if p99_ttft_s else None,
        "repeats": list(repeats),
    }


def measured(
    names: Sequence[str], trial: Trial, repeats: int, within_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Each policy's repeats, by turns, so that what else the machine does meets all of them.

    Args:
        names: Of policies.
        trial: What each serves.
        repeats: At most.
        within_s: No round begins that would take longer than what is left of this, if it took as
            long as the longest one so far.
    """
    clock = SystemClock()
    began_s, longest_s = clock.monotonic_s(), 0.0
    real: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(repeats):
        round_s = clock.monotonic_s()
        if round_s - began_s + longest_s > within_s:
            print("… no time is left for another round", file=sys.stderr)
            break
        for name in names:
            with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
                # PostgreSQL runs as another user when we are root, and passes through.
                Path(folder).chmod(0o711)
                real[name].append(asyncio.run(served(Home(Path(folder) / "home"), name, trial)))
            print(f"… {name}: {real[name][-1]}", file=sys.stderr)
        longest_s = max(longest_s, clock.monotonic_s() - round_s)
    return real


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Eviction policies in the whole system.")
    parser.add_argument("--policies", default="lru,gdsf,iam,pilotlight")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--room", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--duration-s", type=float, default=200.0)
    parser.add_argument("--zipf", type=float, default=1.8)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--apart", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--within-s", type=float, default=1900.0)
    parser.add_argument("--simulate-only", action="store_true")
    asked = vars(parser.parse_args())
    names, apart, simulate_only = (
        asked.pop("policies").split(","),
        asked.pop("apart"),
        asked.pop("simulate_only"),
    )
    repeats, within_s = asked.pop("repeats"), asked.pop("within_s")
    trial = Trial(**asked)
    alone = timeless(trial, names)
    each = {name: expected_reloads(trial.asked(), name) for name in names}
    expected = {name: median(found) for name, found in each.items()}
    pairs = told_apart(expected, apart)
    if simulate_only:
        print(
            json.dumps(
                {
                    "simulated_reloads": expected,
                    "of_each_load_time": {"loads_s": LOADS_S, **each},
                    "timeless_reloads": alone,
                    "pairs": pairs,
                }
            )
        )
        return
    if not pairs:
        parser.error(
            f"simulation tells no two of these policies apart by more than {apart:.0%}: {expected}. Name others, or ask for more requests"
        )
    configure_logging("bench")
    real = measured(names, trial, repeats, within_s)
    errors = any(one["errors"] for found in real.values() for one in found)
    reloads = {name: [one["reloads"] for one in found] for name, found in real.items()}
    judged = verdict(expected, reloads, apart)
    policies = {name: summary(expected[name], alone[name], real[name]) for name in names}
    document = {**judged, "machine": machine(), **asked, "policies": policies}
    print(json.dumps(document, indent=2))
    sys.exit(int(errors or not judged["order_kept"]))


if __name__ == "__main__":
    main()
