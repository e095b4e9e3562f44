"""``pilotlight bench``: ask a model many times, at a rate or so many at once, and say what clients
saw.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pilotlight.cli.chat_stream import AnswerLines, Counted, Text
from pilotlight.cli.client import SystemNotRunning, error_from
from pilotlight.cli.inference import DEADLINE_S, Access
from pilotlight.cli.load_figures import Sample, figures
from pilotlight.cli.load_prompts import WORDS, Prompt, arrivals, random_prompts, sharegpt_prompts
from pilotlight.cli.output import console, emit_json, errors, print_whole
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.errors import (
    DeadlineExceeded,
    FolderUnusable,
    PilotlightError,
    TransientError,
)
from pilotlight.common.waiting import pause

MAX_LATE_MS = 100.0
"""Of the 99th percentile; a client that is later measures itself."""
TIMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between texts",
    "e2el": "whole answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A load test."""

    model: str
    requests: int
    concurrency: int
    """Requests at a time, at most."""
    rate_per_s: float | None
    """Of Poisson's arrivals; None: the next as soon as one has ended."""
    input_tokens: int
    output_tokens: int | None
    """Of each answer; None: as the data set has it."""
    sharegpt: Path | None
    """Where prompts come from; None: they are random."""
    ignore_eos: bool
    """Answers are exactly as long as they may be."""
    temperature: float
    timeout_s: float
    """Of one request."""
    seed: int
    warm: bool
    """Ask once before, and do not count it: a cold start is not what is measured."""


async def run_load(access: Access, plan: Plan, *, as_json: bool, save: Path | None) -> int:
    """Run it, and say what came of it; 1 when requests failed.

    Args:
        access: Where and with which key.
        plan: What is asked.
        as_json: Print JSON in place of a table.
        save: Write the JSON into this file, too.

    Raises:
        PilotlightError: nothing could be asked.
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=plan.concurrency)
    timeout = httpx2.Timeout(plan.timeout_s, connect=DEADLINE_S)
    async with httpx2.AsyncClient(
        base_url=access.url, headers=access.headers, limits=limits, timeout=timeout
    ) as http:
        load = Load(http, plan, SystemClock())
        prompts = await load.prompts()
        if plan.warm:
            await load.answered(prompts[0], Sample())
        quiet = as_json or not errors.is_terminal
        with _bar(plan, quiet=quiet) as progress:
            task = progress.add_task("", total=plan.requests)
            samples = await load.run(prompts, lambda: progress.advance(task))
    asked = {
        "model": plan.model,
        "concurrency": plan.concurrency,
        "rate_per_s": plan.rate_per_s,
        "dataset": "random" if plan.sharegpt is None else plan.sharegpt.name,
        "seed": plan.seed,
    }
    found: dict[str, Any] = {**asked, **figures(samples)}
    if save is not None:
        _save(save, found)
    if as_json:
        emit_json(found)
    else:
        print_whole(_table(found))
        if found["sent_late_ms_p99"] > MAX_LATE_MS:
            console.print(
                f"requests were sent late, by up to {found['sent_late_ms_p99']:,.0f} ms: raise --max-concurrency, or use more machines",
                style="yellow",
                soft_wrap=True,
            )
        for error in found["errors"]:
            console.print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
    return 1 if found["failed"] else 0


class Load:
    """Asks, and keeps what came of it."""

    def __init__(self, http: httpx2.AsyncClient, plan: Plan, clock: Clock) -> None:
        self._http = http
        self._plan = plan
        self._clock = clock
        self._began_s = clock.monotonic_s()

    async def prompts(self) -> list[Prompt]:
        """What will be asked.

        Raises:
            PilotlightError: the gateway does not answer, or the file has no prompts.
        """
        plan, rng = self._plan, random.Random(self._plan.seed)
        if plan.sharegpt is not None:
            return sharegpt_prompts(plan.sharegpt, plan.requests, plan.output_tokens, rng)
        tokens = await self._tokens()
        output_tokens = plan.output_tokens or 128
        return random_prompts(plan.requests, plan.input_tokens, output_tokens, tokens, rng)

    async def _tokens(self) -> list[int]:
        """Tokens that the model has for ordinary words."""
        body = {"model": self._plan.model, "prompt": WORDS, "add_special_tokens": False}
        try:
            response = await self._http.post("/tokenize", json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise SystemNotRunning(f"cannot reach {self._http.base_url}: {error}") from error
        if response.status_code >= 400:
            raise error_from(response)
        return sorted(set(response.json()["tokens"]))

    async def run(self, prompts: Sequence[Prompt], done: Any) -> list[Sample]:
        """Ask all of them, in order.

        Each of ``concurrency`` tasks takes the next prompt when it has its answer; at a rate it
        waits until the prompt is due. ``done`` is called after each.
        """
        plan = self._plan
        at_s: list[float | None] = [None] * len(prompts)
        if plan.rate_per_s is not None:
            at_s = [*arrivals(len(prompts), plan.rate_per_s, random.Random(plan.seed))]
        todo = iter(list(zip(prompts, at_s, strict=True)))
        samples: list[Sample] = []
        self._began_s = self._clock.monotonic_s()

        async def ask_on() -> None:
            for prompt, planned_s in todo:
                if planned_s is not None:
                    await pause(max(0.0, planned_s - self._now_s()))
                samples.append(await self.ask(prompt, planned_s))
                done()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(plan.concurrency, len(prompts))):
                group.create_task(ask_on())
        return samples

    async def ask(self, prompt: Prompt, planned_s: float | None = None) -> Sample:
        """Ask once. What fails is told in the sample."""
        sample = Sample(planned_s=planned_s, sent_s=self._now_s())
        try:
            await self.answered(prompt, sample)
        except PilotlightError as error:
            sample.error = f"{error.code}: {error.message}"
        return sample

    async def answered(self, prompt: Prompt, sample: Sample) -> None:
        """Ask once, and write down when what came.

        Raises:
            PilotlightError: there is no answer, or not all of it.
        """
        path, body = self._request(prompt)
        try:
            async with (
                asyncio.timeout(self._plan.timeout_s),
                self._http.stream("POST", path, json=body) as response,
            ):
                if response.status_code >= 400:
                    await response.aread()
                    raise error_from(response)
                sample.cold = response.headers.get("x-pilotlight-cold-start") == "true"
                await self._read(response, sample)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise DeadlineExceeded(f"no whole answer within {self._plan.timeout_s:g} s") from error
        except httpx2.HTTPError as error:
            raise TransientError(f"the connection broke: {type(error).__name__}") from error

    async def _read(self, response: httpx2.Response, sample: Sample) -> None:
        lines = AnswerLines()
        async for line in response.aiter_lines():
            for part in lines.read(line):
                if isinstance(part, Text):
                    sample.text(self._now_s())
                elif isinstance(part, Counted):
                    sample.prompt_tokens = part.prompt_tokens
                    sample.output_tokens = part.output_tokens
        if not lines.ended:
            raise TransientError("the answer ended before its end was told")
        if sample.first_s is None:
            # Tokens without a text, as special ones are.
            sample.last_s = self._now_s()

    def _request(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._plan.model,
            "max_tokens": prompt.output_tokens,
            "temperature": self._plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._plan.ignore_eos:
            body["ignore_eos"] = True
        if isinstance(prompt.asked, str):
            body["messages"] = [{"role": "user", "content": prompt.asked}]
            return "/v1/chat/completions", body
        return "/v1/completions", {**body, "prompt": prompt.asked}

    def _now_s(self) -> float:
        return self._clock.monotonic_s() - self._began_s


def _bar(plan: Plan, *, quiet: bool) -> Progress:
    return Progress(
        TextColumn(f"asking {escape(plan.model)}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=quiet,
    )


def _save(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise FolderUnusable(f"cannot write {path}: {error.strerror}") from error


def _table(found: dict[str, Any]) -> Table:
    rate = (
        f"{found['concurrency']} at a time"
        if found["rate_per_s"] is None
        else f"{found['rate_per_s']:g} a second"
    )
    console.print(
        f"[bold]{escape(found['model'])}[/]: {found['requests']} requests ({found['dataset']}), "
        f"{rate}, in {found['took_s']:,.1f} s; "
        f"{found['failed']} failed, {found['cold']} cold",
        soft_wrap=True,
    )
    console.print(
        f"{found['requests_per_s']:,.2f} requests/s, {found['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{found['tokens_per_s']:,.1f} tokens/s with {found['prompt_tokens']:,} of prompts",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ms")
    columns = list(found["ttft_ms"])
    for column in columns:
        table.add_column(column, justify="right")
    for name, told in TIMES.items():
        spread = found[f"{name}_ms"]
        table.add_row(f"{name.upper()}, {told}", *(f"{spread[column]:,.1f}" for column in columns))
    return table
