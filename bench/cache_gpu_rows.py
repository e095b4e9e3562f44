"""Figures of ``bench/cache_gpu.py`` in the form of ``bench/results``.

No I/O.
"""

from collections.abc import Mapping
from typing import Any


def measurements(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One part's figures, in the form of ``bench/results``."""
    commit_named, _, day = part["commit"].partition(" ")
    common = {
        "command": f"make bench-cache-gpu PARTS={part['part']}",
        "machine": part["machine"],
        "load": part["load"],
        "commit": commit_named,
        "commit_date": day,
        "date": part["date"],
    }
    what, _, name = part["part"].partition("-")
    rows: list[tuple[str, str, dict[str, float]]] = []
    if what == "switch":
        for source in ("resident", "from the host pool"):
            figures = {key: part[source][key] for key in ("p50_ms", "p90_ms", "p99_ms")}
            rows.append((f"{name}: first token, {source}", "ms", figures))
        for source, cold in part["cold"].items():
            figures = {"seconds": cold["first_token_s"]}
            rows.append((f"{name}: first token, cold, {source}", "s", figures))
    else:
        told_ms = part["first_token_but_first_requests"]
        figures = {key: told_ms[key] for key in ("mean_ms", "p50_ms", "p90_ms", "p99_ms")}
        rows.append((f"12 models under {name}: first token", "ms", figures))
        counts = {key: part[key] for key in ("reloads", "hit_ratio_but_first")}
        rows.append((f"12 models under {name}: hits", "count, share", counts))
    return [
        {
            "what": title,
            **common,
            "unit": unit,
            "samples": {key: [value] for key, value in figures.items()},
            "medians": figures,
        }
        for title, unit, figures in rows
    ]
