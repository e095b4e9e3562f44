"""Starts that two GPUs of one host share: ``make bench-groups-gpu``, one JSON document.

For each number of stages a system of its own (``pilotlight up``: NATS, PostgreSQL, objects,
gateway, one worker a device) with random bfloat16 weights in files that memory holds. A model is
asked for once, which brings it into the host pool and compiles what has to be compiled, and is then
evicted and asked for again, ``--rounds`` times: each round is a start from host memory, over one
bus or over two. Its answer goes on for ``--tokens`` tokens, through which a group becomes one
worker. Told are seconds to the first and to the last token, the longest pause between two, how long
it took until one worker had the model, from the first token on too, and how many bytes of the stage
that grew came from the other device and from the host pool, by the engines' logs. The SLO is one
that no start meets, so the soonest of all that are allowed is chosen; starts with another number of
stages are told and not counted.

Before each round the system is left alone, so that both devices register the host pool's memory
(``--rest-s``). With ``--materialized`` the model's artifact is built before the first round, with
graphs of the whole model and of the ranges that groups are cut into; ``graphs_restored`` counts the
sets of graphs that engines then had from it.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import served_gpu_load as load
from cache_gpu import Served, has_text, say, size_of, system
from materialize_system import materialize
from served_gpu import commit, machine
from served_gpu_models import Prompts, prepare
from served_gpu_servers import COLD_PROMPT, SHARED_MEMORY, SHARED_SHARE, await_free_device

MODEL = "shared"
SLO = {"ttft_ms": 100.0, "tpot_ms": 200.0}
"""No start of these models meets it."""
POOL_SHARE, POOL_BYTES = 2.3, 2 << 30
ANSWER_S, SETTLED_S, RECORD_S = 120.0, 60.0, 10.0
LOOK_S = 0.01
PAUSES = 5
MORE_TRIES = 3
"""Starts that may have another number of stages than they should; they are told and not counted."""
SEED = 11
SAMPLED = (
    "first_s",
    "last_s",
    "longest_pause_ms",
    "median_gap_ms",
    "one_worker_s",
    "first_to_one_worker_s",
    "by_device_bytes",
    "by_pool_bytes",
    "graphs_restored",
)
FLOOR_TTFT, FLOOR_PAUSE_MS = 0.70, 50.0


@dataclass(frozen=True)
class Answer:
    """One streamed answer, in seconds since it was asked for."""

    text: str
    at_s: tuple[float, ...]
    trace_id: str

    @property
    def gaps_s(self) -> list[float]:
        """Between two pieces of text."""
        return [b - a for a, b in pairwise(self.at_s)]

    @property
    def pauses(self) -> list[dict[str, float]]:
        """The longest gaps: when each ended, and how long it was."""
        longest = sorted(zip(self.gaps_s, self.at_s[1:], strict=True), reverse=True)[:PAUSES]
        return [{"at_s": round(at_s, 3), "ms": round(1e3 * gap_s, 2)} for gap_s, at_s in longest]


def ask(served: Served, prompt: str, tokens: int) -> Answer:
    """One request to its end.

    Raises:
        SystemExit: it failed.
    """
    target = load.Target("127.0.0.1", served.port, MODEL, served.api_key)
    connection = http.client.HTTPConnection(target.host, target.port, timeout=ANSWER_S)
    text, at_s = "", list[float]()
    try:
        headers = {"content-type": "application/json", **target.headers}
        began_s = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(target.body(prompt, tokens)), headers
        )
        response = connection.getresponse()
        for line in response:
            if response.status != 200:
                raise SystemExit(f"status {response.status}: {line!r}")
            if has_text(line):
                at_s.append(time.monotonic() - began_s)
                text += json.loads(line[6:])["choices"][0]["text"]
    finally:
        connection.close()
    if not at_s:
        raise SystemExit("the answer has no text")
    return Answer(text, tuple(at_s), response.headers["x-trace-id"])


class Watch:
    """Notes when an instance's group has become one worker; a thread that asks the admin API."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._stopped = threading.Event()
        self.one_worker_s: float | None = None
        """Since the beginning of the watch."""
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        began_s = time.monotonic()
        while not self._stopped.wait(LOOK_S):
            found = self._served.admin("GET", "/instances")["instances"]
            alive = [one for one in found if one["state"] not in ("gone", "failed", "draining")]
            if (
                len(alive) == 1
                and alive[0]["state"] == "ready"
                and len(alive[0]["body"]["placements"]) == 1
            ):
                self.one_worker_s = time.monotonic() - began_s
                return

    def wait(self) -> float:
        """Until it is one worker; seconds since the beginning of the watch.

        Raises:
            SystemExit: it does not become one.
        """
        self._thread.join(SETTLED_S)
        self._stopped.set()
        if self.one_worker_s is None:
            raise SystemExit("the group does not become one worker")
        return self.one_worker_s


class Parts:
    """What the logs of engines say of the way that parameters came to stages that grew, and of
    graphs from an artifact.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._read: dict[Path, int] = {}
        """Lines that were looked at."""

    def news(self) -> dict[str, Any]:
        """Since the last call."""
        told: dict[str, Any] = {"by_device_bytes": 0, "by_pool_bytes": 0, "not_lent": []}
        told |= {"graphs_restored": 0, "graphs_refused": []}
        for log in sorted(self._home.glob("**/engine-*.log")):
            lines = log.read_text(errors="replace").splitlines()
            for line in lines[self._read.get(log, 0) :]:
                if '"parts_came"' in line:
                    came = json.loads(line)
                    told["by_device_bytes"] += came["device_bytes"]
                    told["by_pool_bytes"] += came["pool_bytes"]
                elif '"part_not_lent"' in line:
                    told["not_lent"].append(json.loads(line)["why"])
                elif '"graphs_restored"' in line:
                    told["graphs_restored"] += 1
                elif '"graphs_refused"' in line:
                    told["graphs_refused"].append(json.loads(line)["why"])
            self._read[log] = len(lines)
        return told


def newest_start(served: Served) -> dict[str, Any]:
    """How many stages the scheme has that was chosen last, and what was predicted of it and of
    others.
    """
    decisions = served.admin("GET", "/decisions")["decisions"]
    starts = [one for one in decisions if one["kind"] == "cold_start"]
    outcome = max(starts, key=lambda one: one["at"])["outcome"]
    schemes = [outcome["scheme"], *outcome.get("alternatives", ())]
    predicted = [(len(one["placements"]), one["predicted_ttft_s"]) for one in schemes]
    return {"stages": predicted[0][0], "predicted_s": predicted[0][1], "others": predicted[1:]}


def record_of(served: Served, trace_id: str) -> dict[str, Any]:
    """The cold start of a trace; it is written a moment after the answer."""
    end_s = time.monotonic() + RECORD_S
    while time.monotonic() < end_s:
        with contextlib.suppress(SystemExit):
            found = served.admin("GET", f"/traces/{trace_id}")["cold_starts"]
            if found and found[0]["status"] == "done":
                return dict(found[0])
        time.sleep(0.1)
    return {}


def phases_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each phase with its place and its milliseconds from the dispatch on."""
    phases = record.get("phases", [])
    first_s = min((one["start_s"] for one in phases), default=0.0)
    return [
        {
            **{key: one[key] for key in ("name", "lane", "detail") if one.get(key)},
            "from_ms": round(1e3 * (one["start_s"] - first_s), 1),
            "to_ms": round(1e3 * (one["end_s"] - first_s), 1),
        }
        for one in sorted(phases, key=lambda one: one["start_s"])
    ]


def rounds_of(asked: argparse.Namespace, size: int, work: Path) -> list[dict[str, Any]]:
    """All rounds of one system whose starts may have ``size`` stages."""
    folder = asked.weights / asked.shape
    prepare(asked.shape, folder)
    shared = int(SHARED_SHARE * shutil.disk_usage(SHARED_MEMORY).free)
    variables = {
        "PILOTLIGHT_MODEL_ROOTS": str(asked.weights),
        "PILOTLIGHT_MAX_STAGES": str(size),
        "PILOTLIGHT_POOL_BYTES": str(min(shared, int(size_of(folder) * POOL_SHARE) + POOL_BYTES)),
    } | ({"PILOTLIGHT_DEVICE_BYTES": str(asked.device_bytes)} if asked.device_bytes else {})
    if asked.materialized:
        variables |= {"PILOTLIGHT_ARTIFACT_GRAPHS": "true", "PILOTLIGHT_BUILD_IDLE_S": "0.5"}
    told: list[dict[str, Any]] = []
    prompts = Prompts.of(folder).draw(SEED, [COLD_PROMPT] * 2)
    with system(work, variables, asked.kind, ("--nodes", str(asked.nodes))) as served:
        body = {"name": MODEL, "uri": folder.as_uri(), "slo": SLO, "keep_alive_s": 3600}
        served.admin("POST", "/models", body)
        parts = Parts(work / "home")
        # The first start fills the host pool, and the second compiles what a group needs.
        for number in range(asked.rounds + 2 + MORE_TRIES):
            watch = Watch(served)
            answer = ask(served, prompts[number > 1], asked.tokens)
            one_worker_s = watch.wait()
            figures = {
                **newest_start(served),
                "first_s": round(answer.at_s[0], 4),
                "last_s": round(answer.at_s[-1], 4),
                "longest_pause_ms": round(1e3 * max(answer.gaps_s), 2),
                "median_gap_ms": round(1e3 * statistics.median(answer.gaps_s), 3),
                "one_worker_s": round(one_worker_s, 3),
                "first_to_one_worker_s": round(one_worker_s - answer.at_s[0], 3),
                **parts.news(),
                "pauses": answer.pauses,
                "text": answer.text,
                "phases": phases_of(record_of(served, answer.trace_id)),
            }
            say(f"s = {size}: { ({key: figures[key] for key in figures if key != 'text'}) }")
            if number > 1 and figures["stages"] == size:
                told.append(figures)
            served.evict(MODEL)
            if len(told) == asked.rounds:
                return told
            if asked.materialized and number == 1:
                say(f"s = {size}: materialized: {materialize(served, MODEL)}")
            time.sleep(asked.rest_s)
    raise SystemExit(f"of {number + 1} starts {len(told)} had {size} stages")


def document(asked: argparse.Namespace, found: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """What is printed, in the form of ``bench/results``."""
    commit_named, _, day = commit().partition(" ")
    rows: list[dict[str, Any]] = []
    for size, rounds in found.items():
        samples = {name: [one[name] for one in rounds] for name in SAMPLED}
        rows.append(
            {
                "what": f"{asked.shape} from the host pool, s = {size}, {asked.tokens} tokens"
                + (", materialized" if asked.materialized else ""),
                "command": "make bench-groups-gpu",
                "machine": machine(),
                "commit": commit_named,
                "commit_date": day,
                "date": datetime.now(UTC).date().isoformat(),
                "load": f"load average {os.getloadavg()[0]:.1f} at its end",
                "unit": "see the names",
                "samples": samples,
                "medians": {name: statistics.median(of) for name, of in samples.items()},
                "not_lent": sorted({why for one in rounds for why in one["not_lent"]}),
                "graphs_refused": sorted({why for one in rounds for why in one["graphs_refused"]}),
                "phases_of_the_last": rounds[-1]["phases"],
            }
        )
    return {"benchmark": "groups_gpu", "measurements": rows, "verdicts": verdicts(found)}


def verdicts(found: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Beside the floors, where one and two stages were measured."""
    if not {1, 2} <= found.keys():
        return {}
    first_s = {size: statistics.median(one["first_s"] for one in found[size]) for size in (1, 2)}
    pause_ms = max(one["longest_pause_ms"] for one in found[2])
    texts = {one["text"] for rounds in found.values() for one in rounds}
    return {
        "ttft_ratio": round(first_s[2] / first_s[1], 3),
        "ttft_floor_met": first_s[2] / first_s[1] <= FLOOR_TTFT,
        "longest_pause_ms": pause_ms,
        "pause_floor_met": pause_ms <= FLOOR_PAUSE_MS,
        "texts_equal": len(texts) == 1,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rest-s", type=float, default=6.0)
    parser.add_argument("--weights", type=Path, help="folder in which weights stay for later")
    parser.add_argument("--kind", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--nodes", type=int, default=1, help="with CPU workers: one for each stage")
    parser.add_argument("--materialized", action="store_true", help="from an artifact with graphs")
    parser.add_argument("--device-bytes", type=int, help="memory for models on each device")
    asked = parser.parse_args(arguments)
    # Told to end, it ends its servers and takes the weights away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="pilotlight-groups-") as temporary:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(temporary).chmod(0o711)
        asked.weights = (asked.weights or Path(temporary) / "weights").absolute()
        for size in asked.stages:
            await_free_device()
            work = Path(temporary) / f"s{size}"
            work.mkdir(mode=0o711)
            try:
                found[size] = rounds_of(asked, size, work)
            except BaseException:
                for log in sorted((work / "home").glob("**/*.log")):
                    tail = log.read_text(errors="replace").splitlines()[-40:]
                    print(f"== {log.name}", *tail, sep="\n", file=sys.stderr)
                raise
    print(json.dumps(document(asked, found), indent=1), flush=True)


if __name__ == "__main__":
    main()
