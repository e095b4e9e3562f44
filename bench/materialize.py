"""What recorded graphs save a start on this machine's GPU: ``make bench-materialize``.

Every figure is of a process of its own (``materialize_job.py``), with empty caches of compiled
kernels, random bfloat16 weights of the 4B and 8B shapes in pinned memory of the host, and torch
imported and its context made before the clock starts:

* ``restore``: the first graph and all 43, 35 of decode steps and 8 of prompts, from when the stage
  has its memory, from an archive that another process recorded; alone;
* ``beside``: the same, while the weights come onto the device, and what their copies take then;
* ``captured``: what an engine without recorded graphs does to be as far: it compiles or loads all
  kernels, runs each size and captures it, with the weights in place;
* ``cold`` and ``cold-plain``: a request that waits for the model, with recorded graphs and without:
  its first token, and the worst gap between two of its 64. It is the engine alone: no gateway, no
  scheduler;
* ``cold-kernels`` and ``cold-warm``: the same with recorded graphs and recorded kernels, and that
  in an engine that has run a small model before the clock starts, as a worker's has;
* ``cold-decode`` and ``cold-busy``: as ``cold-warm``, without the graphs of prompts, and without
  rest: the other graphs are made before the first token;
* ``cold-where``, where it is asked for: as ``cold-warm``, and standard error tells where the
  threads were until the first token, line by line: looking takes time of its own;
* ``process``, where it is asked for: the first token of a whole system whose loader, worker and
  engines begin while the request waits (``materialize_process.py``). ``--kind cpu`` with the shape
  ``tiny`` tries it without a GPU;
* ``node``, where it is asked for: the same on a node that has nothing yet, neither a host pool nor
  a state folder;
* ``up``, where it is asked for: the first token, and the gaps behind it, of a start in a worker
  that is up, through the whole system (``materialize_up.py``).

Whole systems have the settings of this process's environment, and rows tell those by which ways of
workers are compared, as ``PILOTLIGHT_GRAPH_KERNELS=symbol`` or ``PILOTLIGHT_LAUNCH_LISTS=true``.

What of the first graph takes how long is in ``took_``: reading and opening the archive and loading
the first graph's kernels (``read``, ``open``, ``load``, before the stage has its memory or while it
gets it), then since it has it, until ``reserved``, ``begun``, ``first`` and ``all``; and what
images, nodes, instantiation and upload took, of the first graph (``first_``) and of all (``all_``).

Cold starts tell a timeline, in milliseconds from their beginning: ``at_steps`` (the stage has its
steps), ``reserved`` (and all of its memory; copies begin), ``begun`` (it is set up; then recorded
kernels are read, which takes ``kernels``), ``at_prompt128_ready`` (the prompt's graph), ``_trial``
(its proof is launched, behind the last copy), ``placed`` (that is done), ``_asked`` (the prompt
begins), ``_proved``, ``_run`` (the prompt is launched), and ``ttft``. ``before_`` and ``beside_``
are the arena's calls of the driver that map memory, before the first copy and from then on until
the last one is done, and what creating, mapping and access took of them.

The floors: all graphs in 0.3 s, the first in 40 ms, beside copies at most 1.3 times as long as
alone. Writes OUT, in the form of ``bench/results``, after every row; rows for which there is no
time are left out, and told. The exit status is 1 when a row is missing or failed, or a floor was
missed.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from served_gpu import commit, machine

JOB = Path(__file__).resolve().parent / "materialize_job.py"
STOP_S = 60.0
"""For a system's orderly end."""
SHAPES = ("4B", "8B")
WAYS = (
    "restore",
    "beside",
    "captured",
    "cold",
    "cold-plain",
    "cold-kernels",
    "cold-decode",
    "cold-busy",
    "cold-warm",
)
WHERE = "cold-where"
PROCESS, NODE, UP = "process", "node", "up"
WHOLE = {
    PROCESS: ("materialize_process.py",),
    NODE: ("materialize_process.py", "--node"),
    UP: ("materialize_up.py",),
}
"""Of a whole system, with jobs of their own, and what these are told."""
TINY = "tiny"
COMPARED = tuple(
    f"PILOTLIGHT_{name}" for name in ("GRAPH_KERNELS", "GRAPH_POINTERS", "LAUNCH_LISTS")
)
"""Settings that rows tell; others may be paths or secrets."""
SECONDS, JOB_S, PROCESS_S, LEAST_S = 190.0, 120.0, 540.0, 5.0
FIRST_MS, ALL_MS, BESIDE_TIMES = 40.0, 300.0, 1.3
WHOLE_MS = {
    PROCESS: {"4B": 4000.0},
    NODE: {"4B": 4000.0},
    UP: {"4B": 190.0, "8B": 390.0},
}
GAP_TIMES = 2.0
"""The worst gap in a worker that is up, by the median of all."""
WHAT = {
    "restore": "35 decode and 8 prompt graphs restored, alone",
    "beside": "35 decode and 8 prompt graphs restored while the weights come",
    "captured": "35 decode graphs compiled and captured at the start",
    "cold": "a cold start in an engine, with recorded graphs",
    "cold-plain": "a cold start in an engine, without recorded graphs",
    "cold-kernels": "a cold start in an engine, with recorded graphs and kernels",
    "cold-decode": "a cold start in a warm engine, with recorded decode graphs and kernels",
    "cold-busy": "a cold start in a warm engine that makes all graphs at once, with kernels",
    "cold-warm": "a cold start in a warm engine, with recorded graphs and kernels",
    WHERE: "a cold start in a warm engine, looked at every millisecond",
    PROCESS: "the first token of a truly cold process, through the whole system",
    NODE: "the first token of a node that is new, through the whole system",
    UP: "a cold start in a worker that is up, through the whole system",
}
Row = dict[str, Any]


@dataclass
class Run:
    """What was measured so far."""

    folder: Path
    seconds: float
    kind: str = "cuda"
    began_s: float = field(default_factory=time.monotonic)
    rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict[tuple[str, str], list[Row]])
    missing: list[str] = field(default_factory=list[str])

    @property
    def left_s(self) -> float:
        """Until no other row begins."""
        return self.seconds - (time.monotonic() - self.began_s)

    def job(self, way: str, shape: str) -> subprocess.Popen[str]:
        """Starts a process, with no kernel compiled before."""
        if way in WHOLE:
            script, *more = WHOLE[way]
            command = [sys.executable, str(JOB.with_name(script)), shape, str(self.folder)]
            return subprocess.Popen([*command, self.kind, *more], stdout=subprocess.PIPE, text=True)
        caches = Path(tempfile.mkdtemp(dir=self.folder))
        return subprocess.Popen(
            [sys.executable, str(JOB), way, shape, str(self.folder)],
            env={**os.environ, "TRITON_CACHE_DIR": str(caches), "CUDA_CACHE_DISABLE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def told(self, job: subprocess.Popen[str], name: str, most_s: float = JOB_S) -> Row | None:
        """What a process measured; None: it failed, or there was no time left for it."""
        try:
            said, _ = job.communicate(timeout=min(most_s, max(self.left_s, LEAST_S)))
        except subprocess.TimeoutExpired:
            # One that has a system ends that.
            job.send_signal(signal.SIGINT)
            try:
                job.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                job.kill()
                job.communicate()
            self.missing.append(f"{name}: it took too long")
            return None
        if job.returncode:
            self.missing.append(f"{name}: exit status {job.returncode}")
            return None
        return json.loads(said.splitlines()[-1])

    def measure(self, way: str, shape: str) -> None:
        """One row more."""
        name = f"{way} {shape}"
        if self.left_s < LEAST_S:
            self.missing.append(f"{name}: {self.seconds:g} s are over")
            return
        most_s = PROCESS_S if way in WHOLE else JOB_S
        found = self.told(self.job(way, shape), name, most_s)
        for row in found.get("rounds", [found]) if found is not None else ():
            self.rows.setdefault((way, shape), []).append(row)
            print(json.dumps({"way": way, "shape": shape, **row}), file=sys.stderr, flush=True)


def document(run: Run, about: dict[str, str]) -> dict[str, Any]:
    """In the form of ``bench/results``."""
    measurements: list[dict[str, Any]] = []
    for (way, shape), rows in run.rows.items():
        # Of a row that ended before all graphs were there, some times are missing.
        names = [name for name in rows[0] if all(name in row for row in rows)]
        samples = {name: [round(row[name], 2) for row in rows] for name in names}
        medians = {name: statistics.median(each) for name, each in samples.items()}
        named = {"what": f"{WHAT[way]}, {shape}", **about, "unit": "ms, and counts"}
        measurements.append({**named, "samples": samples, "medians": medians})
    return {"benchmark": "materialize", "measurements": measurements}


def settings() -> dict[str, str]:
    """What is said of the compared settings that whole systems have from here; nothing without."""
    told = [f"{name}={os.environ[name]}" for name in COMPARED if name in os.environ]
    return {"settings": " ".join(told)} if told else {}


def _medians(run: Run, way: str, shape: str) -> dict[str, float] | None:
    rows = run.rows.get((way, shape))
    names = ("first_ms", "all_ms")
    return {name: statistics.median(row[name] for row in rows) for name in names} if rows else None


def floors(run: Run) -> Iterator[str]:
    """What was missed."""
    for (way, shape), rows in run.rows.items():
        if way not in WHOLE:
            continue
        ttft_ms = statistics.median(row["ttft_ms"] for row in rows)
        if ttft_ms > WHOLE_MS[way].get(shape, ttft_ms):
            yield f"{shape}: {WHAT[way]}: {ttft_ms:.0f} ms"
        times = [
            row["worst_gap_ms"] / row["median_gap_ms"] for row in rows if row.get("median_gap_ms")
        ]
        if times and statistics.median(times) > GAP_TIMES:
            worst = statistics.median(times)
            yield f"{shape}: {WHAT[way]}: the worst gap is {worst:.1f} times the median"
    for shape in SHAPES:
        alone, beside = (_medians(run, way, shape) for way in ("restore", "beside"))
        if alone is None or beside is None:
            continue
        if alone["first_ms"] > FIRST_MS:
            yield f"{shape}: the first graph after {alone['first_ms']:.0f} ms"
        if alone["all_ms"] > ALL_MS:
            yield f"{shape}: all graphs after {alone['all_ms']:.0f} ms"
        if beside["all_ms"] > BESIDE_TIMES * alone["all_ms"]:
            yield f"{shape}: {beside['all_ms'] / alone['all_ms']:.2f} times as long beside copies"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=(*SHAPES, TINY), default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, WHERE, *WHOLE), default=list(WAYS))
    parser.add_argument("--kind", default="cuda", choices=("cuda", "cpu"), help="for whole systems")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all rows")
    parser.add_argument("--out", type=Path, default=Path("materialize.json"))
    parser.add_argument(
        "--recorded", type=Path, default=None, help="folder for what is recorded, used again"
    )
    parser.add_argument("--commit", default=commit(), help="hash and date, where it is no checkout")
    asked = parser.parse_args(arguments)
    changed, _, changed_date = asked.commit.partition(" ")
    about = {
        "command": "make bench-materialize",
        "machine": machine(),
        "load": f"load average {os.getloadavg()[0]:.1f} before it",
        "commit": changed,
        "commit_date": changed_date,
        "date": datetime.now(UTC).date().isoformat(),
        **settings(),
    }
    with tempfile.TemporaryDirectory(prefix="pilotlight-materialize-") as folder:
        run = Run(asked.recorded or Path(folder), asked.seconds, asked.kind)
        run.folder.mkdir(exist_ok=True)
        # A whole system builds its own artifact.
        wanted = {*asked.shapes} if {*asked.ways} - {*WHOLE} else set[str]()
        there = {shape for shape in wanted if (run.folder / f"{shape}.kernels").exists()}
        recording = {shape: run.job("record", shape) for shape in wanted - there}
        recorded = {shape: run.told(job, f"record {shape}") for shape, job in recording.items()}
        print(json.dumps({"recorded": recorded}), file=sys.stderr, flush=True)
        for way, shape in [*product(asked.ways, asked.shapes)] * asked.repeats:
            if way in WHOLE or shape in there or recorded[shape] is not None:
                run.measure(way, shape)
                asked.out.write_text(json.dumps(document(run, about), indent=2) + "\n")
    missed = [*run.missing, *floors(run)]
    for line in missed:
        print(line, file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
