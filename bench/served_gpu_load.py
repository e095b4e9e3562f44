"""Runs the client's processes of ``bench/served_gpu.py`` and makes figures of what came.

The standard library alone.
"""

import json
import math
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from served_gpu_client import Answer

CLIENT = Path(__file__).resolve().with_name("served_gpu_client.py")
CONNECTIONS_OF_ONE = 32
"""More are shared among processes, at most ``MOST_PROCESSES``."""
MOST_PROCESSES = 4
READY_S, REQUEST_S, GRACE_S = 30.0, 120.0, 30.0
LEAD_S = 0.3
"""From the last process that is ready to the beginning."""
BUSY_SHARE = 0.7
"""A client's process that works for more of the time than this may have waited for itself."""
TTFT_MS, TPOT_MS = 200.0, 20.0
"""An answer within both is a good one."""


@dataclass(frozen=True)
class Target:
    """A server, as clients know it."""

    host: str
    port: int
    model: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """With every request."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def body(self, prompt: str, output_tokens: int, logprobs: int | None = None) -> dict[str, Any]:
        """A greedy completion of exactly so many tokens, streamed; with as many of the likeliest
        tokens for each, where they are asked for.
        """
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if logprobs is None else {"logprobs": logprobs}),
        }


@dataclass(frozen=True)
class Load:
    """What is asked at once: prompts with how many tokens each has, and how many it is to be
    given.
    """

    prompts: Sequence[str]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    concurrency: int
    """Requests at a time; with arrivals: connections that are open at the beginning."""
    at_s: Sequence[float] | None = None
    """Arrivals; None: the next as soon as one has ended."""
    logprobs: int | None = None
    """Likeliest tokens that are told with each."""

    @property
    def processes(self) -> int:
        """Of the client."""
        wanted = MOST_PROCESSES if self.at_s is not None else self.concurrency // CONNECTIONS_OF_ONE
        return max(1, min(MOST_PROCESSES, wanted, len(self.prompts)))


def arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Poisson's, the same for everybody who is given the same seed; the first comes at once."""
    dice = random.Random(seed)
    found, at_s = [0.0], 0.0
    while len(found) < count:
        at_s += dice.expovariate(rate_per_s)
        found.append(at_s)
    return found


class Process:
    """One process of the client."""

    def __init__(self, job: dict[str, Any], program: Path = CLIENT) -> None:
        """Starts it and gives it its job."""
        self._process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell(json.dumps(job))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, line: str) -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self, deadline_s: float) -> str:
        """Its next line.

        Raises:
            SystemExit: there is none.
        """
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            line = ""
        if not line:
            raise SystemExit(
                f"a process of the client said nothing within {deadline_s:.0f} s, or ended"
            )
        return line

    def end(self) -> None:
        """Let nothing of it stay."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()


def ask(target: Target, load: Load) -> tuple[list[Answer], list[str]]:
    """Ask everything and wait for the last answer.

    Returns:
        The answers, and what is wrong: requests that failed or were answered with another number of
            tokens, and a client that was
        too busy to measure.

    Raises:
        SystemExit: the client itself failed.
    """
    count = load.processes
    processes: list[Process] = []
    try:
        for number in range(count):
            mine = slice(number, None, count)
            pairs = zip(load.prompts[mine], load.output_tokens[mine], strict=True)
            job = {
                "host": target.host,
                "port": target.port,
                "path": "/v1/completions",
                "headers": target.headers,
                "bodies": [target.body(prompt, tokens, load.logprobs) for prompt, tokens in pairs],
                "at_s": None if load.at_s is None else list(load.at_s[mine]),
                "connections": len(range(number, load.concurrency, count)),
                "deadline_s": REQUEST_S,
            }
            processes.append(Process(job))
        for process in processes:
            process.line(READY_S)
        began_s = time.monotonic() + LEAD_S
        for process in processes:
            process.tell(repr(began_s))
        # A process whose connections are all slow has its last answer after as many deadlines as
        # each has requests.
        turns = 1 if load.at_s is not None else math.ceil(len(load.prompts) / load.concurrency)
        last_s = (load.at_s[-1] if load.at_s is not None else 0.0) + REQUEST_S * turns
        told = [json.loads(process.line(last_s + GRACE_S)) for process in processes]
    finally:
        for process in processes:
            process.end()
    answers = [Answer(**answer) for each in told for answer in each["answers"]]
    wrong = [answer.error for answer in answers if answer.error]
    expected = sorted(zip(load.prompt_tokens, load.output_tokens, strict=True))
    counted = sorted((answer.prompt_tokens, answer.output_tokens) for answer in answers)
    if not wrong and counted != expected:
        differing = [pair for pair in zip(counted, expected, strict=True) if pair[0] != pair[1]]
        wrong.append(
            f"{len(differing)} answers have other numbers of tokens than were asked for: {differing[:3]}"
        )
    ended_s = max((answer.last_s for answer in answers), default=0.0)
    shares = [each["cpu_s"] / max(ended_s, 1e-9) for each in told]
    if max(shares) > BUSY_SHARE and ended_s > 1.0:
        wrong.append(f"a process of the client was busy for {max(shares):.0%} of the time")
    return answers, wrong


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, by distance; 0 where there is none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def tpot_s(answer: Answer) -> float | None:
    """Seconds a token after the first; None where there is no second."""
    return (
        (answer.last_s - answer.first_s) / (answer.output_tokens - 1)
        if answer.output_tokens > 1
        else None
    )


def is_good(answer: Answer) -> bool:
    """It kept both limits."""
    each_s = tpot_s(answer)
    first_ms = (answer.first_s - answer.sent_s) * 1e3
    return not answer.error and first_ms <= TTFT_MS and (each_s is None or each_s * 1e3 <= TPOT_MS)


def figures(answers: Sequence[Answer], rate_per_s: float | None = None) -> dict[str, Any]:
    """What is reported of a round: milliseconds, tokens and requests a second.

    Args:
        answers: of all processes.
        rate_per_s: with arrivals: how many requests came a second. Goodput is the share of good
            answers of it, so that neither the length of the last answers nor the luck of the
            arrivals counts.
    """
    whole = [answer for answer in answers if not answer.error]
    times = {
        "ttft_ms": [answer.first_s - answer.sent_s for answer in whole],
        "tpot_ms": [each_s for answer in whole if (each_s := tpot_s(answer)) is not None],
        "itl_ms": [gap_s for answer in whole for gap_s in answer.gaps_s],
    }
    found: dict[str, Any] = {
        f"{name}_{word}": round(percentile(values, share) * 1e3, 3)
        for name, values in times.items()
        for word, share in (("p50", 0.5), ("p99", 0.99))
    }
    tokens = sum(answer.output_tokens for answer in whole)
    took_s = max((answer.last_s for answer in whole), default=0.0) - min(
        (answer.sent_s for answer in whole), default=0.0
    )
    late_s = [
        answer.sent_s - answer.planned_s for answer in answers if answer.planned_s is not None
    ]
    found |= {
        "output_tokens_per_s": round(tokens / took_s, 1) if took_s > 0 else 0.0,
        "requests": len(answers),
        "failed": len(answers) - len(whole),
        "output_tokens": tokens,
        "tokens_per_event": round(tokens / max(1, sum(answer.events for answer in whole)), 3),
        "seconds": round(took_s, 3),
    }
    if rate_per_s is not None:
        share = sum(map(is_good, answers)) / max(1, len(answers))
        found |= {"good_share": round(share, 4), "goodput_per_s": round(share * rate_per_s, 3)}
        found["sent_late_ms_p99"] = round(percentile(late_s, 0.99) * 1e3, 3)
    return found


TOLD = (
    "output_tokens_per_s",
    "ttft_ms_p50",
    "tpot_ms_p50",
    "itl_ms_p99",
    "goodput_per_s",
    "seconds",
)
COLUMNS = (
    "sent_ms",
    "prompt_tokens",
    "ttft_ms",
    "output_tokens",
    "tpot_ms",
    "good",
    "longest_ms",
    "stretched",
)
STRETCHED_MS, STRETCHED_TIMES = 20.0, 2.0
"""A gap between texts that is longer is told with when it began: where a step held prompts, the
streams of that moment have one. Where clients ask in turn, one of so many times the median."""


def told(found: Mapping[str, Any]) -> str:
    """A round's figures for people."""
    return ", ".join(f"{key} {found[key]}" for key in TOLD if key in found)


def each(answers: Sequence[Answer]) -> dict[str, Any]:
    """What came of each request, in the order in which they were sent: why one was late can be
    looked for after the run.

    Times are milliseconds; ``sent_ms`` and the beginnings of stretched gaps since the row began.
    """
    in_turn = all(answer.planned_s is None for answer in answers)
    usual_s = percentile([gap_s for answer in answers for gap_s in answer.gaps_s], 0.5)
    stretched_ms = STRETCHED_TIMES * usual_s * 1e3 if in_turn else STRETCHED_MS
    rows: list[list[Any]] = []
    for answer in sorted(answers, key=lambda answer: answer.sent_s):
        ends_s = list(accumulate(answer.gaps_s, initial=answer.first_s))
        stretched = [
            [round(began_s * 1e3, 1), round(gap_s * 1e3, 1)]
            for began_s, gap_s in zip(ends_s, answer.gaps_s, strict=False)
            if gap_s * 1e3 > stretched_ms
        ]
        row = [
            round(answer.sent_s * 1e3, 1),
            answer.prompt_tokens,
            round((answer.first_s - answer.sent_s) * 1e3, 1),
            answer.output_tokens,
            round((tpot_s(answer) or 0.0) * 1e3, 3),
            is_good(answer),
            round(max(answer.gaps_s, default=0.0) * 1e3, 1),
            stretched,
        ]
        rows.append(row)
    return {"columns": COLUMNS, "stretched_ms": round(stretched_ms, 1), "rows": rows}
