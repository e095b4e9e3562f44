"""What keeping promises gives an instance, at rates that it can keep and beyond: ``make
bench-promises``.

The engine's own scheduler (``pilotlight.engine.core``) in simulated time, with its lookahead, under
what ``bench/served_gpu.py`` asks: conversations at three rates for each of two models, the draws of
its own runs and two others, and short prompts at a number of clients. Then conversations alone on
an instance that has learned nothing, whose kernels compile, whose predictions are wrong, or whose
host takes 5 ms more of each step with prompts. Steps take what they took on an H200
(``promises_device.py``), and gateways stand before it (``promises_gateways.py``); nothing else of a
system is in it. Compared are steps that keep promises (``BatchLimits.keep_promises``), the same
where newcomers wait for no batch's end (``BatchLimits.ending_s``), steps that do neither, and steps
as vLLM's defaults make them: up to 8,192 tokens, first come, first served, on the same device.
Goodput is as there: TTFT of at most 200 ms, TPOT of at most 20 ms.

Prints one JSON document in the form of ``bench/results``, a line for each measurement.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import promises_device as device
import served_gpu_load as load
from promises_device import Served, Trial
from promises_gateways import Asked
from served_gpu import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SEED,
    TURNS,
    Sizes,
    commit,
    conversations,
    machine,
)
from served_gpu_up import NO_SLO_MS

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.policy.request import Promise

RATES = {"4B": (8.0, 16.0, 32.0), "8B": (6.0, 12.0, 24.0)}
WINDOW_S = 10.0
DRAWS = range(5)
BEFORE = 5 + Sizes.rounds * len(TURNS)
"""Draws of ``bench/served_gpu.py`` before its first conversations that count."""
SLO = Promise(first_token_in_s=load.TTFT_MS / 1000, token_s=load.TPOT_MS / 1000)
NO_SLO = Promise(first_token_in_s=NO_SLO_MS[0] / 1000, token_s=NO_SLO_MS[1] / 1000)
NOT_KEPT = BatchLimits(
    step_tokens=10_240, chunk_tokens=2048, running=256, gather_s=0.010, prefix_cache=False
)
"""As a GPU's engine has them, but for promises."""
KEPT = replace(NOT_KEPT, keep_promises=True)
WAYS = {
    "kept": replace(KEPT, ending_s=0.100),
    "no end awaited": KEPT,
    "not kept": NOT_KEPT,
    "vLLM's defaults": BatchLimits(step_tokens=8192, running=256, prefix_cache=False),
}
TRIALS = {
    "nothing learned": Trial(),
    "kernels compile": Trial(compiled_steps=3),
    "predictions 30 % short": Trial(predicted=0.7),
    "predictions 30 % long": Trial(predicted=1.3),
    "a slow host": Trial(host_s=0.005),
}
TRIED = {"4B": (16.0,), "8B": (12.0, 24.0)}
UNITS = {"output_tokens_per_s": "tokens/s", "goodput_per_s": "good requests/s"}
"""Everything else is milliseconds."""


def conversation(rate_per_s: float, seed: int) -> list[Asked]:
    """Those that arrive at a rate."""
    count = round(rate_per_s * WINDOW_S)
    prompts, outputs = conversations(count, seed, 1)
    at_s = load.arrivals(count, rate_per_s, seed)
    return [Asked(*one) for one in zip(at_s, prompts, outputs, strict=True)]


def served(shape: str, limits: BatchLimits, draw: int) -> dict[str, dict[str, float]]:
    """Figures of all rows, one after the other on one instance, as ``bench/served_gpu.py`` has
    them: what it has learned in one is there in the next.

    Args:
        shape: of the model.
        limits: of its steps.
        draw: 0: the one of ``bench/served_gpu.py``.
    """
    instance = Served(device.DEVICES[shape], limits, draw)
    found: dict[str, dict[str, float]] = {}
    for clients in TURNS:
        short = [Asked(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)] * (clients * TURNS[clients])
        found[f"{clients} concurrent"] = load.figures(instance.in_turn(short, clients, NO_SLO))
    for rate in RATES[shape]:
        answers = instance.arriving(conversation(rate, seed_of(shape, rate, draw)), SLO)
        found[f"AzureConv at {rate:g}/s"] = load.figures(answers, rate)
    for name, trial in TRIALS.items():
        instance = Served(device.DEVICES[shape], limits, draw, trial)
        for rate in TRIED[shape]:
            answers = instance.arriving(conversation(rate, seed_of(shape, rate, draw)), SLO)
            found[f"AzureConv at {rate:g}/s, {name}"] = load.figures(answers, rate)
    return found


def seed_of(shape: str, rate_per_s: float, draw: int) -> int:
    """Of the conversations that ``bench/served_gpu.py`` draws, as often as it has rounds; of others
    with further draws.
    """
    rates = RATES[shape]
    return SEED + BEFORE + rates.index(rate_per_s) + len(rates) * draw


def rows_of(shape: str, common: Mapping[str, str]) -> list[dict[str, Any]]:
    """In the form of ``bench/results``."""
    found = {way: [served(shape, limits, draw) for draw in DRAWS] for way, limits in WAYS.items()}
    rows: list[dict[str, Any]] = []
    for row in next(iter(found.values()))[0]:
        print(f"{shape}: {row}", file=sys.stderr)
        for metric in load_metrics(row):
            samples = {
                way: [round(one[row][metric], 2) for one in runs] for way, runs in found.items()
            }
            medians = {way: round(statistics.median(runs), 2) for way, runs in samples.items()}
            told = {"what": f"{shape}: {row}: {metric}", **common}
            told |= {"unit": UNITS.get(metric, "ms")}
            rows.append({**told, "samples": samples, "medians": medians})
            print(line(metric, medians, samples), file=sys.stderr)
    return rows


def load_metrics(row: str) -> tuple[str, ...]:
    """What a row tells."""
    times = [f"{what}_ms_{word}" for what in ("ttft", "tpot", "itl") for word in ("p50", "p99")]
    first = ("goodput_per_s",) if row.startswith("AzureConv") else ()
    return (*first, "output_tokens_per_s", *times)


def line(metric: str, medians: Mapping[str, float], samples: Mapping[str, list[float]]) -> str:
    """For people: the medians by way, then the draw that was served."""
    told = "".join(f"{way}: {value:<11,.2f}" for way, value in medians.items())
    return f"  {metric:<22}{told}" + "".join(f"{runs[0]:>10,.2f}" for runs in samples.values())


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(RATES), choices=list(RATES))
    shapes: list[str] = parser.parse_args().shapes
    named, _, day = commit().partition(" ")
    common = {
        "command": "make bench-promises",
        "machine": machine(),
        "load": "simulated time",
        "commit": named,
        "commit_date": day,
        "date": datetime.now(UTC).date().isoformat(),
    }
    rows = [row for shape in shapes for row in rows_of(shape, common)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    print(f'{{"benchmark": "promises", "measurements": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
