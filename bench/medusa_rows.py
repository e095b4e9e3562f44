"""Rows of ``bench/medusa.py``: lines as they come, measurements in ``bench/results`` afterwards.

``python medusa_rows.py RESULTS LINES ...`` (``make bench-medusa-results``) puts what LINES have
into RESULTS, in the place of what was measured of the same shape in the same way, and prints the
table of the loading phases: each figure keeps the commit and the machine that it comes from.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_shapes import MEDUSA_SHAPES, PAPER_NODES

WHAT = {
    "record": "what is recorded: nodes of 35 graphs, bytes",
    "plain": "the loading phase without materialization, kernels compiled before",
    "plain-cold": "the loading phase without materialization, nothing compiled before",
    "witness": "the same steps recorded where the arena lies elsewhere",
    "pointers": "what is recorded with what each address points to",
    "medusa": "the loading phase as MEDUSA has it: pointers, triggering, room before weights",
    "first-layer": "room first, then the first layer's 35 sizes beside the weights",
    "ours": "the loading phase with everything materialized",
    "serving": "decode steps beside a restore, times as long as alone",
    "steps": "steps of one and of 16 requests, eagerly and as graphs, and a prompt",
    "offline": "a build by part",
    "vllm-cold": "vLLM's loading phase, nothing compiled before",
    "vllm": "vLLM's loading phase, compiled before",
    "vllm-eager": "vLLM's loading phase without graphs",
}
WAYS = tuple(WHAT)
ABOUT = ("command", "machine", "load", "commit", "commit_date", "date")
"""What each row says of where it comes from, in words."""
ELSEWHERE = re.compile(r"^on an? [^:]+: ")
"""How a measurement's name begins that is of another device than the file's."""
PLACES = 6
"""Digits behind the point."""
Row = dict[str, Any]
Rows = dict[tuple[str, str], list[Row]]
"""By way and shape."""


def take(rows: Rows, line: Mapping[str, Any]) -> None:
    """One row more."""
    told = {name: each for name, each in line.items() if name not in ("way", "shape")}
    rows.setdefault((line["way"], line["shape"]), []).append(told)


def read(path: Path) -> Rows:
    """The rows of a file of lines, or of results.

    Raises:
        FileNotFoundError: there is none.
        KeyError: a measurement is of no way and shape that there are.
    """
    rows: Rows = {}
    text = path.read_text()
    if path.suffix != ".json":
        for line in text.splitlines():
            take(rows, json.loads(line))
        return rows
    keys = {named(way, shape): (way, shape) for way in WAYS for shape in MEDUSA_SHAPES}
    for measured in json.loads(text)["measurements"]:
        samples: dict[str, list[float]] = measured["samples"]
        said = {
            name: value
            for name, value in measured.items()
            if name not in ("what", "unit", "samples", "medians")
        }
        count = max(map(len, samples.values()))
        rows[keys[ELSEWHERE.sub("", measured["what"])]] = [
            {**said, **{name: values[number] for name, values in samples.items()}}
            for number in range(count)
        ]
    return rows


def named(way: str, shape: str) -> str:
    """What a measurement is, in words."""
    return f"{WHAT[way]}, {shape}"


def medians_of(rows: Sequence[Row]) -> dict[str, float]:
    """Of what all rows have."""
    return {name: statistics.median(values) for name, values in _samples_of(rows).items()}


def document(rows: Rows) -> Row:
    """In the form of ``bench/results``: shape by shape, in the order of the ways."""
    measurements: list[Row] = []
    for shape in MEDUSA_SHAPES:
        for way in WAYS:
            each = rows.get((way, shape))
            if not each:
                continue
            said = {name: one for name, one in each[-1].items() if isinstance(one, str) and one}
            about = {name: said.pop(name) for name in ABOUT if name in said}
            samples = _samples_of(each)
            measurements.append(
                {
                    "what": named(way, shape),
                    **about,
                    "unit": "s, and counts",
                    **said,
                    "samples": samples,
                    "medians": medians_of(each),
                }
            )
    return {"benchmark": "medusa", "measurements": measurements}


def _samples_of(rows: Sequence[Row]) -> dict[str, list[float]]:
    return {
        name: [round(row[name], PLACES) for row in rows]
        for name, value in rows[0].items()
        if not isinstance(value, str) and all(name in row for row in rows)
    }


def table(rows: Rows) -> Iterable[str]:
    """Table 1 and Figure 7 in one, as Markdown; seconds of all stages together."""
    columns = {"(a)": "plain", "(b)": "medusa", "(c)": "ours", "(d)": "vllm", "(f)": "vllm-eager"}
    last = "(b) to (a) | (c) to (a) | (d) by (c) | build"
    yield f"| shape | nodes (paper) | {' | '.join(columns)} | {last} |"
    yield f"|{'---|' * (len(columns) + 6)}"
    for shape in MEDUSA_SHAPES:
        found = {way: medians_of(rows[way, shape]) for way in WAYS if (way, shape) in rows}
        if not found:
            continue
        totals = {way: each["total_s"] for way, each in found.items() if "total_s" in each}
        nodes = f"{found['record']['nodes']:,.0f}" if "record" in found else ""
        cells = [f"{totals[way]:.2f}" if way in totals else "" for way in columns.values()]
        shares = [
            f"{totals[way] / totals['plain'] - 1:+.0%}" if {way, "plain"} <= {*totals} else ""
            for way in ("medusa", "ours")
        ]
        times = f"{totals['vllm'] / totals['ours']:.0f}" if {"vllm", "ours"} <= {*totals} else ""
        built = f"{totals['offline']:.0f}" if "offline" in totals else ""
        paper = f"{PAPER_NODES[shape]:,}" if shape in PAPER_NODES else "none"
        yield f"| {' | '.join((shape, f'{nodes} ({paper})', *cells, *shares, times, built))} |"


def main() -> None:
    """Puts rows into results."""
    results, *more = map(Path, sys.argv[1:])
    rows = read(results) if results.exists() else Rows()
    for lines in more:
        rows |= read(lines)
    results.write_text(json.dumps(document(rows), indent=2) + "\n")
    for line in table(rows):
        print(line)


if __name__ == "__main__":
    main()
