"""The whole system on one GPU beside ``vllm serve``, as clients meet them: ``make bench-served-gpu
VLLM=python``.

Pilotlight is started by ``pilotlight up`` (NATS, PostgreSQL, objects, gateway, one worker on the
GPU), vLLM by ``vllm serve`` with its defaults; one after the other, never both on the device. Both
read the same random bfloat16 weights from the same files, which memory holds, with a tokenizer of
Qwen's size beside them: text goes in and comes out. The same client asks both, from processes of
its own (``served_gpu_client.py``).

A part is one server with one shape: ``ours-4B``, ``vllm-4B``, ``ours-8B``, ``vllm-8B``. ``--parts``
names those of this run; each writes ``OUT/PART.json``, after every row, and one that is there whole
is not run again. At the end, what is in ``OUT`` is joined into one table on stderr, and one
document with ratios on stdout and in ``OUT/served_gpu.json``, in the form of ``bench/results``.
``--parts none`` only joins. ``--rows`` names those of a short run, by a part of their names
(``azure``, ``concurrent``, ``16/s``); ours is started cold once then, and what is asked is the
same. For each part:

* the cold start, to the first token. vLLM's is from its process's start, with empty compile caches;
  its Python files were read before. Ours is from the request, with the system up and the model
  registered, and loaded nowhere: the first one, when nothing is compiled either; another one of
  files in the page cache; and one whose parameters the host pool has. The floor is for the second;
* 161 tokens in and 128 out, streamed, at 1, 8, 64 and 128 concurrent, three rounds; at the end one
  at a time with the likeliest token of each place, which is not judged;
* conversations with the lengths of a trace's (``data/azure_conv_2023_sample.csv``) at three rates,
  Poisson arrivals, three draws of them, the same for both. Goodput is the share of answers with
  TTFT of at most 200 ms and TPOT of at most 20 ms, times the rate. Ours is told this SLO as its
  users tell it, as the model's; vLLM has no such setting.

The part's file keeps the times of each request, and ``OUT/requests.json`` has those of all parts.

Times to the first token (TTFT), a token after it (TPOT, by request) and between texts (ITL) are the
client's, in milliseconds. Prompts are random and all different, output is greedy, and nothing stops
early. The exit status is 1 when a floor was missed, an answer failed, or a row is missing.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import served_gpu_cpu as cpu
import served_gpu_load as load
from engine_gpu_job import SHAPES, weights_bytes
from served_gpu_join import LOGPROBS, PARTS, joined, requests_of, shape_of, table
from served_gpu_models import Prompts, prepare
from served_gpu_servers import COLDS, ROOT, SHARED_MEMORY, Pilotlight, Vllm, await_free_device
from served_gpu_up import NO_SLO_MS, Up

from pilotlight.cli.plan import default_gateways

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS, OUTPUT_TOKENS = 161, 128
PROFILED = 64
"""Rows with at least so many concurrent requests are profiled."""
SEED = 20_231_116
MEMORY_TIMES = 4.5
"""Of the weights: with the host pool's share and some room."""
LOG_CHARS = 4000
"""Of each log's end, where something was wrong."""
LIMIT_S, STOP_S = 430.0, 25.0
"""Of a part, and of that to end in order."""


@dataclass(frozen=True)
class Sizes:
    """How much is asked."""

    turns: dict[int, int]
    """By the number of concurrent requests: how many each of them is followed by, with itself."""
    rates: tuple[float, ...]
    window_s: float
    """Of arrivals at each rate."""
    rounds: int = 3
    output_tokens: int = OUTPUT_TOKENS
    divided_by: int = 1
    """Lengths of conversations."""


TURNS = {1: 5, 8: 3, 64: 3, 128: 3}
SIZES = {
    "4B": Sizes(TURNS, (8, 16, 32), 10.0),
    "8B": Sizes(TURNS, (6, 12, 24), 10.0),
    "tiny": Sizes({1: 2, 8: 1, 64: 1}, (4,), 2.0, output_tokens=16, divided_by=32),
}
QUICK = Sizes({1: 3, 8: 1, 64: 1, 128: 1}, (8,), 4.0, rounds=1)


@dataclass(frozen=True)
class Row:
    """What is asked at once, and about how long it takes."""

    name: str
    load: load.Load
    predicted_s: float
    rate_per_s: float | None = None


class Part:
    """One server with one shape: says how it goes, and writes down what there is."""

    def __init__(self, name: str, out: Path, limit_s: float) -> None:
        self._began_s = time.monotonic()
        self._name, self._limit_s = name, limit_s
        self.file = out / f"{name}.json"
        self.document: dict[str, Any] = {
            "part": name,
            "complete": False,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "machine": machine(),
            "load": f"load average {os.getloadavg()[0]:.1f} before it",
            "rows": {},
            "requests": {},
            "left_out": [],
            "wrong": [],
        }

    def say(self, words: str) -> None:
        """Progress."""
        print(f"… {self._name} {self.elapsed_s:6.1f} s: {words}", file=sys.stderr, flush=True)

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began_s

    def has(self, seconds: float) -> bool:
        """There is so much time left."""
        return self.elapsed_s + seconds + STOP_S <= self._limit_s

    def write(self, **more: Any) -> None:
        """The file is whole at any time."""
        self.document |= {**more, "elapsed_s": round(self.elapsed_s, 1)}
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(json.dumps(self.document))
        unfinished.rename(self.file)


def commit() -> str:
    """Of this tree; empty where it is no checkout."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h %cs", "--abbrev=7"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def machine() -> str:
    """What the figures were taken on."""
    cores = f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        told = (
            subprocess.run(command, capture_output=True, text=True, check=False)
            .stdout.strip()
            .splitlines()
        )
        return f"{', driver '.join(told[0].split(', '))}, {cores}" if told else f"no GPU, {cores}"
    return f"no GPU, {cores}"


def conversations(count: int, seed: int, divided_by: int) -> tuple[list[int], list[int]]:
    """Prompt and output lengths: the sample again and again, each time in another order."""
    lines = (HERE / "data" / "azure_conv_2023_sample.csv").read_text().splitlines()
    sample = [
        tuple(max(2, int(field) // divided_by) for field in line.split(","))
        for line in lines
        if line[0].isdigit()
    ]
    dice = random.Random(seed)
    drawn: list[tuple[int, ...]] = []
    while len(drawn) < count:
        drawn += dice.sample(sample, len(sample))
    return [prompt for prompt, _ in drawn[:count]], [output for _, output in drawn[:count]]


def rows(sizes: Sizes, prompts: Prompts) -> Iterator[Row]:
    """What is measured; first what warms up, whose rows have no name.

    Each row has prompts of its own.
    """
    seeds = iter(range(SEED, SEED + 1000))

    def at_once(name: str, concurrency: int, turns: int, logprobs: int | None = None) -> Row:
        lengths = [PROMPT_TOKENS] * (concurrency * turns)
        outputs = [sizes.output_tokens] * len(lengths)
        drawn = prompts.draw(next(seeds), lengths)
        asked = load.Load(drawn, lengths, outputs, concurrency, logprobs=logprobs)
        return Row(name, asked, 1.5 + turns * sizes.output_tokens * (0.006 + concurrency / 16_000))

    def arriving(name: str, rate: float, window_s: float) -> Row:
        seed, count = next(seeds), max(2, round(rate * window_s))
        lengths, outputs = conversations(count, seed, sizes.divided_by)
        at_s = load.arrivals(count, rate, seed)
        asked = load.Load(prompts.draw(seed, lengths), lengths, outputs, min(count, 64), at_s)
        return Row(name, asked, at_s[-1] + 10.0, rate)

    for concurrency in reversed(sizes.turns):
        yield at_once("", concurrency, 1)
    yield arriving("", sizes.rates[0], 2.0)
    for _ in range(sizes.rounds):
        for concurrency, turns in sizes.turns.items():
            yield at_once(f"{concurrency} concurrent", concurrency, turns)
    for _ in range(sizes.rounds):
        for rate in sizes.rates:
            yield arriving(f"AzureConv at {rate:g}/s", rate, sizes.window_s)
    for _ in range(sizes.rounds):
        yield at_once(f"1 at a time, {LOGPROBS}", 1, sizes.turns[1], 1)


def measure(part: Part, up: Up, prompts: Prompts, sizes: Sizes, *, profile: bool) -> None:
    """Every row for a server that is up."""
    part.write(cold=up.cold, about=up.about)
    for row in rows(sizes, prompts):
        only = part.document["only"]
        if row.name and only and not any(word in row.name.lower() for word in only):
            continue
        name = row.name or f"warming up, {len(row.load.prompts)} requests"
        if not part.has(row.predicted_s):
            part.document["left_out"].append(name)
            part.say(f"left out: {name}, predicted {row.predicted_s:.0f} s")
            continue
        if up.declare is not None:
            up.declare(*(NO_SLO_MS if row.rate_per_s is None else (load.TTFT_MS, load.TPOT_MS)))
        before = (
            cpu.read(up.pid)
            if profile and row.load.concurrency >= PROFILED and row.load.at_s is None
            else None
        )
        answers, wrong = load.ask(up.target, row.load)
        after = cpu.read(up.pid) if before else None
        found = load.figures(answers, row.rate_per_s)
        part.document["wrong"] += [f"{name}: {words}" for words in wrong]
        if row.name:
            if before and after:
                found["cpu"] = cpu.taken(before, after)
            part.document["rows"].setdefault(row.name, []).append(found)
            part.document["requests"].setdefault(row.name, []).append(load.each(answers))
            part.write()
        part.say(f"{name}: {load.told(found)}" + (f"; WRONG {wrong[:3]}" if wrong else ""))
    part.write(complete=True)


@contextlib.contextmanager
def weights_folder(chosen: Path | None, part: str) -> Iterator[Path]:
    """The chosen one, which stays; else one in memory, if weights and host pool fit there, or where
    temporary files go.
    """
    if chosen is not None:
        yield chosen.absolute()
        return
    size = weights_bytes(shape_of(part)) if shape_of(part) in SHAPES else 0
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > MEMORY_TIMES * size
    with tempfile.TemporaryDirectory(
        prefix="pilotlight-served-", dir=SHARED_MEMORY if fits else None
    ) as folder:
        yield Path(folder)


def run(name: str, arguments: argparse.Namespace, work: Path, weights: Path) -> None:
    """One part."""
    shape = shape_of(name)
    part = Part(name, arguments.out, arguments.limit_s)
    folder = weights / shape
    sizes = QUICK if arguments.quick and shape != "tiny" else SIZES[shape]
    part.say(f"weights in {folder}")
    prepare(shape, folder)
    prompts = Prompts.of(folder)
    await_free_device()
    part.say("starting the server")
    part.write(quick=arguments.quick, only=arguments.rows)
    # PostgreSQL runs as another user when we are root, and passes through.
    own = work / name
    own.mkdir(mode=0o711)
    try:
        with started(name, arguments, folder, own, part) as up:
            measure(part, up, prompts, sizes, profile=arguments.profile)
    except (SystemExit, OSError, subprocess.SubprocessError) as error:
        # Other parts can be measured all the same.
        part.document["wrong"].append(f"ended by {type(error).__name__}: {error}")
        part.say(f"ended: {error}")
    if part.document["wrong"]:
        part.write(
            logs={
                file.name: file.read_text(errors="replace")[-LOG_CHARS:]
                for file in sorted(own.glob("**/*.log"))
            }
        )
    part.say("the server has ended")


def started(
    name: str, arguments: argparse.Namespace, folder: Path, work: Path, part: Part
) -> contextlib.AbstractContextManager[Up]:
    """The server of a part."""
    if name.startswith("vllm"):
        return Vllm(arguments.vllm, folder, work, part.say).up()
    shape = shape_of(name)
    kind = "cpu" if shape == "tiny" else "cuda"
    colds = COLDS[:1] if arguments.rows else COLDS
    return Pilotlight(shape.lower(), folder, work, part.say, colds).up(kind, arguments.gateways)


def is_whole(file: Path, only: Sequence[str], *, quick: bool) -> bool:
    """The part was run to its end, with these sizes, and these rows at least."""
    if not file.is_file():
        return False
    document = json.loads(file.read_text())
    there = document.get("only", [])
    return document["complete"] and document["quick"] == quick and (not there or there == only)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", help="a Python interpreter that has vLLM; without it, vLLM's parts are left out"
    )
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help="with commas between; none: only join what is there",
    )
    parser.add_argument(
        "--rows",
        type=lambda told: told.lower().split(","),
        default=[],
        help="parts of the names of rows, with commas between; by default all rows",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist" / "served-gpu", help="folder for what is measured"
    )
    parser.add_argument(
        "--weights",
        type=Path,
        help="folder in which weights are kept for later parts; else they are removed",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        help="of each part; what would not end within it is left out",
    )
    parser.add_argument(
        "--gateways",
        type=int,
        default=default_gateways(len(os.sched_getaffinity(0))),
        help="gateway processes; by default as many as `pilotlight up` starts",
    )
    parser.add_argument("--quick", action="store_true", help="one round, one rate, few requests")
    parser.add_argument(
        "--profile",
        action="store_true",
        help=f"processor time of each process, from {PROFILED} concurrent requests",
    )
    asked = parser.parse_args(arguments)
    # Told to end, it ends its servers and takes the weights away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked.out.mkdir(parents=True, exist_ok=True)
    names = [] if asked.parts == "none" else asked.parts.split(",")
    for name in names:
        if name not in (*PARTS, "ours-tiny"):
            parser.error(f"there is no part {name}: {', '.join(PARTS)}")
        if name.startswith("vllm") and asked.vllm is None:
            print(f"… {name}: left out, since --vllm names no interpreter", file=sys.stderr)
        elif is_whole(asked.out / f"{name}.json", asked.rows, quick=asked.quick):
            print(f"… {name}: is there", file=sys.stderr)
        else:
            with (
                tempfile.TemporaryDirectory(prefix="pilotlight-served-") as work,
                weights_folder(asked.weights, name) as weights,
            ):
                Path(work).chmod(0o711)
                run(name, asked, Path(work), weights)
    parts = [json.loads(file.read_text()) for file in sorted(asked.out.glob("*-*.json"))]
    document = joined(parts, commit())
    (asked.out / "served_gpu.json").write_text(json.dumps(document, indent=2))
    (asked.out / "requests.json").write_text(requests_of(parts))
    print(table(document), file=sys.stderr)
    print(json.dumps(document), flush=True)
    if document["missed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
