"""How much of a long prompt a step should take beside running requests: ``make bench-chunks-gpu``.

The engine alone, on this machine's GPU, with random weights (``engine_gpu_weights.py``). For each
limit of ``BatchLimits.chunk_tokens`` (0: none), by turns: 64 and 128 clients that ask again as soon
as they are answered (161 tokens in, 128 out, three times each), and arrivals with the lengths of a
trace of conversations (``data/azure_conv_2023_sample.csv``) at two rates. Each is a line of JSON
with TTFT, TPOT and the gaps between tokens (ITL), median and 99th percentile in milliseconds,
tokens a second, and for arrivals the goodput: requests a second with TTFT of at most 200 ms and
TPOT of at most 20 ms. Each limit has a process of its own in each round, and what warms it up does
not count.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import engine_gpu_job as job
import engine_gpu_ours as ours
import served_gpu_load as load
from served_gpu import conversations

from pilotlight.policy.request import FinishReason

KV_TOKENS = 300_000
STEP_TOKENS, GATHER_S = 10_240, 0.010
"""As an engine's child on a GPU has them."""
PROMPT_TOKENS, OUTPUT_TOKENS, TURNS = 161, 128, 3
RATES = {"4B": (16.0, 32.0), "8B": (12.0, 24.0)}
TTFT_MS, TPOT_MS = 200.0, 20.0
IDLE_S = 0.0005
WEIGHTS_S, PROCESS_S = 120.0, 120.0
"""The longest that they may take."""
SHARED_MEMORY = "/dev/shm"
SEED = 20_231_117
HERE = Path(__file__).resolve().parent


@dataclass
class Told:
    """When each request came, and when its tokens did."""

    came_s: dict[str, float] = field(default_factory=dict[str, float])
    tokens_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def figures(self, seconds: float, rate_per_s: float | None) -> dict[str, Any]:
        """Of all requests; every one has a token."""
        ttft = [(at[0] - self.came_s[name]) * 1e3 for name, at in self.tokens_s.items()]
        tpot = [(at[-1] - at[0]) * 1e3 / max(1, len(at) - 1) for at in self.tokens_s.values()]
        gaps = [
            (after - before) * 1e3
            for at in self.tokens_s.values()
            for before, after in pairwise(at)
        ]
        named = {"ttft_ms": ttft, "tpot_ms": tpot, "itl_ms": gaps}
        found: dict[str, Any] = {
            f"{name}_p{percent}": quantile(values, percent / 100)
            for name, values in named.items()
            for percent in (50, 99)
        }
        found["tokens_per_s"] = round(sum(map(len, self.tokens_s.values())) / seconds, 1)
        if rate_per_s is not None:
            kept = sum(
                first <= TTFT_MS and each <= TPOT_MS for first, each in zip(ttft, tpot, strict=True)
            )
            found["goodput_per_s"] = round(kept / len(ttft) * rate_per_s, 2)
        return found


def quantile(values: list[float], share: float) -> float:
    """The least value that ``share`` of them do not exceed."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 2)


class Clients:
    """Asks the engine, in its own process: nothing is in between."""

    def __init__(self, bench: ours.Bench) -> None:
        self._bench = bench
        self._dice = random.Random(SEED)

    def _add(self, told: Told, prompt_tokens: int, output_tokens: int, came_s: float) -> None:
        prompt = self._dice.choices(range(job.VOCAB_SIZE), k=prompt_tokens)
        name = self._bench.add(prompt, output_tokens)
        told.came_s[name], told.tokens_s[name] = came_s, []

    def _step(self, told: Told) -> Iterable[FinishReason]:
        produced = self._bench.engine.step().produced
        now_s = time.perf_counter()
        for one in produced:
            told.tokens_s[one.request_id] += [now_s] * len(one.token_ids)
        return [one.finish for one in produced if one.finish is not None]

    def closed(self, count: int) -> dict[str, Any]:
        """``count`` clients that ask again as soon as they are answered."""
        told, left, began_s = Told(), count * (TURNS - 1), time.perf_counter()
        for _ in range(count):
            self._add(told, PROMPT_TOKENS, OUTPUT_TOKENS, began_s)
        while self._bench.engine.has_work:
            for _ in self._step(told):
                if left:
                    left -= 1
                    self._add(told, PROMPT_TOKENS, OUTPUT_TOKENS, time.perf_counter())
        return told.figures(time.perf_counter() - began_s, None)

    def arriving(self, rate_per_s: float, window_s: float, seed: int) -> dict[str, Any]:
        """Conversations, at random moments."""
        count = round(rate_per_s * window_s)
        prompts, outputs = conversations(count, seed, 1)
        due = list(zip(load.arrivals(count, rate_per_s, seed), prompts, outputs, strict=True))
        told, began_s = Told(), time.perf_counter()
        while due or self._bench.engine.has_work:
            while due and began_s + due[0][0] <= time.perf_counter():
                at_s, prompt_tokens, output_tokens = due.pop(0)
                self._add(told, prompt_tokens, output_tokens, began_s + at_s)
            if self._bench.engine.has_work:
                self._step(told)
            else:
                time.sleep(IDLE_S)
        return told.figures(time.perf_counter() - began_s, rate_per_s)


def measure(shape: str, folder: str, chunk: int, window_s: float, seed: int) -> None:
    """One limit, in this process: a line of JSON each."""
    limits = replace(ours.LIMITS, step_tokens=STEP_TOKENS, gather_s=GATHER_S)
    clients = Clients(
        ours.Bench(job.Job(folder, shape), replace(limits, chunk_tokens=chunk or None))
    )
    clients.closed(64)
    clients.arriving(RATES[shape][-1], window_s / 2, seed - 1)
    for count in (64, 128):
        tell(chunk, f"{count} clients", clients.closed(count))
    for rate in RATES[shape]:
        tell(chunk, f"{rate:g}/s", clients.arriving(rate, window_s, seed))


def tell(chunk: int, what: str, figures: dict[str, Any]) -> None:
    """A line."""
    print(json.dumps({"chunk_tokens": chunk, "what": what, **figures}), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print: a process for each limit, round by round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(RATES), default="8B")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 2048, 1024, 512])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=8.0, help="of arrivals at each rate")
    parser.add_argument("--folder", help="of weights that are there already")
    parser.add_argument("--seed", type=int, help="measure the one limit in this process")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        job.KV_TOKENS = KV_TOKENS
        measure(asked.shape, asked.folder, asked.chunks[0], asked.window_s, asked.seed)
        return
    with tempfile.TemporaryDirectory(prefix="pilotlight-chunks-", dir=SHARED_MEMORY) as own:
        if asked.folder is None:
            weights = [sys.executable, str(HERE / "engine_gpu_weights.py"), asked.shape, own]
            subprocess.run(weights, check=True, stdout=sys.stderr, timeout=WEIGHTS_S)
        for seed in range(SEED, SEED + asked.rounds):
            for chunk in asked.chunks:
                command = [sys.executable, str(Path(__file__)), "--shape", asked.shape]
                command += ["--folder", asked.folder or own, "--chunks", str(chunk)]
                command += ["--window-s", str(asked.window_s), "--seed", str(seed)]
                subprocess.run(command, check=True, timeout=PROCESS_S)


if __name__ == "__main__":
    main()
