"""What ``bench/gateway.py`` makes of its rows: medians, ratios, and floors that were missed."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

HELD, HELD_BOUND_BYTES = 10_000, 100_000_000
LONG_FACTOR = 1.5
PEERS = ("bare", "litellm", "vllm-router", "sglang-router")
FLOOR_MS = {
    "gateway": {"requests": 0.6, "streams": 1.0},
    "worker": {"requests": 0.25, "streams": 0.4},
}
FLOOR_TIMES_LITELLM = {"requests": 10, "streams": 25}

Row = dict[str, Any]


def median(rows: Sequence[Row]) -> Row:
    """Of every figure; errors are added, and what is no figure is the first row's that has it."""
    found: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if isinstance(values[0], Mapping):
            found[name] = median(values)
        elif name == "errors":
            found[name] = sum(values)
        elif isinstance(values[0], int | float):
            found[name] = round(statistics.median(values), 4)
        else:
            found[name] = values[0]
    return found


def missed(parts: Mapping[str, Any]) -> list[str]:
    """Floors that were missed, and answers that were wrong, in words."""
    found: list[str] = []
    ours = parts.get("ours", {})
    for name, row in ours.items():
        kind = name.split()[0]
        for role, floors in FLOOR_MS.items():
            took = taken(row["cpu_ms_each"], role)
            if name.endswith(" 64") and took > floors[kind]:
                found.append(f"{name}: the {role} takes {took} ms, {floors[kind]} are the floor")
        theirs = parts.get("litellm", {}).get(name)
        times = FLOOR_TIMES_LITELLM[kind]
        if theirs and row["per_s"] < times * theirs["per_s"]:
            found.append(f"{name}: {row['per_s']}/s are not {times} times {theirs['per_s']}")
    if parts.get("held", {}).get("above_idle_bytes", 0) > HELD_BOUND_BYTES:
        found.append(f"{HELD} held requests take {parts['held']['above_idle_bytes']} bytes")
    if parts.get("long", {}).get("p99_times", 0.0) > LONG_FACTOR:
        found.append(f"others' p99 beside long prompts: {parts['long']['p99_times']} times")
    return found + wrong("", parts)


def taken(cpu_ms_each: Mapping[str, float], role: str) -> float:
    """What a role takes with its helpers, which are processes of its own, in ms."""
    of_role = (cost for name, cost in cpu_ms_each.items() if name.split(".")[0] == role)
    return round(sum(of_role), 4)


def wrong(where: str, rows: Any) -> list[str]:
    """Rows of ours with errors, in words."""
    if not isinstance(rows, Mapping):
        return []
    if rows.get("errors"):
        return [f"{where}: {rows['errors']} wrong answers: {rows.get('first_errors')}"]
    return [
        words
        for name, row in rows.items()
        if name not in PEERS
        for words in wrong(f"{where} {name}".strip(), row)
    ]


def ratios(parts: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Our requests and streams a second over others'."""
    return {
        other: {
            name: round(row["per_s"] / rows[name]["per_s"], 3)
            for name, row in parts.get("ours", {}).items()
            if name in rows and rows[name]["per_s"]
        }
        for other, rows in parts.items()
        if other in (*PEERS, "two")
    }
