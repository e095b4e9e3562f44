"""What a cache simulation runs on: a catalogue of models, and requests for them."""

import csv
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pilotlight.policy.ids import ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model: what it takes, and what a miss costs."""

    model: ModelName
    size_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True, order=True)
class TimedRequest:
    """One request."""

    time_s: float
    model: ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order of time, and what only a generator knows."""

    name: str
    catalogue: Mapping[ModelName, CatalogueEntry]
    requests: Sequence[TimedRequest]
    true_rates: Sequence[tuple[float, Mapping[ModelName, float]]] = field(
        default_factory=tuple[tuple[float, Mapping[ModelName, float]], ...]
    )
    """From when on, and how often each model is asked for from then on; empty where not known."""

    @property
    def total_bytes(self) -> int:
        """Of all models in the catalogue."""
        return sum(one.size_bytes for one in self.catalogue.values())


class BadWorkload(ValueError):
    """A trace or a catalogue cannot be used; says where and why."""


def read_catalogue(lines: Iterable[str]) -> dict[ModelName, CatalogueEntry]:
    """A catalogue of CSV with the columns model, size_bytes, load_s.

    Raises:
        BadWorkload: it is no such CSV, is empty, or names a model twice.
    """
    entries: dict[ModelName, CatalogueEntry] = {}
    for number, row in _rows(lines, ("model", "size_bytes", "load_s"), "catalogue"):
        size_bytes, load_s = int(_number(row[1], number)), _number(row[2], number)
        if size_bytes <= 0 or load_s < 0.0:
            raise BadWorkload(f"catalogue, line {number}: a size above 0 and a time are needed")
        name = ModelName(row[0])
        if name in entries:
            raise BadWorkload(f"catalogue, line {number}: {name} is there already")
        entries[name] = CatalogueEntry(model=name, size_bytes=size_bytes, load_s=load_s)
    if not entries:
        raise BadWorkload("the catalogue is empty")
    return entries


def read_trace(
    lines: Iterable[str], catalogue: Mapping[ModelName, CatalogueEntry]
) -> list[TimedRequest]:
    """Requests of CSV with the columns time_s, model, brought into order of time.

    Raises:
        BadWorkload: it is no such CSV, is empty, or names a model that the catalogue lacks.
    """
    requests: list[TimedRequest] = []
    for number, row in _rows(lines, ("time_s", "model"), "trace"):
        model = ModelName(row[1])
        if model not in catalogue:
            raise BadWorkload(f"trace, line {number}: {model} is not in the catalogue")
        requests.append(TimedRequest(_number(row[0], number), model))
    if not requests:
        raise BadWorkload("the trace is empty")
    return sorted(requests, key=lambda one: one.time_s)


def draw(weights: Mapping[ModelName, float], count: int, rng: random.Random) -> list[ModelName]:
    """Models drawn independently, in proportion to their weights."""
    models = list(weights)
    cumulative = list(itertools.accumulate(weights.values()))
    return rng.choices(models, cum_weights=cumulative, k=count)


def _rows(
    lines: Iterable[str], columns: Sequence[str], what: str
) -> Iterable[tuple[int, list[str]]]:
    """Rows with their line's number, as the columns are asked for."""
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader, list[str]())]
    missing = [name for name in columns if name not in header]
    if missing:
        raise BadWorkload(f"{what}: the first line must name {', '.join(columns)}")
    places = [header.index(name) for name in columns]
    for row in reader:
        if not row:
            continue
        if len(row) < len(header):
            raise BadWorkload(f"{what}, line {reader.line_num}: {len(header)} columns are needed")
        yield reader.line_num, [row[place].strip() for place in places]


def _number(text: str, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadWorkload(f"line {line}: {text!r} is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise BadWorkload(f"line {line}: {text!r} is not a finite number")
    return value
