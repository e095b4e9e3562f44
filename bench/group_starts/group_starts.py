"""First tokens of a model that no node has: by the number of stages that bring it (ParaServe,
Fig. 8), and with one technique more after the other (Fig. 9).
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, Site, running
from netns import Host
from usage import Busy

from pilotlight.common.waiting import pause

MIB = 2**20
HIDDEN_SIZE, LAYERS = 512, 48
"""With its embeddings 411 MB; they are two in a hundred of it."""
FIRST_LAYERS = 2
"""Of the model that is asked first, and does not count: services do some things once."""
PROMPT = "Once upon a time"
TOKENS = 4
HARSH = {"ttft_ms": 1_000.0, "tpot_ms": 5_000.0}
"""No start meets it: of all that are allowed, the soonest is chosen."""
WITHIN_S = 12.0
"""What the scheduler's own choice is to meet, with as few stages as it takes: one is late by far,
two have time to spare. An SLO that a group would miss by little, and by its waiting alone, gives
one worker (``policy.coldstart.chosen``, rule 3), and says nothing of the choice among groups."""
RECORD_TRIES = 100

ALONE = {
    "PILOTLIGHT_START_WARM": "false",
    "PILOTLIGHT_START_PREFETCH": "false",
    "PILOTLIGHT_START_STREAM": "false",
    "PILOTLIGHT_START_OVERLAP": "false",
    "PILOTLIGHT_MAX_STAGES": "1",
}
"""Nothing of a start is beside anything else."""
RUNGS = (
    ("single", ""),
    ("+prefetch", "PILOTLIGHT_START_PREFETCH"),
    ("+stream", "PILOTLIGHT_START_STREAM"),
    ("+overlap", "PILOTLIGHT_START_OVERLAP"),
    ("+warm", "PILOTLIGHT_START_WARM"),
)
"""What each has more than those before it; the last one of the ladder, ``+parallel``, is the widest
group. What is not switched off is on: ``+warm`` is a start like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start."""

    ttft_s: float
    predicted_s: float
    stages: int
    bytes: int
    fetch_bytes_per_s: float
    """Of all nodes together, from the first byte's order to the last byte."""
    cpu_busy: float
    """Share of the machine's cores that worked meanwhile, for whomever."""
    load_before: float


def ladder(stages: int) -> dict[str, dict[str, str]]:
    """Settings of each rung of Fig. 9.

    Args:
        stages: Of the widest group.
    """
    found: dict[str, dict[str, str]] = {}
    so_far = dict(ALONE)
    for name, on in RUNGS:
        so_far = {setting: value for setting, value in so_far.items() if setting != on}
        found[name] = so_far
    found["+parallel"] = {**so_far, "PILOTLIGHT_MAX_STAGES": str(stages)}
    return found


async def measure_starts(
    folder: Path,
    hosts: Sequence[Host],
    rates: Sequence[str],
    rounds: int,
    settings: Mapping[str, str],
    slos: Sequence[Mapping[str, float]],
    log: Path,
) -> list[list[Start]]:
    """So many starts of one cluster for each SLO, each of a model that no node has seen.

    Args:
        folder: For the system's files.
        hosts: Namespaces of control, the store and the nodes.
        rates: Of the nodes' links.
        rounds: How many, beside a small one before them.
        settings: Of this measurement.
        slos: Of the models.
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
            "PILOTLIGHT_POOL_BYTES": str(640 * MIB),
            "PILOTLIGHT_DEVICE_BYTES": str(768 * MIB),
            "PILOTLIGHT_THREADS": "1",
            "PILOTLIGHT_SPARE_ENGINE": "false",
            "PILOTLIGHT_BUILDS": "false",
            "PILOTLIGHT_STALL_TIMEOUT_S": "60",
            **settings,
        },
    )
    found: list[list[Start]] = [[] for _ in slos]
    async with running(folder, site, log) as cluster:
        await _started(cluster, "first", FIRST_LAYERS, slos[0])
        for number in range(rounds):
            for at, slo in enumerate(slos):
                start = await _started(cluster, f"cold-{number}-{at}", LAYERS, slo)
                print(f"  {start}", file=sys.stderr, flush=True)
                found[at].append(start)
    return found


async def _started(cluster: Cluster, name: str, layers: int, slo: Mapping[str, float]) -> Start:
    size_bytes = await cluster.register(name, layers, slo, hidden_size=HIDDEN_SIZE)
    busy = Busy()
    ttft_s, _ = await cluster.ask(name, PROMPT, TOKENS)
    share = busy.share()
    decision = await cluster.start_of(name, frozenset())
    if decision is None:
        raise SystemExit(f"no decision of {name} can be read")
    scheme = decision["outcome"]["scheme"]
    fetches = await _fetches(cluster, name)
    await cluster.unregister(name)
    took_s = max(one["end_s"] for one in fetches) - min(one["start_s"] for one in fetches)
    return Start(
        ttft_s=ttft_s,
        predicted_s=scheme["predicted_ttft_s"],
        stages=len(scheme["placements"]),
        bytes=size_bytes,
        fetch_bytes_per_s=size_bytes / took_s,
        cpu_busy=share,
        load_before=busy.load,
    )


async def _fetches(cluster: Cluster, model: str) -> list[dict[str, Any]]:
    """What the waterfall of a model's start says of fetching, once it is complete."""
    for _ in range(RECORD_TRIES):
        found = (await cluster.get(f"/cold-starts?model={model}"))["cold_starts"]
        phases = [phase for one in found for phase in one["phases"]]
        first_s = max(
            (phase["end_s"] for phase in phases if phase["name"] == "prefill"), default=0.0
        )
        # What a group fetches to become one worker comes after its first token.
        fetches = [
            phase for phase in phases if phase["name"] == "fetch" and phase["start_s"] < first_s
        ]
        if fetches and any(one["status"] == "done" for one in found):
            return fetches
        await pause(0.2)
    raise SystemExit(f"the start of {model} has no record")


def figures_of(starts: Sequence[Start]) -> dict[str, Any]:
    """Samples and medians as ``bench/results`` has them."""
    samples = {
        "ttft": [round(one.ttft_s, 3) for one in starts],
        "predicted": [round(one.predicted_s, 3) for one in starts],
        "stages": [one.stages for one in starts],
        "fetch, MB/s of all nodes": [round(one.fetch_bytes_per_s / 1e6, 1) for one in starts],
        "cores busy": [round(one.cpu_busy, 3) for one in starts],
    }
    return {
        "unit": "s",
        "samples": samples,
        "medians": {name: round(statistics.median(of), 3) for name, of in samples.items()},
        "raw": [asdict(one) for one in starts],
    }
