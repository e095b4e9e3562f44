"""From what ``make bench-gateway`` prints to ``bench/results/gateway.json``.

    python bench/gateway_results.py PRINTED > bench/results/gateway.json

A measurement for each kind and concurrency of each server: requests a second, and processor time by
process where the processes are ours.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SERVERS = {
    "ours": "Pilotlight",
    "two": "Pilotlight with two gateways",
    "paced": "Pilotlight with 10 ms between tokens",
    "bare": "a bare ASGI application over NATS",
    "litellm": "LiteLLM's proxy",
    "vllm-router": "vLLM's router",
    "sglang-router": "SGLang's router",
}
ROLES = ("gateway", "worker", "gateway.texts.helper", "nats-server")
ADDED = ("p50", "p95", "p99")
"""Of what the way adds to streams with a steady step."""
DIGITS = 4


def samples_of(rounds: list[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of each figure, a sample for each round."""
    found = {
        "per second": [one["per_s"] for one in rounds],
        "latency p50, ms": [one["latency_ms_p50"] for one in rounds],
    }
    for word in ADDED:
        added = [one.get(f"added_ms_{word}") for one in rounds]
        if all(added):
            found[f"added {word}, ms"] = added
    for role in ROLES:
        times = [one["cpu_ms_each"].get(role) for one in rounds]
        if all(times):
            found[f"{role}, ms of processor"] = times
    return found


def measurements(printed: Mapping[str, Any], common: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """One for each row of each server that was measured."""
    for part, name in SERVERS.items():
        rows = printed["parts"].get(part, {})
        for what, row in rows.items():
            if "rounds" not in row:
                continue
            samples = samples_of(row["rounds"])
            medians = {key: round(statistics.median(of), DIGITS) for key, of in samples.items()}
            yield {
                "what": f"{name}, {what} at a time",
                **common,
                "samples": samples,
                "medians": medians,
            }


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("printed", type=Path)
    asked = parser.parse_args()
    printed = json.loads(asked.printed.read_text())
    commit, commit_date = printed["commit"].split()[:2]
    common = {
        "command": "make bench-gateway PEERS=INTERPRETER",
        "machine": printed["machine"],
        "load": printed["load"],
        "commit": commit[:7],
        "commit_date": commit_date,
        "date": printed["date"],
        "unit": "see the names",
    }
    document = {"benchmark": "gateway", "measurements": list(measurements(printed, common))}
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
