"""Eviction policies in the whole system beside their simulation: ``make bench-cache-real``.

``--models`` copies of the demo model and one worker whose device holds ``--room`` of them. Requests
follow a trace with a seed: the arrivals of Azure's conversations, ten minutes of them in
``--duration-s``, over a Zipf law of models. Each policy of ``--policies`` serves the same trace in
a system of its own, which ``PILOTLIGHT_EVICTION_POLICY`` tells of it. Prints one JSON document.

Simulated and real loads are counted alike: each time that a model comes onto the device, its first
time apart. Two policies that differ by more than ``--apart`` of the worse one's reloads in
simulation are expected to keep their order. The exit status is 1 where a pair does not, or where a
request failed.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cold_start import POOL_BYTES, machine
from openai import AsyncOpenAI
from starvation import ONE_MODEL_BYTES, TIMEOUT_S, Load, Tally, ask, events, register, seconds_of

from pilotlight.cache.settings import CacheSettings
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
FIELD = "eviction_policy"
TRACE_S = 600.0
"""Of the recorded shape, whose bins are of ten seconds, the first that are compressed."""
BIN_S = 10.0
LOAD_S = 0.5
"""Of the demo model on two cores; equal for all, so that policies differ by order alone."""
MIN_RESIDENCY_S = 1.0
"""The cache's own."""


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


def simulated(trial: Trial, policies: Sequence[str]) -> dict[str, int]:
    """Reloads that each policy takes where loads take no time."""
    workload, capacity_bytes = trial.workload(), trial.room * ONE_MODEL_BYTES
    rules = EvictionRules(min_residency_s=0.0)
    return {
        name: simulate(make_policy(name, capacity_bytes), workload, capacity_bytes, rules).reloads
        for name in policies
    }


async def served(home: Home, policy: str, trial: Trial) -> dict[str, Any]:
    """Serve the trace with a system of its own."""
    os.environ[SETTING] = policy
    os.environ["PILOTLIGHT_DEVICE_BYTES"] = str(trial.room * ONE_MODEL_BYTES)
    options = SystemOptions(port=free_port(), workers=1, pool_bytes=POOL_BYTES)
    load = Load(
        models=trial.models,
        places=trial.room,
        clients=0,
        duration_s=trial.duration_s,
        slo_ms=2000.0,
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
    return {
        "requests": trial.requests,
        "errors": dict(tally.errors),
        "took_s": round(took_s, 1),
        "reloads": reloads,
        "reloads_per_hour": round(3600.0 * reloads / took_s),
        "ttft_s": seconds_of(tally.ttft_s),
    }


def kept_order(
    expected: Mapping[str, int], found: Mapping[str, int], apart: float
) -> list[dict[str, Any]]:
    """Each pair of policies that simulation tells apart, and whether the real system agrees.

    Args:
        expected: Reloads in simulation.
        found: Reloads of the system.
        apart: The least difference, as a share of the worse one's.
    """
    pairs: list[dict[str, Any]] = []
    for one, other in itertools.combinations(expected, 2):
        better, worse = sorted((one, other), key=expected.__getitem__)
        if expected[worse] - expected[better] > apart * expected[worse]:
            pairs.append({"better": better, "worse": worse, "kept": found[better] < found[worse]})
    return pairs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Eviction policies in the whole system.")
    parser.add_argument("--policies", default="lru,lfu,gdsf,iam,pilotlight")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--room", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--duration-s", type=float, default=200.0)
    parser.add_argument("--zipf", type=float, default=1.2)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--apart", type=float, default=0.1)
    parser.add_argument("--simulate-only", action="store_true")
    asked = vars(parser.parse_args())
    names, apart, simulate_only = (
        asked.pop("policies").split(","),
        asked.pop("apart"),
        asked.pop("simulate_only"),
    )
    trial = Trial(**asked)
    expected = simulated(trial, names)
    if simulate_only:
        print(json.dumps({"simulated_reloads": expected}))
        return
    if FIELD not in CacheSettings.model_fields:
        parser.error(f"the cache has no setting {SETTING}")
    configure_logging("bench")
    real: dict[str, dict[str, Any]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
            # PostgreSQL runs as another user when we are root, and passes through.
            Path(folder).chmod(0o711)
            real[name] = asyncio.run(served(Home(Path(folder) / "home"), name, trial))
        print(f"… {name}: {real[name]}", file=sys.stderr)
    pairs = kept_order(expected, {name: one["reloads"] for name, one in real.items()}, apart)
    print(
        json.dumps(
            {
                "machine": machine(),
                **asked,
                "policies": {
                    name: {"simulated_reloads": expected[name], **real[name]} for name in names
                },
                "pairs": pairs,
            },
            indent=2,
        )
    )
    failed = any(one["errors"] for one in real.values())
    sys.exit(int(failed or not all(pair["kept"] for pair in pairs)))


if __name__ == "__main__":
    main()
