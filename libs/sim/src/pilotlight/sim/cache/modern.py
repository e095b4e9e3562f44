"""The modern mix: hundreds of models of 0.5 to 140 GB, a Zipf law, arrivals as in Azure's traces.

Half of the models are asked for with the shape of conversations, half with that of code completion,
each model in proportion to its place in the Zipf law. Sizes are spread evenly in the logarithm and
do not depend on popularity.
"""

import itertools
import json
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest, Workload

MIN_SIZE_BYTES = 0.5e9
MAX_SIZE_BYTES = 140e9
START_S = 1.0
"""Of a load, whatever the size."""
FETCH_BYTES_PER_S = 2.4e9
"""From storage; single models differ by where they come from."""
SPREAD = 0.25
"""Standard deviation of the logarithm of a model's own factor on its load time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernMix:
    """What the mix is made with."""

    models: int = 500
    requests: int = 20_000
    """Sessions, where a session has more than one request."""
    zipf: float = 1.0
    hours: float = 1.0
    """The shapes are of an hour; they are repeated."""
    drift_s: float | None = None
    """After each such time a tenth of the models change places in the Zipf law; None: never."""
    requests_per_session: float = 1.0
    """In mean: a geometric number. A session stays with its model."""
    gap_s: float = 20.0
    """Between two requests of a session, in mean."""


def shapes() -> dict[str, list[int]]:
    """Arrivals in each ten seconds, by the name of the trace."""
    text = (
        resources.files("pilotlight.sim.cache").joinpath("arrival_shapes.json").read_text("utf-8")
    )
    read = json.loads(text)
    return {name: read[name] for name in ("conversations", "code")}


def modern_workload(seed: int, mix: ModernMix | None = None) -> Workload:
    """One workload of the mix; equal seeds give equal ones."""
    mix = ModernMix() if mix is None else mix
    rng = random.Random(f"modern/{seed}")
    models = [ModelName(f"m{number:03d}") for number in range(mix.models)]
    entries = {model: _entry(model, rng) for model in models}
    weights = [1.0 / (place + 1) ** mix.zipf for place in range(mix.models)]
    rng.shuffle(weights)
    duration_s = mix.hours * 3600.0
    period_s = duration_s if mix.drift_s is None else mix.drift_s
    shape = list(shapes().values())
    scale = mix.requests / duration_s / sum(weights)
    times = [
        _times(one, sum(weights[kind::2]) * scale * duration_s, duration_s, rng)
        for kind, one in enumerate(shape)
    ]
    phases: list[tuple[float, dict[ModelName, float]]] = []
    requests: list[TimedRequest] = []
    for number in range(math.ceil(duration_s / period_s)):
        if number:
            moved = rng.sample(range(mix.models), mix.models // 10)
            values = [weights[place] for place in moved]
            for place, value in zip(moved, values[1:] + values[:1], strict=True):
                weights[place] = value
        began_s, end_s = number * period_s, (number + 1) * period_s
        phases.append(
            (began_s, {one: weight * scale for one, weight in zip(models, weights, strict=True)})
        )
        for kind, all_times in enumerate(times):
            here = all_times[bisect_left(all_times, began_s) : bisect_left(all_times, end_s)]
            cumulative = list(itertools.accumulate(weights[kind::2]))
            drawn = rng.choices(models[kind::2], cum_weights=cumulative, k=len(here))
            requests += [TimedRequest(*each) for each in zip(here, drawn, strict=True)]
    if mix.requests_per_session > 1.0:
        requests = [one for first in requests for one in _session(first, mix, rng)]
    suffix = "" if mix.drift_s is None else f", drift {mix.drift_s:g} s"
    if mix.requests_per_session > 1.0:
        suffix += f", sessions of {mix.requests_per_session:g}"
    return Workload(
        name=f"modern{suffix}", catalogue=entries, requests=sorted(requests), true_rates=phases
    )


def _entry(model: ModelName, rng: random.Random) -> CatalogueEntry:
    log_size = rng.uniform(math.log(MIN_SIZE_BYTES), math.log(MAX_SIZE_BYTES))
    size_bytes = int(math.exp(log_size))
    load_s = START_S + size_bytes / FETCH_BYTES_PER_S * rng.lognormvariate(0.0, SPREAD)
    return CatalogueEntry(model=model, size_bytes=size_bytes, load_s=load_s)


def _session(first: TimedRequest, mix: ModernMix, rng: random.Random) -> list[TimedRequest]:
    """A request and those that follow it."""
    session = [first]
    while rng.random() > 1.0 / mix.requests_per_session:
        gap_s = rng.expovariate(1.0 / mix.gap_s)
        session.append(TimedRequest(session[-1].time_s + gap_s, first.model))
    return session


def _times(
    shape: Sequence[int], count: float, duration_s: float, rng: random.Random
) -> list[float]:
    """Times of arrivals whose density over time is the shape's, repeated each hour."""
    bin_s = 3600.0 / len(shape)
    bins = math.ceil(duration_s / bin_s)
    cumulative = list(itertools.accumulate(shape[number % len(shape)] for number in range(bins)))
    drawn = rng.choices(range(bins), cum_weights=cumulative, k=round(count))
    return sorted(min(duration_s, (number + rng.random()) * bin_s) for number in drawn)
