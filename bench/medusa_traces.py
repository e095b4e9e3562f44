"""MEDUSA's Figures 10 and 11 in simulated time: first tokens under Poisson arrivals, with cold
starts among them, by how models are loaded: ``make bench-medusa-traces``.

Reads what ``bench/medusa.py`` measured of a shape (LINES: its lines, or a file of results): how
long a loading phase takes, from the command to ready, weights in host memory; what steps and
prompts take. The simulator's cluster runs
the scheduler's own decisions: one node with four devices, as in the paper, and more models than
places, so that they start and go all the time. Lengths are log-normal with the means that the paper
gives of ShareGPT (161 and 338 tokens). Strategies:

* ``plain``: everything is profiled, compiled or loaded, and captured before a model is ready;
* ``medusa``: MEDUSA's way whole, where that was measured;
* ``ours``: everything materialized;
* ``eager``: as ``plain`` without captures, and without graphs afterwards.

Writes OUT, in the form of ``bench/results``: for each strategy and rate, P50 and P99 of first
tokens, requests that ended a second, and starts.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from medusa_rows import medians_of, read
from medusa_shapes import MEDUSA_SHAPES
from served_gpu import commit, machine

from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import (
    Application,
    Arrivals,
    Contender,
    Family,
    NodeKind,
    Scenario,
    StartUp,
)

PROMPT_TOKENS, OUTPUT_TOKENS = 161, 338
"""In mean, of ShareGPT: MEDUSA, section 2.2."""
DEVICES, MODELS, MAX_BATCH, KEEP_ALIVE_S = 4, 8, 32, 15.0
RATES, SECONDS, SEEDS = (1.0, 2.0, 5.0, 10.0, 20.0), 200.0, (1, 2)
AT_ONCE = 1e6
"""GiB/s and Gbit/s of what takes no time here: the loading phase has the weights in it."""
STRATEGIES = ("plain", "medusa", "ours", "eager")
RESULTS = Path(__file__).resolve().parent / "results" / "medusa.json"
Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to load models."""

    name: str
    ready_s: float
    """From the command."""
    step_s: float
    """Of one request."""
    more_s: float
    """For each further request of a batch."""
    prefill_tokens_per_s: float


def rows_of(path: Path, shape: str) -> dict[str, dict[str, float]]:
    """Of a shape, medians by way."""
    return {way: medians_of(rows) for (way, one), rows in read(path).items() if one == shape}


def strategies_of(rows: Rows) -> tuple[Strategy, ...]:
    """What was measured, as strategies.

    Raises:
        SystemExit: something was not.
    """
    if missing := [way for way in ("plain", "ours", "steps") if way not in rows]:
        raise SystemExit(f"not measured: {', '.join(missing)}")
    plain, ours, steps = rows["plain"], rows["ours"], rows["steps"]
    ready_s = {
        "plain": plain["total_s"],
        "ours": ours["total_s"],
        "eager": plain["total_s"] - plain["warm_up_s"] - plain["capture_s"],
    }
    if "medusa" in rows:
        ready_s["medusa"] = rows["medusa"]["total_s"]
    made: list[Strategy] = []
    for name in (one for one in STRATEGIES if one in ready_s):
        kind = "eager" if name == "eager" else "graph"
        one, many = steps[f"{kind}_1_s"], steps[f"{kind}_16_s"]
        made.append(
            Strategy(
                name=name,
                ready_s=ready_s[name],
                step_s=one,
                more_s=max(0.0, many - one) / 15,
                prefill_tokens_per_s=steps["prefill_tokens"] / steps[f"{kind}_prefill_s"],
            )
        )
    return tuple(made)


def scenario_of(
    shape: str, gib: float, strategy: Strategy, per_s: float, seconds: float
) -> Scenario:
    """The cluster, and who comes."""
    sizes = MEDUSA_SHAPES[shape]
    family = Family(
        name=shape,
        size_gib=gib,
        layers=sizes["num_layers"],
        hidden_size=sizes["hidden_size"],
        kv_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab_size"],
        prefill_tokens_per_s=strategy.prefill_tokens_per_s,
        decode_step_s=strategy.step_s,
        decode_more_s=strategy.more_s,
    )
    application = Application(
        name="chat",
        family=shape,
        models=MODELS,
        ttft_s=1.0,
        tpot_s=0.1,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        max_instances=DEVICES,
    )
    node = NodeKind(
        name="node",
        count=1,
        devices=DEVICES,
        device_gib=min(80.0, 2.4 * gib),
        memory_gib=MODELS * (gib + 1.0),
        network_gbit_per_s=AT_ONCE,
        load_gib_per_s=AT_ONCE,
        memory_gib_per_s=3000.0,
    )
    return Scenario(
        name=f"medusa-{shape}",
        nodes=(node,),
        families=(family,),
        applications=(application,),
        arrivals=Arrivals(kind="poisson", per_s=per_s, duration_s=seconds),
        start_up=StartUp(libraries_s=strategy.ready_s),
        keep_alive_s=KEEP_ALIVE_S,
        max_batch=MAX_BATCH,
    )


def run(scenario: Scenario, strategy: Strategy, seed: int) -> dict[str, float]:
    """One cell of the figures."""
    contender = Contender(
        name=strategy.name, start=None, cache=True, created=True, overlapped=False, streamed=False
    )
    result = Simulation(scenario, contender, seed).run()
    return {
        "ttft_p50_s": result.ttft_p50_s,
        "ttft_p99_s": result.ttft_p99_s,
        "ended_per_s": result.finished / result.simulated_s,
        "starts": float(result.starts),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=Path, default=RESULTS)
    parser.add_argument("--shape", choices=tuple(MEDUSA_SHAPES), default="qwen1.5-4b")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of arrivals")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=Path("medusa_traces.json"))
    parser.add_argument("--commit", default=commit(), help="hash and date, where it is no checkout")
    asked = parser.parse_args(arguments)
    rows = rows_of(asked.lines, asked.shape)
    strategies = strategies_of(rows)
    changed, _, changed_date = asked.commit.partition(" ")
    about = {
        "command": "make bench-medusa-traces",
        "machine": f"simulated; run on {machine()}",
        "load": f"load average {os.getloadavg()[0]:.1f} before it",
        "commit": changed,
        "commit_date": changed_date,
        "date": datetime.now(UTC).date().isoformat(),
    }
    measurements: list[dict[str, Any]] = []
    for strategy in strategies:
        samples: dict[str, list[float]] = {}
        for rate in asked.rates:
            for seed in asked.seeds:
                gib = rows["record"]["gib"] if "record" in rows else 8.0
                scenario = scenario_of(asked.shape, gib, strategy, rate, asked.seconds)
                for name, value in run(scenario, strategy, seed).items():
                    samples.setdefault(f"{rate:g}/s {name}", []).append(round(value, 4))
        medians = {name: statistics.median(each) for name, each in samples.items()}
        what = f"{strategy.name}, {asked.shape}: ready after {strategy.ready_s:.3f} s"
        measurements.append(
            {"what": what, **about, "unit": "s, and counts", "samples": samples, "medians": medians}
        )
    document = {"benchmark": asked.out.stem, "measurements": measurements}
    asked.out.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps({one["what"]: one["medians"] for one in measurements}, indent=2))


if __name__ == "__main__":
    main()
