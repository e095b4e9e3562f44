"""Joins the parts of ``bench/served_gpu.py`` into one document in the form of ``bench/results``,
and a table for people.

No I/O.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PARTS = ("ours-4B", "vllm-4B", "ours-8B", "vllm-8B")
NAMES = {"ours": "ours", "vllm": "vLLM"}
MORE_IS_BETTER = ("output_tokens_per_s", "goodput_per_s")
UNITS = {
    "output_tokens_per_s": "tokens/s",
    "goodput_per_s": "good requests/s",
    "good_share": "share of requests",
}
"""Everything else is milliseconds."""
AT_ONCE = (
    "output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "itl_ms_p50",
    "itl_ms_p99",
)
LOGPROBS = "logprobs"
"""What a row's name ends with where they are asked for."""
ARRIVING = ("goodput_per_s", *AT_ONCE)
WARM_FLOOR = 1.0
COLD_FLOOR = {"4B": 50.0, "8B": 30.0}
COLDS = {
    "first": "page cache, ours the first since its start",
    "again": "page cache, kernels compiled",
    "from the host pool": "from the host pool",
}
JUDGED_COLD = "again"
NOT_RECORDED = "not recorded"

Part = Mapping[str, Any]


def shape_of(part: str) -> str:
    """``4B`` of ``ours-4B``."""
    return part.partition("-")[2]


def ratio(ours: float, theirs: float, *, more_is_better: bool) -> float | None:
    """How much better we are: 1.0 is as good; None where nothing can be said."""
    above, below = (ours, theirs) if more_is_better else (theirs, ours)
    return round(above / below, 3) if below > 0 else None


def judged(metric: str, row: str) -> bool:
    """Whether the floor is for this figure.

    At a given rate, how many tokens a second come is what is asked for; goodput is what counts.
    """
    if row.endswith(LOGPROBS):
        return False
    return metric == "goodput_per_s" if row.startswith("AzureConv") else True


def joined(parts: Sequence[Part], commit: str) -> dict[str, Any]:
    """One document.

    Args:
        parts: as they were written.
        commit: hash and date of this checkout, for parts that were measured where there is none.

    Returns:
        ``measurements`` as ``bench/results`` has them, what the ``floors`` ask, what was
        ``missed``, and the parts' own facts.
    """
    by_name = {part["part"]: part for part in parts}
    shapes = dict.fromkeys(shape_of(name) for name in by_name)
    measurements: list[dict[str, Any]] = []
    missed: list[str] = []
    for shape in shapes:
        sides = {who: by_name[f"{who}-{shape}"] for who in NAMES if f"{who}-{shape}" in by_name}
        for measured in _measured(shape, sides, commit):
            measurements.append(measured)
            if measured.get("floor") and (
                measured["ratio"] is None or measured["ratio"] < measured["floor"]
            ):
                missed.append(
                    f"{measured['what']}: {measured['ratio']} of vLLM's, floor {measured['floor']}"
                )
        for part in sides.values():
            missed += [f"{part['part']}: left out: {name}" for name in part["left_out"]]
            missed += [f"{part['part']}: {words}" for words in part["wrong"]]
            missed += [] if part["complete"] else [f"{part['part']}: not run to its end"]
    facts = ("about", "cold", "machine", "commit", "date", "load", "quick", "elapsed_s", "rows")
    return {
        "benchmark": "served_gpu",
        "measurements": measurements,
        "missed": missed,
        "parts": {
            name: {fact: part[fact] for fact in facts if fact in part}
            for name, part in by_name.items()
        },
    }


def requests_of(parts: Sequence[Part]) -> str:
    """The times of each request of all parts, a line for each row's round."""
    lines = [
        json.dumps(
            {"part": part["part"], "commit": part["commit"], "row": row, "round": place, **each}
        )
        for part in parts
        for row, rounds in part.get("requests", {}).items()
        for place, each in enumerate(rounds)
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _measured(shape: str, sides: Mapping[str, Part], commit: str) -> Iterator[dict[str, Any]]:
    """Every figure of a shape, of both sides where there are two."""
    part = next(iter(sides.values()))
    measured_commit, _, commit_date = (part["commit"] or commit).partition(" ")
    common = {
        "command": f"make bench-served-gpu VLLM=python PARTS={','.join(side['part'] for side in sides.values())}",
        "machine": part["machine"],
        "load": "; ".join(side["load"] for side in sides.values()),
        "commit": measured_commit or NOT_RECORDED,
        "commit_date": commit_date or NOT_RECORDED,
        "date": part["date"],
    }
    for name in dict.fromkeys(name for side in sides.values() for name in side.get("cold", {})):
        # Whatever ours has kept, vLLM's other side is its start with nothing compiled: it has no
        # model that is registered.
        colds = {
            who: side["cold"].get(name, side["cold"]["first"])
            for who, side in sides.items()
            if side.get("cold")
        }
        samples = {who: [cold["first_token_s"]] for who, cold in colds.items()}
        floor = COLD_FLOOR.get(shape) if name == JUDGED_COLD else None
        measured = _one(
            f"{shape}: cold start, {COLDS[name]}",
            common,
            "s",
            samples,
            more_is_better=False,
            floor=floor,
        )
        phases = sides.get("ours", {}).get("cold", {}).get(name, {}).get("phases_s")
        yield measured | ({"our_phases_s": phases} if phases else {})
    for row in dict.fromkeys(name for side in sides.values() for name in side["rows"]):
        there = {who: side["rows"][row] for who, side in sides.items() if row in side["rows"]}
        for metric in ARRIVING if row.startswith("AzureConv") else AT_ONCE:
            samples = {who: [each[metric] for each in rounds] for who, rounds in there.items()}
            yield _one(
                f"{shape}: {row}: {metric}",
                common,
                UNITS.get(metric, "ms"),
                samples,
                more_is_better=metric in MORE_IS_BETTER,
                floor=WARM_FLOOR if judged(metric, row) else None,
            )


def _one(
    what: str,
    common: Mapping[str, Any],
    unit: str,
    samples: Mapping[str, list[float]],
    *,
    more_is_better: bool,
    floor: float | None,
) -> dict[str, Any]:
    """One figure with its medians, and the ratio and its floor where there are two sides.

    Args:
        what: its name.
        common: what all figures of the shape have.
        unit: of the samples.
        samples: by side, one for each round.
        more_is_better: else less is.
        floor: the least ratio that will do; None: it is not judged.
    """
    medians = {NAMES[who]: round(statistics.median(values), 3) for who, values in samples.items()}
    found: dict[str, Any] = {"what": what, **common, "unit": unit}
    found |= {
        "samples": {NAMES[who]: values for who, values in samples.items()},
        "medians": medians,
    }
    if len(medians) == len(NAMES):
        found |= {
            "best_peer": "vLLM",
            "ratio": ratio(medians["ours"], medians["vLLM"], more_is_better=more_is_better),
        }
        found |= {"floor": floor} if floor is not None else {}
    return found


def table(document: Mapping[str, Any]) -> str:
    """For people: a line for each figure, then where the processor's time went, then what was
    missed.
    """
    lines = [f"{'':64}{'ours':>12}{'vLLM':>12}{'ratio':>9}"]
    for measured in document["measurements"]:
        medians = measured["medians"]
        cells = "".join(
            f"{medians[name]:>12,.2f}" if name in medians else f"{'':>12}"
            for name in NAMES.values()
        )
        told = measured.get("ratio")
        low = told is not None and "floor" in measured and told < measured["floor"]
        lines.append(
            f"{measured['what']:<64}{cells}"
            + (f"{told:>9.2f}" if told is not None else "")
            + (" *" if low else "")
        )
    for name, part in document["parts"].items():
        for row, rounds in part["rows"].items():
            if "cpu" in rounds[-1]:
                roles = rounds[-1]["cpu"]["roles"].items()
                told = ", ".join(
                    f"{role} {cost['cores']} ({cost['busiest_thread']['cores']})"
                    for role, cost in roles
                )
                lines.append(f"{name}: {row}: cores (busiest thread): {told}")
    lines += [f"MISSED  {words}" for words in document["missed"]]
    return "\n".join(lines)
