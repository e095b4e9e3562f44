"""The same requests to a real cluster and to the simulator.

Workers simulate their engines, so that both compute at the same pace: what is compared is control,
placement, links, pools and the way of a request through the services.
"""

import asyncio
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from cluster import Cluster, Site, Unanswered, running
from model_store import ENDS_BYTES, HEAD_DIM, HEADS, HIDDEN_SIZE, LAYER_BYTES, VOCAB_SIZE
from netns import Host

from pilotlight.dataplane.bandwidth import parse_bandwidth
from pilotlight.policy.coldstart.policies import StartPolicy
from pilotlight.sim.cluster.arrivals import model_name, requests_of
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import (
    GIB,
    Application,
    Arrivals,
    Contender,
    Family,
    NodeKind,
    Scenario,
)

MIB = 2**20
LAYERS = (2, 4, 8, 16)
MODELS = 6
"""Of each size."""
DEVICE_BYTES, POOL_BYTES = 96 * MIB, 96 * MIB
LOAD_BYTES_PER_S = 1e9
PREFILL_TOKENS_PER_S, DECODE_STEP_S = 2_000.0, 0.02
TTFT_S, TPOT_S, KEEP_ALIVE_S = 2.0, 0.2, 8.0
OURS = Contender(
    name="pilotlight",
    start=StartPolicy.PILOTLIGHT,
    cache=True,
    peers=True,
    created=True,
    warm=True,
)
"""As the services run: stages of one worker, whole devices."""


def scenario_of(rates: Sequence[str], seconds: float) -> Scenario:
    """The cluster, its models and its arrivals."""
    return Scenario(
        name="validation",
        nodes=tuple(
            NodeKind(
                name=f"n{at}",
                count=1,
                devices=1,
                device_gib=DEVICE_BYTES / GIB,
                memory_gib=POOL_BYTES / GIB,
                network_gbit_per_s=(parse_bandwidth(rate) or math.inf) * 8 / 1e9,
                load_gib_per_s=LOAD_BYTES_PER_S / GIB,
                memory_gib_per_s=LOAD_BYTES_PER_S / GIB,
            )
            for at, rate in enumerate(rates)
        ),
        families=tuple(
            Family(
                name=f"{layers}",
                size_gib=(layers * LAYER_BYTES + ENDS_BYTES) / GIB,
                layers=layers,
                hidden_size=HIDDEN_SIZE,
                kv_heads=HEADS,
                head_dim=HEAD_DIM,
                vocab_size=VOCAB_SIZE,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                decode_step_s=DECODE_STEP_S,
                decode_more_s=0.0,
            )
            for layers in LAYERS
        ),
        applications=tuple(
            Application(
                name=f"layers-{layers}",
                family=f"{layers}",
                models=MODELS,
                ttft_s=TTFT_S,
                tpot_s=TPOT_S,
                prompt_tokens=60,
                output_tokens=40,
            )
            for layers in LAYERS
        ),
        arrivals=Arrivals(kind="gamma", per_s=0.8, duration_s=seconds, cv=3.0, zipf=0.3),
        keep_alive_s=KEEP_ALIVE_S,
        max_batch=16,
    )


async def validate_traces(
    folder: Path, hosts: Sequence[Host], rates: Sequence[str], seeds: int, seconds: float, log: Path
) -> dict[str, Any]:
    """Both, over some traces, each on a cluster of its own, and how far they are apart.

    Some eighty requests to three nodes are few: one start that goes to another node moves several.

    Args:
        folder: For the system's files.
        hosts: Namespaces of control, the store and the nodes.
        rates: Of the nodes' links.
        seeds: Traces.
        seconds: Of each trace.
        log: Of the store.
    """
    found: list[dict[str, Any]] = []
    for seed in range(1, seeds + 1):
        own = folder / f"trace-{seed}"
        own.mkdir(mode=0o711)
        found.append(await _validated(own, hosts, rates, seed, seconds, log))
    count = sum(one["requests"] for one in found)
    of_all = {
        side: sum(one["ttft_attainment"][side] * one["requests"] for one in found) / count
        for side in ("real", "simulated")
    }
    return {
        "requests": count,
        "slo_s": TTFT_S,
        "ttft_attainment": {
            **{side: round(share, 4) for side, share in of_all.items()},
            "points_apart": round(100 * abs(of_all["real"] - of_all["simulated"]), 2),
        },
        "traces": found,
    }


async def _validated(
    folder: Path, hosts: Sequence[Host], rates: Sequence[str], seed: int, seconds: float, log: Path
) -> dict[str, Any]:
    scenario = scenario_of(rates, seconds)
    simulated = Simulation(scenario, OURS, seed).run()
    site = Site(
        control=hosts[0],
        store=hosts[1],
        nodes=hosts[2:],
        rates=rates,
        workers=1,
        worker_kind="sim",
        environment={
            "PILOTLIGHT_START_POLICY": "pilotlight",
            "PILOTLIGHT_POOL_BYTES": str(POOL_BYTES),
            "PILOTLIGHT_DEVICE_BYTES": str(DEVICE_BYTES),
            "PILOTLIGHT_SIM_LOAD_BYTES_PER_S": str(LOAD_BYTES_PER_S),
            "PILOTLIGHT_SIM_PREFILL_TOKENS_PER_S": str(PREFILL_TOKENS_PER_S),
            "PILOTLIGHT_SIM_DECODE_STEP_S": str(DECODE_STEP_S),
            "PILOTLIGHT_SPARE_ENGINE": "false",
            "PILOTLIGHT_STALL_TIMEOUT_S": "60",
        },
    )
    async with running(folder, site, log) as cluster:
        slo = {"ttft_ms": 1000 * TTFT_S, "tpot_ms": 1000 * TPOT_S}
        for application, layers in zip(scenario.applications, LAYERS, strict=True):
            for number in range(MODELS):
                name = model_name(application, number)
                await cluster.register(name, layers, slo, keep_alive_s=KEEP_ALIVE_S)
        requests = list(requests_of(scenario, seed))
        print(
            f"trace {seed}: {len(requests)} requests in {seconds:g} s", file=sys.stderr, flush=True
        )
        ttfts = await _replayed(cluster, requests)
    attained = sum(one <= TTFT_S for one in ttfts) / len(ttfts)
    answered = sorted(one for one in ttfts if math.isfinite(one))
    return {
        "seed": seed,
        "requests": len(ttfts),
        "unanswered": len(ttfts) - len(answered),
        "slo_s": TTFT_S,
        "ttft_attainment": {
            "real": round(attained, 4),
            "simulated": round(simulated.ttft_attainment, 4),
        },
        "ttft_p50_s": {
            "real": round(statistics.median(answered), 3),
            "simulated": round(simulated.ttft_p50_s, 3),
        },
        "ttft_p99_s": {
            "real": round(answered[math.ceil(0.99 * len(answered)) - 1], 3),
            "simulated": round(simulated.ttft_p99_s, 3),
        },
        "simulated_starts": simulated.starts,
        "raw_real_ttft_s": [round(one, 3) for one in answered],
    }


async def _replayed(cluster: Cluster, requests: Sequence[Request]) -> list[float]:
    """Every request in its time, whatever became of those before it; seconds to its first token,
    infinite where it had none.
    """
    began_s = cluster.clock.monotonic_s()

    async def one(request: Request) -> float:
        await asyncio.sleep(began_s + request.arrived_s - cluster.clock.monotonic_s())
        prompt = " ".join(["light"] * request.prompt_tokens)
        try:
            return (await cluster.ask(request.model, prompt, request.output_tokens))[0]
        except (Unanswered, httpx2.HTTPError) as error:
            print(error, file=sys.stderr, flush=True)
            return math.inf

    return await asyncio.gather(*(one(request) for request in requests))
