"""A cold start in a worker that is up, through the whole system: ``up`` of
``bench/materialize.py``.

A system has a model in its host pool and an artifact of it in its store
(``materialize_system.py``), and its engine has loaded the model before. Then, ``ROUNDS`` times: the
model is evicted, the worker is left in peace until it holds nothing and has done what it does while
nothing runs, and a request is sent. The clock starts when the client sends it, and stops at the
first text.

``python materialize_up.py SHAPE FOLDER KIND`` prints one line of JSON: each round, in milliseconds
since the request was sent. ``ttft`` and the end of each phase of the start's record; the ``worst``
and the ``median`` gap between two texts, before which text the worst one was (the first is text 0)
and when it began; whether the start ``restored`` from the artifact; how many MiB of the host pool
the engine had ``pinned`` when the request came (0: all goes through its ring). What the system's
processes logged from then on goes to standard error, with the same clock.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from cache_gpu import say
from materialize_system import (
    MODEL,
    Asked,
    Logs,
    Row,
    Whole,
    gaps_ms,
    materialized,
    now_s,
    phases,
    record_of,
    settled,
)

ROUNDS = 6
REST_S = 8.0
"""In which an engine pins what it has loaded, and prepares for steps to come."""


def pinned_mib(lines: Iterable[dict[str, Any]], before: float) -> float:
    """What an engine says last that it has pinned, or what was so before."""
    said = [line["pinned_bytes"] for line in lines if line.get("action") == "pool_pinned"]
    return said[-1] / 2**20 if said else before


def tell(lines: Iterable[dict[str, Any]], began_s: float) -> None:
    """What each process logged since a moment of the wall's clock, and how many milliseconds behind
    it.
    """
    for line in lines:
        if stamp := line.get("timestamp"):
            at_ms = (datetime.fromisoformat(stamp).timestamp() - began_s) * 1e3
            if at_ms >= 0:
                what = f"{line.get('service')} {line.get('action')} {line.get('error', '')}"
                say(f"{at_ms:.1f} ms: {what}".rstrip())


def one_round(whole: Whole, prompt: str, logs: Logs, pinned: float) -> Row:
    """One start; ``pinned`` MiB were so when its model was asked for last."""
    whole.served.evict(MODEL)
    settled(whole.served)
    time.sleep(REST_S)
    pinned = pinned_mib(logs.news(), pinned)
    wall_offset_s = time.time() - now_s()
    asked = Asked(whole.served, prompt)
    asked.wait()
    record = record_of(whole.served, asked.trace_id)
    gaps = gaps_ms(asked)
    worst = gaps.index(max(gaps)) if gaps else 0
    # Lines that tell what is pinned are looked for by another reader, later.
    tell(Logs(whole.home).news(), asked.sent_s + wall_offset_s)
    return {
        "ttft_ms": (asked.at_s[0] - asked.sent_s) * 1e3,
        **phases(record, asked.sent_s, wall_offset_s),
        "worst_gap_ms": max(gaps, default=0.0),
        "worst_gap_before": worst + 1 if gaps else 0,
        "worst_gap_at_ms": (asked.at_s[worst] - asked.sent_s) * 1e3,
        "median_gap_ms": statistics.median(gaps) if gaps else 0.0,
        "restored": int("restore" in {one["name"] for one in record.get("phases", ())}),
        "pinned_mib": pinned,
    }


def measure(shape: str, folder: Path, kind: str) -> Row:
    """All rounds of a system of its own."""
    rounds: list[Row] = []
    with materialized(shape, folder, kind, ROUNDS) as whole:
        logs = Logs(whole.home)
        for prompt in whole.prompts:
            pinned = rounds[-1]["pinned_mib"] if rounds else 0.0
            rounds.append(one_round(whole, prompt, logs, pinned))
    return {"rounds": rounds}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]).absolute(), sys.argv[3])))
