"""What becomes of a gateway that is asked for more than it can do: ``make bench-overload``.

DURATION_S= for how long (15 s), TIMES= for another load (2), SHARE= for what follows (0.8),
STEP_MS= for an engine whose steps take so long: then there are too few places of a worker's.

Everything is real but the engine, which takes no time, as in ``bench/soak_served.py``: it measures
what the system can do with streams of 32 tokens, all it is asked for, for a while. Then streams are
asked for at ``--times`` that rate, whether or not others were answered, and right behind it, on the
same connections, at ``--share`` of it; then it rests. Told are, in windows, answers and refusals a
second, p50 and p99 of first bytes and whole answers, and the gateway's processor time for each
answer and for each refusal; and its memory before, at the end of each window, and after the rest.

Wrong is: any error that is no refusal; a refusal in the last window, in which it has to have come
back; less answered under overload than ``--least`` of what it can; memory of the gateway after the
rest that is above what it was before, times 1.05, and 16 MiB. Prints one JSON document, with
``--out`` also writes what ``bench/results`` keeps; ends with 1 if anything is wrong.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gateway_servers as servers
from gateway import asking, body, commit, say
from served_gpu import machine
from soak_memory import GROWTH_BYTES, GROWTH_RATIO, MIB
from soak_served import AT_ONCE, FIRST_ANSWER_S, WARM_S, Window, memory_bytes, saturation_per_s

WINDOWS = 3
"""Of the overload, and of what follows."""
REST_S = 10.0
TIMES, SHARE, LEAST = 2.0, 0.8, 0.7
PLACES = 256
"""Of a worker, and of its engine's steps: so many are asked for at a time, where those take time.
"""
GATEWAY = "gateway"


def overloaded(
    server: servers.Server, rates_per_s: Sequence[float], duration_s: float, at_once: int
) -> list[Window]:
    """A window for each rate, ``duration_s`` in all."""
    found: list[Window] = []
    job = {
        "concurrency": at_once,
        "warm_s": WARM_S,
        "duration_s": duration_s,
        # Until the first window: what it holds without a line.
        "rate_per_s": min(rates_per_s),
        "rates_per_s": list(rates_per_s),
        "windows": len(rates_per_s),
    }
    with asking(server, body(stream=True), **job) as client:
        for rate_per_s in rates_per_s:
            window = client.figures()
            window["asked_per_s"] = round(rate_per_s, 1)
            refused = sum(window.get("refused", {}).values())
            window["refused_per_s"] = round(refused / window["seconds"], 1)
            window["wrong"] = window["errors"] - refused
            window["memory_bytes"] = memory_bytes(server.pid)
            found.append(window)
            say(
                f"asked for {rate_per_s:.0f}/s: {window['per_s']}/s answered, "
                f"{window['refused_per_s']}/s refused, {window['wrong']} wrong, "
                f"p50 {window['latency_ms_p50']} ms, p99 {window['latency_ms_p99']} ms, gateway "
                f"{window['cpu_ms_each'].get(GATEWAY)} ms each, "
                f"{window['memory_bytes'][GATEWAY] // MIB} MiB"
            )
    return found


def verdicts(document: dict[str, Any], least: float) -> list[str]:
    """What the system did not keep to; empty: nothing."""
    windows: list[Window] = document["windows"]
    wrong = [
        f"{window['wrong']} wrong answers: {window['first_errors']}"
        for window in windows
        if window["wrong"]
    ]
    over = windows[:WINDOWS]
    answered_per_s = sum(each["requests"] for each in over) / sum(each["seconds"] for each in over)
    if answered_per_s < least * document["saturation_per_s"]:
        wrong.append(
            f"{answered_per_s:.0f}/s answered under overload, of {document['saturation_per_s']}"
        )
    if windows[-1]["refused_per_s"]:
        wrong.append(f"it had not come back: {windows[-1]['refused_per_s']}/s refused in the end")
    before, after = (document["memory_bytes"][when][GATEWAY] for when in ("before", "after"))
    if after > before * GROWTH_RATIO + GROWTH_BYTES:
        wrong.append(f"the gateway kept {after / MIB:.1f} MiB, of {before / MIB:.1f} before")
    return wrong


def measurement(document: dict[str, Any]) -> dict[str, Any]:
    """As ``bench/results`` keeps it."""
    changed, changed_date = document["commit"].split()[:2]
    windows: list[Window] = document["windows"]
    samples = {
        "asked per second": [window["asked_per_s"] for window in windows],
        "answered per second": [window["per_s"] for window in windows],
        "refused per second": [window["refused_per_s"] for window in windows],
        "wrong": [window["wrong"] for window in windows],
        "latency p50, ms": [window["latency_ms_p50"] for window in windows],
        "latency p99, ms": [window["latency_ms_p99"] for window in windows],
        "first bytes p50, ms": [window["first_ms_p50"] for window in windows],
        "first bytes p99, ms": [window["first_ms_p99"] for window in windows],
        "gateway, ms of processor for each answer": [
            window["cpu_ms_each"].get(GATEWAY, 0.0) for window in windows
        ],
        "gateway, MiB at the end": [
            round(window["memory_bytes"][GATEWAY] / MIB, 1) for window in windows
        ],
        "gateway, MiB before and after": [
            round(document["memory_bytes"][when][GATEWAY] / MIB, 1) for when in ("before", "after")
        ],
        "saturation, per second": [document["saturation_per_s"]],
    }
    return {
        "what": f"streams of 32 tokens at {document['times']:g} times what it can, then {document['share']:g} of it; by windows",
        "command": document["command"],
        "machine": document["machine"],
        "load": document["load"],
        "commit": changed,
        "commit_date": changed_date,
        "date": document["date"],
        "unit": "see the names",
        "samples": samples,
        "wrong": document["wrong"],
    }


def main() -> int:
    """Measure, judge and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--duration-s", type=float, default=15.0, help="of the overload")
    parser.add_argument("--times", type=float, default=TIMES, help="what it can, under overload")
    parser.add_argument("--share", type=float, default=SHARE, help="of what it can, behind that")
    parser.add_argument("--least", type=float, default=LEAST, help="of what it can, answered")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of the engine")
    parser.add_argument("--rest-s", type=float, default=REST_S)
    parser.add_argument("--out", type=Path, help="a file as bench/results keeps it")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotlight-overload-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        variables = {
            "PILOTLIGHT_SIM_DECODE_STEP_S": str(asked.step_ms / 1000),
            "PILOTLIGHT_SIM_REQUESTS_PER_STEP": str(PLACES),
        }
        at_once = PLACES if asked.step_ms else AT_ONCE
        with servers.ours(Path(folder) / "run", variables=variables) as up:
            servers.await_chat(up, FIRST_ANSWER_S)
            can_per_s = saturation_per_s(up, at_once)
            before = memory_bytes(up.pid)
            rates = [asked.times * can_per_s] * WINDOWS + [asked.share * can_per_s] * WINDOWS
            windows = overloaded(up, rates, 2 * asked.duration_s, at_once)
            time.sleep(asked.rest_s)
            after = memory_bytes(up.pid)
    document: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "load": f"load average {os.getloadavg()[0]:.1f} at its end",
        "command": " ".join(["bench/overload.py", *sys.argv[1:]]),
        "saturation_per_s": can_per_s,
        "times": asked.times,
        "share": asked.share,
        "windows": windows,
        "memory_bytes": {"before": before, "after": after},
    }
    document["wrong"] = verdicts(document, asked.least)
    print(json.dumps(document, indent=2))
    if asked.out is not None:
        kept = {"benchmark": "overload", "measurements": [measurement(document)]}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 1 if document["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
