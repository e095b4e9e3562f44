"""bench/results/cache.json of the lines of ``cache.py``: ``cache_results.py LINES COMMIT LOAD``.

``cache_results.py LINES COMMIT LOAD POLICY`` renews one policy in what is recorded: simulated
figures of the others do not hang on it. Such measurements say so in ``renewed``.

LINES is what one run has printed, or several together; COMMIT the commit that they ran at; LOAD
what else the machine did: simulated figures do not depend on it, those of an access do.

Of each seed only the seconds of loads for each request are kept (``samples``); all else is a mean
over seeds: ``policies`` has a row for each policy, of the document's ``columns``. What follows from
samples is not written, for the file is large as it is: a policy's mean, that over ``optimum``, and
what it closes of the gap between LRU and the true rates or ``bound``.
"""

import datetime
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cache import CDF_QUANTILES
from cold_start import machine

from pilotlight.sim.cache.scenarios import REPORTED_ON

ROOT = Path(__file__).resolve().parents[1]
Line = dict[str, Any]
KEPT = ("hit_ratio", "reloads", "throughput_per_s")
COLUMNS = (*KEPT, *(f"load_s_p{100 * share:g}" for share in CDF_QUANTILES))
"""Of each policy, with four digits; of the two other sets of sizes, samples alone are kept."""
LINE_WIDTH = 320
RESULTS = ROOT / "bench/results/cache.json"


def measurements(lines: Iterable[Line], named: Mapping[str, str]) -> list[dict[str, Any]]:
    """One for each workload and size of the cache, with all its policies.

    Args:
        lines: As ``cache.py`` has printed them.
        named: What all of them have in common: machine, commit and the like.
    """
    cells: defaultdict[tuple[object, ...], list[Line]] = defaultdict(list)
    for line in lines:
        keys = ("part", "scenario", "sizes", "pairing", "drift_s", "share")
        cells[tuple(line.get(key) for key in keys)].append(line)
    return [{**named, **_command(cell), **_measured(cell)} for cell in cells.values()]


def renewed(
    recorded: Iterable[dict[str, Any]], found: Iterable[dict[str, Any]], policy: str, commit: str
) -> list[dict[str, Any]]:
    """What is recorded, with one policy's figures as they were found at another commit.

    Args:
        recorded: Measurements, with all policies.
        found: Measurements of a run of that policy alone, some of those that are recorded.
        policy: Its name.
        commit: That it ran at.

    Raises:
        KeyError: what was found is not recorded.
    """
    by_what = {one["what"]: one for one in recorded}
    for one in found:
        known = by_what[one["what"]]
        known["samples"][policy] = one["samples"][policy]
        known["renewed"] = {**known.get("renewed", {}), policy: commit}
        for part in ("policies", "hit_ratios", "told_of_alone"):
            if part in known:
                known[part][policy] = one[part][policy]
    return list(by_what.values())


def _command(cell: list[Line]) -> dict[str, str]:
    of_each = cell[0].get("of_each_seed")
    samples = of_each["load_s_per_request"] if isinstance(of_each, dict) else of_each
    seeds = "" if samples is None or len(samples) == len(REPORTED_ON) else f" SEEDS={len(samples)}"
    return {"command": f"make bench-cache PARTS={cell[0]['part']}{seeds}"}


def _measured(cell: list[Line]) -> dict[str, Any]:
    first = cell[0]
    if first["part"] == "access":
        return {
            "what": f"an access with {first['models']:.0f} models, processor time",
            "unit": "µs",
            "samples": {one["policy"]: [_short(one["with_room_us"])] for one in cell},
            "told_of_alone": {one["policy"]: _short(one["on_access_us"]) for one in cell},
        }
    if first["part"] == "tiers":
        return {
            "what": f"{first['scenario']}, device of {first['device_share']:.0%}, "
            f"host of {first['share']:.0%}",
            "unit": "seconds of reloads for each request",
            "samples": {one["policy"]: one["of_each_seed"] for one in cell},
            "hit_ratios": {
                one["policy"]: [_short(one["device_hit_ratio"]), _short(one["host_hit_ratio"])]
                for one in cell
            },
        }
    of = "reload_s_per_request" if first["part"] == "modern" else "load_s_per_request"
    rows = {
        one["policy"]: [_short(one[name]) for name in KEPT]
        + [_short(value_s) for value_s in one["load_s_quantiles"].values()]
        for one in cell
    }
    policies = {"policies": rows} if first.get("sizes", "large") == "large" else {}
    share = f"cache of {first['share']:.0%}"
    if first["part"] == "modern":
        bound_s = first["bound_reload_s"]
        return {
            "what": f"{first['scenario']}, {share}",
            "unit": "seconds of reloads for each request",
            "bound": None if bound_s is None else _short(bound_s, 6),
            "samples": {one["policy"]: one["of_each_seed"][of] for one in cell},
            **policies,
        }
    drift = "" if first["drift_s"] is None else f", drift each {first['drift_s']:.0f} s"
    series = "periods of drift: " if first["part"] == "drift" else ""
    return {
        "what": f"{series}seven models, {first['sizes']}, {first['pairing']}{drift}, {share}",
        "unit": "seconds of loads for each request",
        "optimum": _short(first["optimum_load_s"], 6),
        "samples": {one["policy"]: one["of_each_seed"][of] for one in cell},
        **policies,
    }


def readable(value: object, depth: int = 0) -> str:
    """JSON with a line for whatever fits one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth <= LINE_WIDTH:
        return line
    # Narrow: the indents of this many lines are a tenth of the file.
    inner, outer = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
        entries = [f"{json.dumps(name)}: {readable(one, depth + 1)}" for name, one in members]
    else:
        entries = [readable(one, depth + 1) for one in cast("list[Any]", value)]
    opens, closes = line[0], line[-1]
    return f"{opens}\n{inner}" + f",\n{inner}".join(entries) + f"\n{outer}{closes}"


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def main() -> None:
    """Read, and write the file."""
    file, commit, load = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    told = machine()
    commit_date = subprocess.run(
        ["git", "show", "-s", "--format=%cs", commit],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    named = {
        "machine": f"{told['cores']} cores of {told['cpu']}, Python {told['python']}",
        "load": load,
        "commit": commit,
        "commit_date": commit_date,
        "date": datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
        .date()
        .isoformat(),
    }
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = measurements(lines, named)
    if len(sys.argv) > 4:
        recorded = json.loads(RESULTS.read_text())["measurements"]
        found = renewed(recorded, found, sys.argv[4], commit)
    document = {"benchmark": "cache", "columns": COLUMNS, "measurements": found}
    RESULTS.write_text(readable(document) + "\n")


if __name__ == "__main__":
    main()
