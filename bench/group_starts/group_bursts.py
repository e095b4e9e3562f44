"""Bursts of requests for a model that no node has, by the size of the groups that bring it
(ParaServe, Fig. 14).

Workers simulate their engines, since those of many nodes would compete for this machine's cores:
control, links, the store, host pools and the way of each request are real. A simulated group
answers at the pace of one worker: what stages add to a token is not in the figures.
"""

import asyncio
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from cluster import Cluster, Site, Unanswered, running
from group_starts import HARSH, HIDDEN_SIZE
from netns import Host
from usage import Busy

MIB = 2**20
LAYERS = 6
"""Of the model: 59 MB with its embeddings."""
BATCH = 8
"""Requests that one worker takes at once, as in the paper."""
PROMPT_TOKENS, TOKENS = 60, 64
LOAD_BYTES_PER_S = 1e9
PREFILL_TOKENS_PER_S, DECODE_STEP_S = 2_000.0, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What became of the requests of one burst."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    unanswered: int
    cpu_busy: float


async def measure_bursts(
    folder: Path,
    hosts: Sequence[Host],
    rates: Sequence[str],
    sizes: Sequence[int],
    settings: Mapping[str, str],
    log: Path,
) -> dict[int, Burst]:
    """Bursts of each size at one cluster, one after the other, each for a model of its own.

    Args:
        folder: For the system's files.
        hosts: Namespaces of control, the store and the nodes.
        rates: Of the nodes' links.
        sizes: Requests of the bursts.
        settings: Of this measurement.
        log: Of the store.
    """
    site = Site(
        control=hosts[0],
        store=hosts[1],
        nodes=hosts[2:],
        rates=rates,
        workers=1,
        worker_kind="sim",
        environment={
            "PILOTLIGHT_INSTANCE_REQUESTS": str(BATCH),
            "PILOTLIGHT_POOL_BYTES": str(128 * MIB),
            "PILOTLIGHT_DEVICE_BYTES": str(256 * MIB),
            "PILOTLIGHT_SIM_LOAD_BYTES_PER_S": str(LOAD_BYTES_PER_S),
            "PILOTLIGHT_SIM_PREFILL_TOKENS_PER_S": str(PREFILL_TOKENS_PER_S),
            "PILOTLIGHT_SIM_DECODE_STEP_S": str(DECODE_STEP_S),
            "PILOTLIGHT_STALL_TIMEOUT_S": "60",
            **settings,
        },
        of_nodes={"PILOTLIGHT_MAX_REQUESTS": str(BATCH)},
    )
    found: dict[int, Burst] = {}
    async with running(folder, site, log) as cluster:
        for size in sizes:
            name = f"burst-{size}"
            await cluster.register(
                name, LAYERS, HARSH, hidden_size=HIDDEN_SIZE, max_instances=len(site.nodes)
            )
            found[size] = await _burst(cluster, name, size)
            await cluster.unregister(name)
            print(f"  {size} requests: {figures_of(found[size])['medians']}", file=sys.stderr)
    return found


async def _burst(cluster: Cluster, model: str, size: int) -> Burst:
    prompt = " ".join(["light"] * PROMPT_TOKENS)
    busy = Busy()

    async def one() -> tuple[float, float]:
        try:
            first_s, last_s = await cluster.ask(model, prompt, TOKENS)
        except (Unanswered, httpx2.HTTPError) as error:
            print(error, file=sys.stderr, flush=True)
            return math.inf, math.inf
        return first_s, (last_s - first_s) / (TOKENS - 1)

    times = await asyncio.gather(*(one() for _ in range(size)))
    answered = [(ttft_s, tpot_s) for ttft_s, tpot_s in times if math.isfinite(ttft_s)]
    if not answered:
        raise SystemExit(f"of a burst of {size} requests none was answered")
    return Burst(
        ttft_s=tuple(ttft_s for ttft_s, _ in answered),
        tpot_s=tuple(tpot_s for _, tpot_s in answered),
        unanswered=size - len(answered),
        cpu_busy=busy.share(),
    )


def figures_of(burst: Burst) -> dict[str, Any]:
    """Samples, medians and the paper's averages as ``bench/results`` has them."""
    samples = {
        "ttft": [round(one, 3) for one in burst.ttft_s],
        "tpot": [round(one, 4) for one in burst.tpot_s],
    }
    return {
        "unit": "s",
        "samples": samples,
        "medians": {name: round(statistics.median(of), 4) for name, of in samples.items()},
        "averages": {name: round(statistics.fmean(of), 4) for name, of in samples.items()},
        "unanswered": burst.unanswered,
        "cores busy": round(burst.cpu_busy, 3),
    }
