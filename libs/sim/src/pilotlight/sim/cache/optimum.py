"""The exact offline optimum for a handful of models, by dynamic programming over sets of them."""

from collections.abc import Mapping, Sequence

from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest

MAX_MODELS = 12
"""4,096 sets."""


def least_load_s(
    requests: Sequence[TimedRequest],
    catalogue: Mapping[ModelName, CatalogueEntry],
    capacity_bytes: int,
) -> float:
    """Seconds of loads, first ones among them, of the best that a policy could do that knew every
    request ahead.

    A set of models is a number, with a bit for each. After a request the set holds its model and
    fits. On a hit nothing changes. On a miss the new set is the model and a part of the old set
    that fits beside it; of these only the largest count: what is kept can go later at no cost.

    Args:
        requests: In order of time.
        catalogue: Of at most ``MAX_MODELS`` models. One that is larger than the cache is loaded for
            each of its requests, beside the cache.
        capacity_bytes: Of the cache.

    Raises:
        ValueError: too many models.
    """
    models = list(catalogue)
    if len(models) > MAX_MODELS:
        raise ValueError(f"{len(models)} models, at most {MAX_MODELS} are possible")
    sizes = [catalogue[model].size_bytes for model in models]
    places = {model: place for place, model in enumerate(models)}
    weights = [
        sum(size for place, size in enumerate(sizes) if held >> place & 1)
        for held in range(1 << len(models))
    ]
    after: dict[tuple[int, int], tuple[int, ...]] = {}
    best: dict[int, float] = {0: 0.0}
    beside_s = 0.0
    for request in requests:
        place = places[request.model]
        cost_s = catalogue[request.model].load_s
        if sizes[place] > capacity_bytes:
            beside_s += cost_s
            continue
        new: dict[int, float] = {}
        for held, spent_s in best.items():
            if held >> place & 1:
                if spent_s < new.get(held, float("inf")):
                    new[held] = spent_s
                continue
            key = (held, place)
            if key not in after:
                after[key] = _largest(held, 1 << place, weights, capacity_bytes)
            for one in after[key]:
                if spent_s + cost_s < new.get(one, float("inf")):
                    new[one] = spent_s + cost_s
        best = new
    return beside_s + min(best.values())


def _largest(held: int, added: int, weights: Sequence[int], capacity_bytes: int) -> tuple[int, ...]:
    """The largest sets of what is held, and what is added, that fit."""
    fitting: list[int] = []
    part = held
    while True:
        if weights[part | added] <= capacity_bytes and not any(
            part | added == (part | added) & larger for larger in fitting
        ):
            fitting.append(part | added)
        if part == 0:
            return tuple(fitting)
        part = (part - 1) & held
