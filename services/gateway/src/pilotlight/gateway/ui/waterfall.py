"""Waterfalls: the phases of a cold start, or the spans of a trace, as rows of bars on one axis.

Pure: records as the database has them in, positions in per cent out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pilotlight.policy.coverage import union
from pilotlight.policy.phase import first_layer

MIN_WIDTH_PERCENT = 0.15
"""So that what took a moment can be seen."""
TICKS = 5
PROCESS_ORDER = ("gateway", "scheduler", "cache", "loader", "worker")
_ROUND_S = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One interval."""

    left_percent: float
    width_percent: float
    title: str
    open: bool = False
    """It goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bars that belong together."""

    process: str
    name: str
    kind: str
    """Which colour."""
    total_s: float
    bars: tuple[Bar, ...]
    note: str = ""
    depth: int = 0
    lane: "Lane | None" = None
    """None: it is of no stage alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A stage of a group, and where it is."""

    title: str
    node_id: str = ""
    """Empty: that is not known any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of the axis."""

    at_percent: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A waterfall."""

    rows: tuple[Row, ...]
    length_s: float
    ticks: tuple[Tick, ...]
    first_token_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A piece of work on the wall clock."""

    process: str
    name: str
    start_s: float
    end_s: float
    detail: str = ""
    open: bool = False
    lane: str = ""
    """The layers of the stage that it is of, where several workers share a start."""


def of_cold_start(
    record: Mapping[str, Any],
    going_on: Iterable[Interval] = (),
    placements: Sequence[Mapping[str, Any]] = (),
) -> Chart:
    """The waterfall of a cold start, as the admin API shows its record.

    Times of several hosts are laid on one axis by their differences from the wall clock.

    Args:
        record: the cold start.
        going_on: what goes on now and is in no record yet.
        placements: of its decision; none, where that is not known.
    """
    intervals = [
        Interval(
            process=phase["process"],
            name=phase["name"],
            start_s=phase["start_s"] + phase["wall_offset_s"],
            end_s=phase["end_s"] + phase["wall_offset_s"],
            detail=phase["detail"],
            lane=phase.get("lane", ""),
        )
        for phase in record["phases"]
    ]
    intervals += going_on
    first_token_s = None
    if record["first_token_s"] is not None and record["wall_offset_s"] is not None:
        first_token_s = record["first_token_s"] + record["wall_offset_s"]
    return chart_of(intervals, first_token_s, lanes_of(placements))


def layers_of(placement: Mapping[str, Any]) -> str:
    """The layers of a placement, as phases name their lane."""
    return f"{placement['stage']['start']}-{placement['stage']['stop']}"


def lanes_of(placements: Sequence[Mapping[str, Any]]) -> dict[str, Lane]:
    """The stages of a group by their layers; none for one worker alone."""
    if len(placements) < 2:
        return {}
    stages = sorted(placements, key=lambda placement: placement["stage"]["start"])
    return {
        layers: Lane(
            title=f"Stage {number} of {len(stages)}, layers {layers}", node_id=one["node_id"]
        )
        for number, one in enumerate(stages, 1)
        for layers in (layers_of(one),)
    }


def lane_of_node(placements: Sequence[Mapping[str, Any]], node_id: str) -> str | None:
    """In which lane a node's loader is: in none (empty) where the node has several stages, or the
    only one. None: the node has no part in the start.
    """
    layers = [layers_of(one) for one in placements if one["node_id"] == node_id]
    if not layers:
        return None
    return layers[0] if len(layers) == 1 and len(placements) > 1 else ""


def chart_of(
    intervals: Sequence[Interval],
    first_token_s: float | None = None,
    lanes: Mapping[str, Lane] | None = None,
) -> Chart:
    """Rows by process and name, processes in the order of a request's way, names by first start;
    then those of each stage, in the order of layers, where several workers share a start.

    Args:
        intervals: in any order.
        first_token_s: when the first token left.
        lanes: what is known of the stages.
    """
    known = lanes or {}
    if not intervals:
        return Chart(rows=(), length_s=0.0, ticks=())
    origin_s = min(one.start_s for one in intervals)
    ends = [one.end_s for one in intervals] + ([first_token_s] if first_token_s else [])
    length_s = max(max(ends) - origin_s, 1e-6)
    grouped: dict[tuple[str, str, str], list[Interval]] = {}
    for one in sorted(intervals, key=lambda interval: interval.start_s):
        grouped.setdefault((one.lane, one.process, one.name), []).append(one)
    rows = [
        replace(
            _row(process, name, group, origin_s, length_s),
            lane=known.get(lane, Lane(title=f"Layers {lane}")) if lane else None,
        )
        for (lane, process, name), group in sorted(grouped.items(), key=lambda pair: _order(*pair))
    ]
    return Chart(
        rows=tuple(rows),
        length_s=length_s,
        ticks=ticks_of(length_s),
        first_token_percent=None
        if first_token_s is None
        else 100 * (first_token_s - origin_s) / length_s,
    )


def of_spans(spans: Sequence[Mapping[str, Any]]) -> Chart:
    """The waterfall of a trace: a row for each span, children below their parents."""
    if not spans:
        return Chart(rows=(), length_s=0.0, ticks=())
    times = {
        span["span_id"]: (_unix_s(span["start_at"]), _unix_s(span["end_at"])) for span in spans
    }
    origin_s = min(start for start, _ in times.values())
    length_s = max(max(end for _, end in times.values()) - origin_s, 1e-6)
    children: dict[str, list[Mapping[str, Any]]] = {}
    for span in spans:
        parent = span["parent_id"] if span["parent_id"] in times else ""
        children.setdefault(parent, []).append(span)
    rows: list[Row] = []
    # A stack in the place of recursion: a trace may be deeper than Python's own.
    ahead = [(span, 0) for span in reversed(children.get("", []))]
    while ahead:
        span, depth = ahead.pop()
        start_s, end_s = times[span["span_id"]]
        attributes = ", ".join(f"{name} {value}" for name, value in span["attributes"].items())
        bar = _bar(start_s, end_s, attributes, origin_s, length_s)
        rows.append(
            Row(
                process=span["service"],
                name=span["name"],
                kind=f"service-{span['service']}",
                total_s=end_s - start_s,
                bars=(bar,),
                note="" if span["status"] == "ok" else span["status"],
                depth=depth,
            )
        )
        ahead += [(child, depth + 1) for child in reversed(children.get(span["span_id"], []))]
    return Chart(rows=tuple(rows), length_s=length_s, ticks=ticks_of(length_s))


def ticks_of(length_s: float) -> tuple[Tick, ...]:
    """Round marks, at most ``TICKS`` and the origin."""
    step_s = 10.0**-9
    while length_s / step_s > TICKS:
        fits = [step_s * factor for factor in _ROUND_S if length_s / (step_s * factor) <= TICKS]
        step_s = fits[0] if fits else step_s * 10
    count = int(length_s / step_s)
    return tuple(
        Tick(at_percent=100 * number * step_s / length_s, at_s=number * step_s)
        for number in range(count + 1)
    )


def _row(
    process: str, name: str, group: Sequence[Interval], origin_s: float, length_s: float
) -> Row:
    bars = tuple(
        _bar(one.start_s, one.end_s, one.detail, origin_s, length_s, going_on=one.open)
        for one in group
    )
    details = dict.fromkeys(one.detail for one in group if one.detail)
    return Row(
        process=process,
        name=name,
        kind=f"phase-{name}",
        total_s=sum(end - start for start, end in union((g.start_s, g.end_s) for g in group)),
        bars=bars,
        note=", ".join(details),
    )


def _bar(
    start_s: float,
    end_s: float,
    detail: str,
    origin_s: float,
    length_s: float,
    *,
    going_on: bool = False,
) -> Bar:
    """An interval on the axis.

    Args:
        start_s: when it began, on the axis's clock.
        end_s: when it ended, or now.
        detail: what else is known of it.
        origin_s: where the axis begins.
        length_s: how long the axis is.
        going_on: it has not ended.
    """
    left = 100 * (start_s - origin_s) / length_s
    width = max(MIN_WIDTH_PERCENT, 100 * (end_s - start_s) / length_s)
    span = f"{1000 * (start_s - origin_s):,.1f} to {1000 * (end_s - origin_s):,.1f} ms"
    return Bar(
        left_percent=round(min(left, 100 - MIN_WIDTH_PERCENT), 3),
        width_percent=round(width, 3),
        title=f"{span} ({1000 * (end_s - start_s):,.1f} ms) {detail}".strip(),
        open=going_on,
    )


def _order(key: tuple[str, str, str], group: Sequence[Interval]) -> tuple[int, int, str, float]:
    lane, process, _ = key
    known = PROCESS_ORDER.index(process) if process in PROCESS_ORDER else len(PROCESS_ORDER)
    return first_layer(lane), known, process, group[0].start_s


def _unix_s(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
