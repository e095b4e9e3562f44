"""ParaServe's figures and tables in simulated time: ``make bench-scheduler``.

Both testbeds of the paper (section 8.1) under the scheduler's own control, with every policy:

- Figures 5 and 7, tables 1 and 2: starts by hand (``scheduler_figures``)
- Figure 10: attainment over the coefficient of variation of arrivals, at several rates
- Figure 11: over the scale of SLOs, at a coefficient of 8 and 0.6 requests a second
- Figure 12: by application, at a coefficient of 8 and 0.6 requests a second

A grid of four coefficients, three rates and 15 minutes of arrivals ends within 20 minutes of one
core; ``--full`` has five, four and 30 minutes. Every run is a line in ``--lines``, those that are
there already are not made again. At the end one JSON document, in the form of ``bench/results``.
Equal seeds give equal lines.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cold_start import machine
from scheduler_figures import figure_5, figure_7, tables

from pilotlight.cli.cluster_simulation import record
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import CONTENDERS, Scenario, read_builtin

ROOT = Path(__file__).resolve().parent.parent
TESTBEDS = ("paraserve-testbed-1", "paraserve-testbed-2")
POLICIES = ("single", "locality", "paraserve", "paraserve+cache", "pilotlight-bare", "pilotlight")
USUAL_CV, USUAL_RATE = 8.0, 0.6
CVS, RATES, SECONDS = (8.0, 4.0, 1.0, 16.0), (0.6, 0.4, 0.8), 900.0
FULL_CVS, FULL_RATES, FULL_SECONDS = (8.0, 4.0, 2.0, 1.0, 16.0), (0.6, 0.4, 0.8, 1.0), 1800.0
SCALES = (0.25, 0.5, 0.75, 2.0)
"""Beside 1, which figure 10 has."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One scenario."""

    testbed: str
    per_s: float
    cv: float
    slo_scale: float

    def scenario(self, seconds: float) -> Scenario:
        """It, with so many seconds of arrivals."""
        read = read_builtin(self.testbed)
        arrivals = replace(read.arrivals, duration_s=seconds, per_s=self.per_s, cv=self.cv)
        return replace(read, arrivals=arrivals, slo_scale=self.slo_scale)


def cells(cvs: Sequence[float], rates: Sequence[float]) -> Iterator[Cell]:
    """Of both testbeds; those that most figures need first."""
    for per_s in rates:
        for cv in cvs:
            for testbed in TESTBEDS:
                yield Cell(testbed, per_s, cv, 1.0)
        if per_s == USUAL_RATE:
            for scale in SCALES:
                for testbed in TESTBEDS:
                    yield Cell(testbed, per_s, USUAL_CV, scale)


def run(cell: Cell, seconds: float, seed: int, policy: str) -> dict[str, Any]:
    """One line."""
    result = Simulation(cell.scenario(seconds), CONTENDERS[policy], seed).run()
    return {
        "per_s": cell.per_s,
        "cv": cell.cv,
        "slo_scale": cell.slo_scale,
        "seconds": seconds,
        "seed": seed,
        **record(result),
    }


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a line is of."""
    names = ("scenario", "per_s", "cv", "slo_scale", "seconds", "seed", "policy")
    return tuple(line[name] for name in names)


def lines_of(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """All lines, those that are still to be made as they come."""
    seconds = asked.seconds or (FULL_SECONDS if asked.full else SECONDS)
    cvs, rates = (FULL_CVS, FULL_RATES) if asked.full else (CVS, RATES)
    file: Path | None = asked.lines
    texts = file.read_text().splitlines() if file is not None and file.exists() else []
    found = {key_of(line): line for line in map(json.loads, texts)}
    wanted = [
        (cell, seconds, seed, policy)
        for seed in range(1, asked.seeds + 1)
        for cell in cells(cvs, rates)
        for policy in asked.policies.split(",")
    ]
    keys = [
        (cell.testbed, cell.per_s, cell.cv, cell.slo_scale, seconds, seed, policy)
        for cell, _, seed, policy in wanted
    ]
    missing = [one for key, one in zip(keys, wanted, strict=True) if key not in found]
    with ProcessPoolExecutor(asked.jobs) as pool:
        for line in pool.map(run, *zip(*missing, strict=True)) if missing else ():
            found[key_of(line)] = line
            text = json.dumps(line)
            print(text, file=sys.stderr, flush=True)
            if file is not None:
                with file.open("a") as out:
                    out.write(text + "\n")
    return [found[key] for key in keys]


def measurements(lines: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> list[Any]:
    """Figures 10 to 12, and what our policy has of ``single``'s attainment at the most."""
    found: list[Any] = []
    for number, testbed in enumerate(TESTBEDS, start=1):
        here = [one for one in lines if one["scenario"] == testbed]
        usual = [one for one in here if one["slo_scale"] == 1.0]
        for metric in ("ttft", "tpot"):
            for rate in sorted({one["per_s"] for one in usual}):
                of_rate = [one for one in usual if one["per_s"] == rate]
                what = f"figure 10, testbed {number}, {rate:g} requests/s, {metric.upper()}"
                found.append({"what": what, **about, **_series(of_rate, "cv", metric)})
            scales = [one for one in here if (one["per_s"], one["cv"]) == (USUAL_RATE, USUAL_CV)]
            what = f"figure 11, testbed {number}, {metric.upper()}"
            found.append({"what": what, **about, **_series(scales, "slo_scale", metric)})
        apps = [one for one in usual if (one["per_s"], one["cv"]) == (USUAL_RATE, USUAL_CV)]
        names = sorted({name for one in apps for name in one["applications"]})
        found.append(
            {
                "what": f"figure 12, testbed {number}, TTFT by application",
                **about,
                "applications": names,
                "samples": {
                    policy: [
                        _mean(
                            one["applications"][name]["ttft_attainment"]
                            for one in apps
                            if one["policy"] == policy
                        )
                        for name in names
                    ]
                    for policy in dict.fromkeys(one["policy"] for one in apps)
                },
            }
        )
    return found


def _series(lines: Sequence[Mapping[str, Any]], over: str, metric: str) -> dict[str, Any]:
    """Attainment of each policy over one thing that is varied, as a mean over the seeds, with the
    least and the most of them.
    """
    points = sorted({one[over] for one in lines})
    samples: dict[str, list[float]] = {}
    ranges: dict[str, list[list[float]]] = {}
    for policy in dict.fromkeys(one["policy"] for one in lines):
        values = [
            [
                one[f"{metric}_attainment"]
                for one in lines
                if one["policy"] == policy and one[over] == point
            ]
            for point in points
        ]
        samples[policy] = [_mean(of_point) for of_point in values]
        ranges[policy] = [[round(min(one), 4), round(max(one), 4)] for one in values]
    seeds = [len({one["seed"] for one in lines if one[over] == point}) for point in points]
    found: dict[str, Any] = {over: points, "seeds": seeds, "samples": samples}
    if max(seeds) > 1:
        found["ranges"] = ranges
    if metric == "ttft" and {"single", "pilotlight", "paraserve"} <= set(samples):
        found["times_single"] = {
            policy: [
                round(ours / theirs, 2) if theirs else None
                for ours, theirs in zip(samples[policy], samples["single"], strict=True)
            ]
            for policy in ("paraserve", "pilotlight")
        }
    return found


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 4)


def by_hand(about: Mapping[str, str]) -> list[Any]:
    """Figures 5 and 7, tables 1 and 2."""
    seconds = {**about, "unit": "s"}
    fifth, seventh, both = figure_5(), figure_7(), tables()
    return [
        {
            "what": "figure 5(a), Llama2-7B on A10, TTFT by stages",
            **seconds,
            "stages": fifth["sizes"],
            "samples": fifth["ttft_s"],
        },
        {
            "what": "figure 5(b), TPOT by stages, memory in proportion",
            **seconds,
            "stages": fifth["sizes"],
            "samples": {"tpot_s": fifth["tpot_s"]},
        },
        {
            "what": "figure 5(c), TPOT of four stages by memory of each worker",
            **seconds,
            "memory_shares": fifth["memory_shares"],
            "samples": {"tpot_s": fifth["tpot_of_four_s"]},
        },
        {
            "what": "figure 7, until 30 new workers of Llama2-13B carry 30 requests/s",
            **seconds,
            "groups": seventh["groups"],
            "capacity": seventh["capacity"],
            "samples": {name: [value] for name, value in seventh["full_s"].items()},
        },
        {
            "what": "table 1, 8 requests of 1,024 tokens at once",
            **seconds,
            "samples": {
                f"{name}, {what}": [value]
                for name, one in both["table_1"].items()
                for what, value in one.items()
            },
        },
        {
            "what": "table 2, SLOs",
            **seconds,
            "samples": {
                f"{name}, {what}": [value]
                for name, one in both["table_2"].items()
                for what, value in one.items()
            },
        },
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is missing, and print or write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="the whole grid, for some hours")
    parser.add_argument("--seconds", type=float, help="of arrivals in each run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--lines", type=Path, help="a file for lines of single runs")
    parser.add_argument("--out", type=Path, help="of the document; else it is printed")
    asked = parser.parse_args(arguments)
    about = {**provenance(), "unit": "share of requests"}
    document = {
        "benchmark": "scheduler",
        "measurements": [*by_hand(about), *measurements(lines_of(asked), about)],
    }
    text = json.dumps(document, indent=2) + "\n"
    if asked.out is None:
        print(text, end="")
    else:
        asked.out.write_text(text)


def provenance() -> dict[str, str]:
    """Where the figures come from."""

    def git(what: str) -> str:
        command = ["git", "-C", str(ROOT), "log", "-1", f"--format={what}", "--date=short"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    host = machine()
    return {
        "command": "make bench-scheduler",
        "machine": f"{host['cores']} cores ({host['cpu']}), Python {host['python']}",
        "load": "any: simulated time does not depend on it",
        "commit": git("%H")[:7],
        "commit_date": git("%cd"),
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
