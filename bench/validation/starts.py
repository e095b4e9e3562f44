"""What the decision of a start predicts, and what the client of it measures."""

import asyncio
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, Site, running, shuffled
from model_store import ENDS_BYTES, LAYER_BYTES
from netns import Host

from pilotlight.dataplane.bandwidth import parse_bandwidth

MIB = 2**20
LAYERS = (2, 4, 6, 9, 12, 16)
"""Of the models: 6 to 22 MB."""
ROUNDS = (1, 2, 3)
"""Starts at once, in turn: a round of each has every model once."""
LEARNED_S = 13.0
"""After its first token, so that the scheduler has learned from a start: it waits for late reports.
"""
TPOT_S = 1.0
SLO_FACTOR, SLO_MORE_S = 1.3, 1.0
"""Of a model's bytes alone on the fastest link, and beside that: starts that would make each other
late go apart, or wait."""
PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Start:
    """One start."""

    model: str
    bytes: int
    at_once: int
    tier: str
    """``store``: nothing of the model was on any node; ``pools``: some node had it."""
    predicted_s: float
    measured_s: float
    counts: bool
    """A model's first start teaches how fast it computes, and where it was fetched from."""
    node: str
    source: str
    predicted_phase_s: Mapping[str, float | None]
    actual_phase_s: Mapping[str, float]
    queue_s: float | None
    """From the request to the scheduler's first word of it."""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


async def validate_starts(
    folder: Path, hosts: Sequence[Host], rates: Sequence[str], count: int, log: Path
) -> dict[str, Any]:
    """Start models again and again, each time with parameters that no node has seen.

    Args:
        folder: For the system's files.
        hosts: Namespaces of control, the store and the nodes.
        rates: Of the nodes' links.
        count: Starts from the store that count.
        log: Of the store.
    """
    site = Site(
        control=hosts[0],
        store=hosts[1],
        nodes=hosts[2:],
        rates=rates,
        workers=1,
        worker_kind="cpu",
        environment={
            "PILOTLIGHT_START_POLICY": "pilotlight",
            "PILOTLIGHT_POOL_BYTES": str(512 * MIB),
            "PILOTLIGHT_DEVICE_BYTES": str(512 * MIB),
            "PILOTLIGHT_THREADS": "1",
            "PILOTLIGHT_SPARE_ENGINE": "false",
            "PILOTLIGHT_STALL_TIMEOUT_S": "60",
        },
    )
    found: list[Start] = []
    names = [f"layers-{layers}" for layers in LAYERS]
    async with running(folder, site, log) as cluster:
        turn = 0
        while turn * len(LAYERS) < count + len(LAYERS):
            order = shuffled(names, turn)
            for at_once in ROUNDS:
                round_, order = order[:at_once], order[at_once:]
                sizes: list[int] = []
                for name in round_:
                    layers = LAYERS[names.index(name)]
                    sizes.append(await cluster.register(name, layers, _slo(layers, rates)))
                found += await _started(cluster, round_, sizes, "store", learns=turn == 0)
                if at_once == 2 and turn:
                    for name in round_:
                        await cluster.evict(name)
                    found += await _started(cluster, round_, sizes, "pools", learns=False)
                for name in round_:
                    await cluster.unregister(name)
            turn += 1
    return report(found)


def _slo(layers: int, rates: Sequence[str]) -> dict[str, float]:
    size_bytes = layers * LAYER_BYTES + ENDS_BYTES
    alone_s = size_bytes / max(parse_bandwidth(rate) or math.inf for rate in rates)
    return {
        "ttft_ms": 1000 * (SLO_FACTOR * alone_s + SLO_MORE_S),
        "tpot_ms": 1000 * TPOT_S,
    }


def report(found: Sequence[Start]) -> dict[str, Any]:
    """Errors of the starts that count."""
    counted = [one for one in found if one.counts and one.tier == "store"]
    pools = [one for one in found if one.counts and one.tier == "pools"]
    return {
        "starts": len(counted),
        "median_error": _median(one.error for one in counted),
        "p90_error": round(_p90([one.error for one in counted]), 4),
        "median_of_predicted_by_measured": _median(
            one.predicted_s / one.measured_s for one in counted
        ),
        "median_error_by_starts_at_once": {
            many: _median(one.error for one in counted if one.at_once == many) for many in ROUNDS
        },
        "from_pools": {
            "starts": len(pools),
            "median_error": _median(one.error for one in pools),
            "median_off_s": _median(abs(one.predicted_s - one.measured_s) for one in pools),
        },
        "raw": [{**asdict(one), "error": round(one.error, 4)} for one in found],
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


async def _started(
    cluster: Cluster, models: Sequence[str], sizes: Sequence[int], tier: str, *, learns: bool
) -> list[Start]:
    """Ask for models at once; what was predicted of each start, and what it took.

    Args:
        cluster: It runs.
        models: Of which no worker holds anything.
        sizes: Of theirs, in bytes.
        tier: Where their parameters are.
        learns: The models' first starts, which do not count.
    """
    seen = {
        model: frozenset(
            one["decision_id"]
            for one in (await cluster.get(f"/decisions?model={model}"))["decisions"]
        )
        for model in models
    }
    times = await asyncio.gather(*(cluster.ask(model, PROMPT, 4) for model in models))
    decisions = [await cluster.start_of(model, seen[model]) for model in models]
    # What came of a start is written beside what was predicted when its last reports are in.
    await asyncio.sleep(LEARNED_S)
    found: list[Start] = []
    for model, size_bytes, (ttft_s, _), decision in zip(
        models, sizes, times, decisions, strict=True
    ):
        if decision is None:
            print(f"no decision of {model} can be read", file=sys.stderr)
            continue
        whole = await cluster.get(f"/decisions/{decision['decision_id']}")
        found.append(_start(model, size_bytes, len(models), tier, whole, ttft_s, counts=not learns))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _start(
    model: str,
    size_bytes: int,
    at_once: int,
    tier: str,
    decision: Mapping[str, Any],
    ttft_s: float,
    *,
    counts: bool,
) -> Start:
    scheme, actual = decision["outcome"]["scheme"], decision["actual"]
    placement = scheme["placements"][0]
    return Start(
        model=model,
        bytes=size_bytes,
        at_once=at_once,
        tier=tier,
        predicted_s=scheme["predicted_ttft_s"],
        measured_s=ttft_s,
        counts=counts,
        node=placement["node_id"],
        source=scheme["sources"][0],
        predicted_phase_s=scheme["predicted_phase_s"],
        actual_phase_s=actual.get("phase_s", {}),
        queue_s=actual.get("queue_s"),
    )


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]
