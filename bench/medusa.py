"""MEDUSA's Table 1 and its Figures 7, 8 and 9 on this machine's GPU: ``make bench-medusa``.

The loading phase of its ten models (``medusa_shapes.py``; random bfloat16 weights), by stage. Each
figure is of a process of its own, in which the libraries are up when the clock starts:

* ``plain``, the paper's vanilla: room, weights, a pass that profiles, every step run once and
  captured at 35 sizes, one after the other; ``plain-cold``: on a machine that has compiled nothing;
* ``medusa``, the paper's way whole: room first, then the first layer run and captured at 35 sizes
  beside the weights, kernels by the modules that this loads, addresses written anew, graphs built.
  ``witness`` and ``pointers`` go before it: the same steps recorded at two places;
* ``first-layer``: its order alone, without the graphs;
* ``ours``: weights, graphs and compiled kernels, these on a machine that has compiled nothing;
* ``serving``: decode steps of eight requests while the other graphs are made, beside as many
  without that, in five pairs;
* ``steps``: what graphs save of a step (Figure 3), for ``medusa_traces.py``;
* ``offline``: all of a build, by part;
* ``vllm-cold``, ``vllm``, ``vllm-eager``: vLLM of the interpreter ``--vllm``, with an empty compile
  cache, with what that run left in it, and without graphs. No option of vLLM loads weights beside
  the room for KV, so that the paper's "vLLM + ASYNC" is not there.

``record`` goes before all of a shape: what the others restore, and the nodes of 35 graphs.

Rows are appended to LINES as they come, and what is there is not measured again: so a run goes on
where the one before it ended, in parts of SECONDS. First come the ways of our engine, shape by
shape, then vLLM's, which take minutes. A row is not begun when there is less time than one of its
way took before. OUT has all in the form of ``bench/results``. A shape that does not fit the GPU is
left out by name. The exit status is 1 when a row is missing or failed, or a floor was
missed: ``ours`` 70 % below ``plain`` and 50 times faster than ``vllm``; a build in 60 s; steps
beside a restore 1.05 (median) and 1.25 times (90th percentile) as long as without.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from medusa_rows import WAYS, Row, Rows, document, medians_of, read, take
from medusa_shapes import MEDUSA_SHAPES, needed_gib
from served_gpu import commit, machine

HERE = Path(__file__).resolve().parent
JOB, OFFLINE, VLLM, POINTERS = (
    HERE / f"medusa_{name}.py" for name in ("job", "offline", "vllm", "pointers")
)
SIZES = (1, 2, 4, *range(8, 257, 8))
"""Rows of captured steps, as the engine and the paper have them."""
TRACED = ("witness", "pointers", "medusa")
"""Ways of ``medusa_pointers.py``, of which each needs the one before it."""
RECORDED = {"plain", "first-layer", "ours", "serving", "steps"}
"""Ways that need what was recorded: graphs and kernels, or compiled ones on disk."""
SECONDS, LEAST_S = 540.0, 10.0
JOB_S, OFFLINE_S, VLLM_S = 90.0, 200.0, 200.0
PLAIN_SHARE, VLLM_TIMES, OFFLINE_FLOOR_S, MEDIAN_TIMES, P90_TIMES = 0.3, 50.0, 60.0, 1.05, 1.25


@dataclass
class Run:
    """What was measured so far, in this run and in those before it."""

    folder: Path
    """For what is recorded, and for caches."""
    lines: Path
    vllm: str
    """An interpreter; empty: there is none."""
    seconds: float
    about: Mapping[str, str]
    """What each row says of where it comes from."""
    began_s: float = field(default_factory=time.monotonic)
    rows: Rows = field(default_factory=Rows)
    missing: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        """Takes over the rows that are there."""
        if self.lines.exists():
            self.rows = read(self.lines)

    @property
    def left_s(self) -> float:
        """Until no other row begins."""
        return self.seconds - (time.monotonic() - self.began_s)

    def expected_s(self, way: str) -> float:
        """What a row of this way takes: the longest of those that there are."""
        took = [
            row.get("wall_s", 0.0)
            for (one, _), rows in self.rows.items()
            if one == way
            for row in rows
        ]
        return max(LEAST_S, *took, 0.0)

    def ways_of(self, shape: str, ways: Sequence[str]) -> list[str]:
        """What is still to be measured, in the order in which one needs the other."""
        asked = [way for way in WAYS if way in ways and (way, shape) not in self.rows]
        if not self.vllm:
            asked = [way for way in asked if not way.startswith("vllm")]
        if RECORDED & {*asked} and not self.recorded(shape) and "record" not in asked:
            asked = ["record", *asked]
        for way, needed in ((TRACED[2], TRACED[1]), (TRACED[1], TRACED[0])):
            if way in asked and needed not in asked and not self.traced(needed, shape):
                asked.insert(asked.index(way), needed)
        if "vllm" in asked and "vllm-cold" not in asked and not self.cache("vllm", shape).exists():
            asked.insert(asked.index("vllm"), "vllm-cold")
        return asked

    def cache(self, of: str, shape: str) -> Path:
        """Of compiled kernels that later rows find."""
        return self.folder / f"{shape}.{of}.cache"

    def recorded(self, shape: str) -> bool:
        """There is what other rows restore, or find compiled."""
        return (self.folder / f"{shape}.kernels").exists()

    def traced(self, way: str, shape: str) -> bool:
        """There is what ``witness`` or ``pointers`` has recorded."""
        suffix = "witness" if way == "witness" else "pointers.json"
        return (self.folder / f"{shape}.{suffix}").exists()

    def measure(self, way: str, shape: str) -> None:
        """One row more."""
        name = f"{way} {shape}"
        if self.left_s < self.expected_s(way):
            self.missing.append(f"{name}: {self.seconds:g} s are over, or will be before its end")
            return
        began_s = time.monotonic()
        command, variables, limit_s = self._job(way, shape)
        try:
            job = subprocess.run(
                command,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                text=True,
                timeout=min(limit_s, max(self.left_s, LEAST_S)),
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.missing.append(f"{name}: it took too long")
            return
        if job.returncode or not job.stdout.strip():
            self.missing.append(f"{name}: exit status {job.returncode}")
            return
        told = json.loads(job.stdout.splitlines()[-1])
        wall_s = time.monotonic() - began_s
        row: Row = {"way": way, "shape": shape, **self.about, **told, "wall_s": wall_s}
        with self.lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)
        take(self.rows, row)

    def _job(self, way: str, shape: str) -> tuple[list[str], dict[str, str], float]:
        """How a row is measured: a command, its variables, its most seconds."""
        if way.startswith("vllm"):
            folder = self.folder / f"{shape}.vllm"
            folder.mkdir(parents=True, exist_ok=True)
            write_config(shape, folder)
            sizes = ",".join(map(str, SIZES))
            command = [self.vllm, str(VLLM), str(folder), sizes]
            cache = self.cache("vllm", shape)
            cache.mkdir(exist_ok=True)
            caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
            variables = {name: str(cache / name.lower()) for name in caches}
            # Our own sources are nothing for another interpreter.
            variables["PYTHONPATH"] = ""
            eager = ["--eager"] if way == "vllm-eager" else []
            return [*command, *eager], variables, VLLM_S
        # What was compiled before is what recording has compiled.
        before = way in ("record", "plain", "first-layer", "steps", *TRACED)
        cache = self.cache("triton", shape) if before else Path(mkdtemp(dir=self.folder))
        variables = {"TRITON_CACHE_DIR": str(cache), "CUDA_CACHE_DISABLE": "1"}
        if way == "offline":
            return [sys.executable, str(OFFLINE), shape, str(self.folder)], variables, OFFLINE_S
        job = POINTERS if way in TRACED else JOB
        return [sys.executable, str(job), way, shape, str(self.folder)], variables, JOB_S


def write_config(shape: str, folder: Path) -> None:
    """What another engine reads of a model without weights."""
    # Only here: a run without vLLM needs no torch.
    from engine_gpu_weights import config_of, spec_of

    (folder / "config.json").write_text(json.dumps(config_of(spec_of(shape))))


def device_gib() -> float | None:
    """Memory of the smallest GPU that there is; None: there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    sizes = [float(line) / 1024 for line in told.splitlines() if line.strip().isdigit()]
    return min(sizes, default=None)


def floors(rows: Rows) -> Iterator[str]:
    """What was missed."""

    def median(way: str, shape: str, name: str = "total_s") -> float | None:
        found = rows.get((way, shape))
        return medians_of(found)[name] if found else None

    for shape in MEDUSA_SHAPES:
        ours, plain, vllm = (median(way, shape) for way in ("ours", "plain", "vllm"))
        if ours is not None and plain is not None and ours > PLAIN_SHARE * plain:
            yield f"{shape}: {ours:.2f} s, and {plain:.2f} s without materialization"
        if ours is not None and vllm is not None and ours * VLLM_TIMES > vllm:
            yield f"{shape}: {ours:.2f} s, and vLLM {vllm:.1f} s"
        built = median("offline", shape)
        if built is not None and built > OFFLINE_FLOOR_S:
            yield f"{shape}: a build takes {built:.0f} s"
        for name, most in (("median_ratio", MEDIAN_TIMES), ("p90_ratio", P90_TIMES)):
            beside = median("serving", shape, name)
            if beside is not None and beside > most:
                yield f"{shape}: steps beside a restore, {name} {beside:.2f}"


def parts_of(shapes: Sequence[str], ways: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """What is measured together: all of a shape, but for vLLM, whose parts come last."""
    of_vllm = [way for way in ways if way.startswith("vllm")]
    ours = [way for way in ways if way not in of_vllm]
    for part in (ours, of_vllm):
        if part:
            yield from ((shape, part) for shape in shapes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(MEDUSA_SHAPES), default=list(MEDUSA_SHAPES)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="until no other row begins")
    parser.add_argument("--vllm", default="", help="an interpreter that has it")
    parser.add_argument("--lines", type=Path, default=Path("medusa.jsonl"), help="goes on there")
    parser.add_argument("--out", type=Path, default=Path("medusa.json"))
    parser.add_argument("--recorded", type=Path, default=Path(gettempdir()) / "medusa")
    parser.add_argument("--commit", default=commit(), help="hash and date, where it is no checkout")
    asked = parser.parse_args(arguments)
    changed, _, changed_date = asked.commit.partition(" ")
    about = {
        "command": "make bench-medusa",
        "machine": machine(),
        "load": f"load average {os.getloadavg()[0]:.1f} before it",
        "commit": changed,
        "commit_date": changed_date,
        "date": datetime.now(UTC).date().isoformat(),
    }
    asked.recorded.mkdir(parents=True, exist_ok=True)
    run = Run(asked.recorded, asked.lines, asked.vllm, asked.seconds, about)
    there_gib = device_gib()
    for shape, ways in parts_of(asked.shapes, asked.ways):
        if there_gib is not None and needed_gib(shape) > there_gib:
            print(
                f"{shape} is left out: it needs {needed_gib(shape):.0f} GiB, and the GPU has {there_gib:.0f}",
                file=sys.stderr,
            )
            continue
        for way in run.ways_of(shape, ways):
            if way in RECORDED and not run.recorded(shape):
                run.missing.append(f"{way} {shape}: nothing was recorded")
                continue
            run.measure(way, shape)
            asked.out.write_text(json.dumps(document(run.rows), indent=2) + "\n")
    if not run.vllm:
        of_vllm = [way for way in asked.ways if way.startswith("vllm")]
        run.missing += [f"{way}: no interpreter has vLLM" for way in of_vllm]
    missed = [*run.missing, *floors(run.rows)]
    for line in missed:
        print(line, file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
