"""The native engine on one GPU, beside vLLM in the same run: ``make bench-engine-gpu VLLM=python``.

Each engine is a process of its own (``engine_gpu_ours.py``, ``engine_gpu_vllm.py`` by the
interpreter that ``--vllm`` names) and reads the same random weights from the same files, in
bfloat16, or in fp8 where the shape says so (both beside each other: ``engine_gpu_fp8.py``). Both
stay on the device, with as much KV; they take turns, and the engine that goes first changes.
For each shape: decode milliseconds a step at batch 1, 8 and 64 behind prompts of 161 tokens (the
time of more tokens less that of few, by their number); output tokens a second for 128 requests of
161 tokens in and 128 out, and for a sample of a trace of conversations
(``data/azure_conv_2023_sample.csv``), all offered at once; ours alone with 64 and 128 requests at a
time, three turns of them, as ``served_gpu.py`` asks servers; time to the first token at 161, 2,048
and 8,192 prompt tokens; the most memory that each had of the device's. Prompts are random and all
different, prefixes are not cached, output is greedy, nothing stops early.

Greedy tokens are compared, too: at the first that differs, both engines are right where float32
finds the two no further apart than bfloat16 rounds; else it is wrong (``engine_gpu_agreement``).
With weights in fp8 that says little: there all logits behind the same tokens are judged beside what
the checkpoint means in float32 (``engine_gpu_logits``).

Every row is printed as JSON as soon as it is there; the last line is the whole document. What would
not end within ``--limit-s`` seconds a shape is left out and named; ``--rows`` chooses some. The
exit status is 1 when a floor was missed, tokens differ by more than rounding, or a row is missing.
"""

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_gpu_fp8 import below_floors, beside_bfloat16
from engine_gpu_job import QUANTIZED, SHAPES, weights_bytes
from engine_gpu_process import Child, DeviceMemory
from engine_gpu_said import Said, compared, judged_logits, said

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS, BATCHES, PROMPTS = 161, (1, 8, 64), (161, 2_048, 8_192)
IN_TURN, TURNS, IN_TURN_TOKENS = (64, 128), 3, 128
"""Requests at a time, and how often another follows, as ``bench/served_gpu.py`` asks servers."""
FEW, STEPS = 8, 96
TTFT_TIMES = 5
FLOOR = 0.9
START_S, ANSWER_S = 240.0, 120.0
"""The longest that an engine may take to start, and to answer."""
PREDICTED_S = {
    "weights": {"4B": 12, "8B": 20, "8B-fp8": 16, "8B-fp8-channel": 16},
    "vllm": {"4B": 60, "8B": 65, "8B-fp8": 68, "8B-fp8-channel": 68},
    "ours": {"4B": 15, "8B": 18, "8B-fp8": 18, "8B-fp8-channel": 18},
}
"""On one H200 with nothing cached; other parts are in ``rows``."""
PROFILE_S, EXACT_S = 15.0, {"4B": 15.0, "8B": 20.0, "8B-fp8": 20.0, "8B-fp8-channel": 20.0}
"""What these take at most: of fp8, all logits."""


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    unit: str
    more_is_better: bool
    predicted_s: float
    """Of both engines once."""
    measure: Callable[[Child, int], list[float]]
    """By a seed that no other turn of this engine has had."""
    alone: bool = False
    """Of our engine only."""


class Clock:
    """Seconds since the shape began, on stderr with everything that is said."""

    def __init__(self, shape: str, limit_s: float) -> None:
        self._shape = shape
        self._limit_s = limit_s
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the shape began."""
        return time.monotonic() - self._began_s

    def say(self, words: str) -> None:
        """Progress."""
        print(f"… {self._shape} {self.elapsed_s:6.1f} s: {words}", file=sys.stderr, flush=True)

    def has(self, seconds: float) -> bool:
        """There is that much time left."""
        return self.elapsed_s + seconds <= self._limit_s


def conversations() -> tuple[list[int], list[int]]:
    """Prompt and output lengths of the sample."""
    lines = (HERE / "data" / "azure_conv_2023_sample.csv").read_text().splitlines()
    pairs = [tuple(map(int, line.split(","))) for line in lines if line[0].isdigit()]
    return [prompt for prompt, _ in pairs], [output for _, output in pairs]


def decode_ms(batch: int) -> Callable[[Child, int], list[float]]:
    """Milliseconds a step."""

    def measure(engine: Child, seed: int) -> list[float]:
        few = engine.generate(seed, [PROMPT_TOKENS] * batch, [FEW] * batch)
        many = engine.generate(seed + 1, [PROMPT_TOKENS] * batch, [FEW + STEPS] * batch)
        return [(many - few) / STEPS * 1e3]

    return measure


def tokens_per_s(prompts: list[int], outputs: list[int]) -> Callable[[Child, int], list[float]]:
    """Output tokens a second, all requests at once, to the end of the last."""
    return lambda engine, seed: [sum(outputs) / engine.generate(seed, prompts, outputs)]


def in_turn(at_once: int) -> Callable[[Child, int], list[float]]:
    """The same where so many run at a time, and each that ends is followed by another."""
    prompts, outputs = ([tokens] * (at_once * TURNS) for tokens in (PROMPT_TOKENS, IN_TURN_TOKENS))
    return lambda engine, seed: [sum(outputs) / engine.generate(seed, prompts, outputs, at_once)]


def ttft_ms(prompt_tokens: int) -> Callable[[Child, int], list[float]]:
    """Milliseconds from the call to the first token, of one request alone."""
    return lambda engine, seed: [
        engine.generate(seed + turn, [prompt_tokens], [1]) * 1e3 for turn in range(TTFT_TIMES)
    ]


def rows(shape: str) -> list[Row]:
    """What is measured, the shortest first: a run that is cut off has most of it."""
    slower = 1.0 if shape == "4B" else 1.3
    return [
        *(
            Row(
                f"decode, batch {batch}", "ms", False, (1.2 + batch / 40) * slower, decode_ms(batch)
            )
            for batch in BATCHES
        ),
        *(
            Row(
                f"first token at {length}",
                "ms",
                False,
                0.4 + length / 5000 * slower,
                ttft_ms(length),
            )
            for length in PROMPTS
        ),
        Row(
            "128 requests of 161 in, 128 out",
            "tokens/s",
            True,
            3 * slower,
            tokens_per_s([PROMPT_TOKENS] * 128, [128] * 128),
        ),
        *(
            Row(
                f"{at_once} requests in turn",
                "tokens/s",
                True,
                (1.5 + at_once / 64) * slower,
                in_turn(at_once),
                alone=True,
            )
            for at_once in IN_TURN
        ),
        Row(
            "AzureConv, 128 requests at once",
            "tokens/s",
            True,
            12 * slower,
            tokens_per_s(*conversations()),
        ),
    ]


def ratio(ours: float, theirs: float, *, more_is_better: bool) -> float:
    """How much better we are: 1.0 is as good."""
    return round(ours / theirs if more_is_better else theirs / ours, 3)


def summary(
    name: str,
    unit: str,
    more_is_better: bool,
    found: dict[str, list[float]],
    median: Callable[..., float],
) -> dict[str, Any]:
    """A row's line: medians, every figure, and the ratio and its floor where there are two
    engines.
    """
    middle = {engine: round(median(figures), 3) for engine, figures in found.items()}
    line: dict[str, Any] = {"row": name, "unit": unit, **middle}
    if "vllm" in middle:
        line["ratio"] = ratio(middle["ours"], middle["vllm"], more_is_better=more_is_better)
        line["floor"] = {"ratio": FLOOR, "met": line["ratio"] >= FLOOR}
    return line | {
        "raw": {
            engine: [round(figure, 3) for figure in figures] for engine, figures in found.items()
        }
    }


def folder_for(shape: str) -> str | None:
    """Memory, if the weights fit there; None: where temporary files go."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 1.1 * weights_bytes(shape)
    return str(memory) if fits else None


@contextlib.contextmanager
def started(
    shape: str, arguments: argparse.Namespace, clock: Clock, memory: DeviceMemory
) -> Iterator[dict[str, Child]]:
    """Both engines, one after the other: what the device's memory grows by is the one's that
    starts.
    """
    place = arguments.folder or folder_for(shape)
    with (
        tempfile.TemporaryDirectory(prefix="pilotlight-bench-", dir=place) as folder,
        contextlib.ExitStack() as ends,
    ):
        clock.say(f"writing weights to {folder}, predicted {PREDICTED_S['weights'][shape]} s")
        command = [sys.executable, str(HERE / "engine_gpu_weights.py"), shape, folder]
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=ANSWER_S)
        interpreters = {"vllm": arguments.vllm, "ours": sys.executable}
        engines: dict[str, Child] = {}
        for name, interpreter in interpreters.items():
            if interpreter is None:
                continue
            clock.say(f"starting {name}, predicted {PREDICTED_S[name][shape]} s")
            script = HERE / f"engine_gpu_{name}.py"
            with memory.of(name):
                engines[name] = ends.enter_context(
                    Child(
                        name,
                        [interpreter, str(script), json.dumps({"folder": folder, "shape": shape})],
                        START_S,
                        ANSWER_S,
                    )
                )
            clock.say(f"{name} is up: {engines[name].about}")
        yield engines


def measure(
    shape: str, arguments: argparse.Namespace, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Everything for one shape."""
    clock, memory = Clock(shape, arguments.limit_s), DeviceMemory()
    asked: list[str] = arguments.rows.split(",")
    planned = [row for row in rows(shape) if any(words in row.name for words in asked)]
    total = sum(part[shape] for part in PREDICTED_S.values())
    total += sum(row.predicted_s for row in planned) * (arguments.rounds + 1)
    clock.say(f"predicted {total:.0f} s, limit {arguments.limit_s:.0f} s")
    seeds = iter(range(1, 1 << 30, 100))
    found: dict[str, Any] = {"rows": [], "left_out": []}
    both: Said | None = None
    with started(shape, arguments, clock, memory) as engines:
        found["engines"] = {name: engine.about for name, engine in engines.items()}
        figures: dict[str, dict[str, list[float]]] = {
            row.name: {name: [] for name in engines if name == "ours" or not row.alone}
            for row in planned
        }
        for turn in range(-1, arguments.rounds):
            order = list(engines.items())[:: 1 if turn % 2 else -1]
            for row in planned:
                if not clock.has(row.predicted_s):
                    found["left_out"].append(
                        f"{row.name}, {'warming' if turn < 0 else f'round {turn + 1}'}"
                    )
                    continue
                for name, engine in order:
                    if name not in figures[row.name]:
                        continue
                    seed = next(seeds)
                    with memory.of(name):
                        measured = row.measure(engine, seed)
                    if turn >= 0:
                        figures[row.name][name] += measured
                    clock.say(
                        f"round {turn + 1}, {row.name}, {name}: {statistics.median(measured):.3f} {row.unit}"
                    )
            if turn < 0 and len(engines) == 2 and shape not in QUANTIZED:
                both = said(engines, next(seeds), memory)
        for row in planned:
            if all(figures[row.name].values()):
                line = summary(
                    row.name, row.unit, row.more_is_better, figures[row.name], statistics.median
                )
                found["rows"].append(line)
                tell({"shape": shape, **line})
        peaks = {name: [memory.peak_bytes[name] / 2**30] for name in engines}
        found["rows"].append(summary("peak memory", "GiB", False, peaks, max))
        tell({"shape": shape, **found["rows"][-1]})
        found["our_books"] = engines["ours"].ask(do="memory")
        if arguments.profile and clock.has(PROFILE_S):
            found["profile"] = profile(engines["ours"], next(seeds))
        if both is not None and clock.has(EXACT_S[shape]):
            found["agreement"] = compared(engines["ours"], both)
            tell({"shape": shape, "agreement": found["agreement"]})
        elif both is not None:
            found["left_out"].append("agreement")
        if shape in QUANTIZED and clock.has(EXACT_S[shape]):
            found["logits"] = judged_logits(engines, next(seeds))
            tell({"shape": shape, "logits": found["logits"]})
        elif shape in QUANTIZED:
            found["left_out"].append("logits")
    found["elapsed_s"] = round(clock.elapsed_s, 1)
    return found


def profile(engine: Child, seed: int) -> dict[str, Any]:
    """Our device time by kernel, beside what the same steps took."""
    asked = {
        "decode 1": (1, 161, 10),
        "decode 64": (64, 161, 10),
        "prefill 8192": (1, 8192, 1),
        "prefill 161": (1, 161, 1),
    }
    return {
        name: engine.ask(
            do="profile", seed=seed + number, prompt_tokens=[tokens] * batch, steps=steps
        )
        for number, (name, (batch, tokens, steps)) in enumerate(asked.items())
    }


def complaints(shapes: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    found: list[str] = []
    for shape, document in shapes.items():
        below = [line for line in document["rows"] if "floor" in line and not line["floor"]["met"]]
        found += [
            f"{shape}: {line['row']}: {line['ratio']} of vLLM, below {FLOOR}" for line in below
        ]
        found += [f"{shape}: left out: {name}" for name in document["left_out"]]
        found += [
            f"{shape}: tokens differ by more than rounding: {one}"
            for one in document.get("agreement", {}).get("errors", [])
        ]
        found += [f"{shape}: {one}" for one in document.get("logits", {}).get("errors", [])]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", help="a Python interpreter that has vLLM; without it nothing is compared"
    )
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["4B", "8B"])
    parser.add_argument("--rows", default="", help="parts of their names, with commas between")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=260.0, help="of each shape")
    parser.add_argument(
        "--folder",
        help="where the weights are written; by default memory, if they fit, else where temporary files go",
    )
    parser.add_argument("--profile", action="store_true", help="our device time by kernel, too")
    asked = parser.parse_args(arguments)
    # Told to end, it ends its engines and takes the weights away: tens of GiB, in memory mostly.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    found = {shape: measure(shape, asked, tell) for shape in asked.shapes}
    for line in (beside := beside_bfloat16(found)):
        tell(line)
    missed = complaints(found) + below_floors(beside)
    tell({"shapes": found, "fp8_beside_bfloat16": beside, "missed": missed})
    for words in missed:
        print(f"MISSED  {words}", file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
