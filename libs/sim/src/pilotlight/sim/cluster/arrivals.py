"""When requests come, for which models, and how long they are.

Everything is drawn from generators with the scenario's seed, so equal seeds give equal requests,
whatever policy runs.
"""

import csv
import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.modern import shapes
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.scenario import (
    POPULAR,
    Application,
    Arrivals,
    BadScenario,
    Scenario,
)

MAX_TOKENS = 3500
"""Of a prompt, and of an output: both fit the KV that an instance has at least."""
STEP_S = 10.0
"""Of the shapes within the package."""
WARM_UP_GAPS = 20.0
"""Mean gaps of a model's process before a scenario begins."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A line of a recorded trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def model_name(application: Application, number: int) -> ModelName:
    """The name of one of an application's models."""
    return ModelName(f"{application.name}-{number:04d}")


def requests_of(scenario: Scenario, seed: int) -> Iterator[Request]:
    """All requests, in order of time."""
    names = [
        (model_name(one, number), one)
        for number in range(max(one.models for one in scenario.applications))
        for one in scenario.applications
        if number < one.models
    ]
    rng = random.Random(f"{scenario.name}/{seed}")
    weights = weights_of(scenario.arrivals, len(names))
    cumulative = list(itertools.accumulate(weights))
    lengths = random.Random(f"{scenario.name}/{seed}/lengths")
    models = random.Random(f"{scenario.name}/{seed}/models")
    for at_s, place, tokens in _arrivals(scenario.arrivals, weights, rng):
        if place is None:
            model, application = models.choices(names, cum_weights=cumulative)[0]
        else:
            model, application = names[place]
        if tokens is None:
            prompt = drawn_length(application.prompt_tokens, application.spread, lengths)
            output = drawn_length(application.output_tokens, application.spread, lengths)
        else:
            prompt, output = tokens
        yield Request(model, at_s, min(prompt, MAX_TOKENS), min(output, MAX_TOKENS))


def weights_of(arrivals: Arrivals, models: int) -> list[float]:
    """How popular each model is, the most popular first."""
    weights = [1.0 / (at + 1) ** arrivals.zipf for at in range(models)]
    if not arrivals.popularity:
        return weights
    share, of_requests = POPULAR[arrivals.popularity]
    head = max(1, round(share * models))
    if head >= models:
        return weights
    sums = sum(weights[:head]), sum(weights[head:])
    return [
        of_requests * weight / sums[0] if at < head else (1.0 - of_requests) * weight / sums[1]
        for at, weight in enumerate(weights)
    ]


def drawn_length(mean: int, spread: float, rng: random.Random) -> int:
    """Tokens, log-normal with a mean."""
    drawn = rng.lognormvariate(math.log(mean) - spread * spread / 2, spread)
    return max(1, round(drawn))


Times = Iterator[tuple[float, int | None, tuple[int, int] | None]]
"""When, for which model by its place in the line of popularity, and tokens of prompt and output;
None where that is yet to be drawn."""


def _arrivals(arrivals: Arrivals, weights: Sequence[float], rng: random.Random) -> Times:
    if arrivals.kind == "gamma":
        total = sum(weights)
        yield from heapq.merge(
            *(
                _gamma(arrivals, place, arrivals.per_s * weight / total, rng.random())
                for place, weight in enumerate(weights)
            )
        )
    elif arrivals.kind == "poisson":
        yield from _bursts(replace(arrivals, burst_factor=1.0), rng)
    elif arrivals.kind == "burst":
        yield from _bursts(arrivals, rng)
    elif arrivals.trace in shapes():
        yield from _shaped(shapes()[arrivals.trace], arrivals, rng)
    else:
        yield from _scaled(read_trace(Path(arrivals.trace)), arrivals, rng)


def _gamma(arrivals: Arrivals, place: int, per_s: float, seed: float) -> Times:
    """One model's requests: gaps of a Gamma law with a coefficient of variation, as the paper and
    those before it sample a trace. It has gone on for a while when the scenario begins.
    """
    rng = random.Random(seed)
    shape = 1.0 / (arrivals.cv * arrivals.cv)
    at_s = -WARM_UP_GAPS / per_s
    while True:
        at_s += rng.gammavariate(shape, 1.0 / (per_s * shape))
        if at_s >= arrivals.duration_s:
            return
        if at_s >= 0.0:
            yield at_s, place, None


def _bursts(arrivals: Arrivals, rng: random.Random) -> Times:
    """A Poisson process whose rate is multiplied for some seconds, at even distances."""
    every_s = arrivals.duration_s / (arrivals.bursts + 1)
    highest = arrivals.per_s * max(1.0, arrivals.burst_factor)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(highest)
        if at_s >= arrivals.duration_s:
            return
        since_s = at_s % every_s
        bursting = at_s >= every_s and since_s < arrivals.burst_s
        rate = arrivals.per_s * (arrivals.burst_factor if bursting else 1.0)
        if rng.random() * highest < rate:
            yield at_s, None, None


def _shaped(shape: Sequence[int], arrivals: Arrivals, rng: random.Random) -> Times:
    """A Poisson process whose rate follows a shape, which is repeated."""
    mean = sum(shape) / len(shape)
    for number in itertools.count():
        began_s = number * STEP_S
        if began_s >= arrivals.duration_s:
            return
        rate = arrivals.per_s * shape[number % len(shape)] / mean
        at_s = began_s
        while rate > 0:
            at_s += rng.expovariate(rate)
            if at_s >= min(began_s + STEP_S, arrivals.duration_s):
                break
            yield at_s, None, None


def _scaled(trace: Sequence[Traced], arrivals: Arrivals, rng: random.Random) -> Times:
    """A trace with its temporal shape, thinned or repeated to a rate; it begins anew at its end."""
    length_s = trace[-1].at_s + 1e-3
    factor = arrivals.per_s * length_s / len(trace)
    for number in itertools.count():
        for one in trace:
            at_s = number * length_s + one.at_s
            if at_s >= arrivals.duration_s:
                return
            copies = int(factor) + (rng.random() < factor % 1.0)
            for _ in range(copies):
                yield at_s, None, (max(1, one.prompt_tokens), max(1, one.output_tokens))


def read_trace(file: Path) -> list[Traced]:
    """A trace of Azure's (CSV) or Mooncake's (lines of JSON), from its first request on.

    Raises:
        BadScenario: it cannot be read, is another format, or is empty.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            first = lines.readline()
            if first.startswith("{"):
                read = [_mooncake(json.loads(line)) for line in (first, *lines)]
            else:
                read = [_azure(row) for row in csv.DictReader((first, *lines))]
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadScenario(f"the trace {file} cannot be read: {error}") from error
    if not read:
        raise BadScenario(f"the trace {file} is empty")
    read.sort(key=lambda one: one.at_s)
    began_s = read[0].at_s
    return [Traced(one.at_s - began_s, one.prompt_tokens, one.output_tokens) for one in read]


def _azure(row: Mapping[str, str]) -> Traced:
    moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
    return Traced(moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(row: Mapping[str, int]) -> Traced:
    return Traced(row["timestamp"] / 1000, row["input_length"], row["output_length"])
