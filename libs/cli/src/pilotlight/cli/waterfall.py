"""A cold start as a waterfall in the terminal: one row a phase, on one time axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pilotlight.policy.coverage import union
from pilotlight.policy.phase import first_layer

LABELS_WIDTH = 36
"""Columns before the axis: phase, process, milliseconds."""
MIN_WIDTH = 20
COLOURS = {
    "queue": "bright_black",
    "schedule": "magenta",
    "dispatch": "magenta",
    "fetch": "blue",
    "init": "cyan",
    "load": "green",
    "convert": "green",
    "restore": "cyan",
    "activate": "magenta",
    "submit": "magenta",
    "prefill": "yellow",
    "deliver": "red",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """The intervals of one phase in one process, in seconds from the start of the axis."""

    name: str
    process: str
    intervals: tuple[tuple[float, float], ...]
    lane: str = ""
    """The layers of the stage that it is of, where several workers share a start."""

    @property
    def total_s(self) -> float:
        """Time within the intervals."""
        return sum(end - start for start, end in self.intervals)


def is_whole(cold_start: Mapping[str, Any]) -> bool:
    """Whether a cold start of the admin API has its first token and all of its phases.

    Reports are apart: the gateway's of the first token may come before the worker's last one, of
    the prefill that gave it. That one alone says how many tokens it ran.
    """
    return cold_start["status"] == "done" and any(
        phase["name"] == "prefill" and phase["tokens"] > 0 for phase in cold_start["phases"]
    )


def bars_of(phases: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
    """Group phases (as the admin API gives them) into bars, by first start, those of each stage of
    a group together; times of several hosts are laid on one axis.
    """
    if not phases:
        return ()
    origin_s = min(phase["start_s"] + phase["wall_offset_s"] for phase in phases)
    grouped: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for phase in phases:
        shift_s = phase["wall_offset_s"] - origin_s
        grouped.setdefault((phase["name"], phase["process"], phase.get("lane", "")), []).append(
            (phase["start_s"] + shift_s, phase["end_s"] + shift_s)
        )
    bars = [
        Bar(name, process, tuple(sorted(intervals)), lane)
        for (name, process, lane), intervals in grouped.items()
    ]
    return tuple(
        sorted(bars, key=lambda bar: (first_layer(bar.lane), bar.intervals[0][0], bar.name))
    )


def seconds_within(bars: Sequence[Bar], name: str, outer: str) -> float:
    """Seconds of one phase while another was going on, somewhere."""
    inside, around = (
        union(interval for bar in bars if bar.name == one for interval in bar.intervals)
        for one in (name, outer)
    )
    return sum(
        max(0.0, min(end, stop) - max(start, begin))
        for start, end in inside
        for begin, stop in around
    )


def draw(cold_start: Mapping[str, Any], console_width: int) -> RenderableType:
    """Render one cold start of the admin API, as wide as the console."""
    width = max(MIN_WIDTH, console_width - LABELS_WIDTH)
    bars = bars_of(cold_start["phases"])
    span_s = max((bar.intervals[-1][1] for bar in bars), default=0.0) or 1.0
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column("phase")
    table.add_column("by")
    table.add_column("ms", justify="right")
    end = f"{span_s * 1000:,.0f} ms"
    table.add_column(f"0 {'─' * (width - len(end) - 3)} {end}", no_wrap=True)
    for bar in bars:
        row = Text(_strip(bar, span_s, width), style=COLOURS.get(bar.name, "white"))
        table.add_row(
            bar.name, f"{bar.process} {bar.lane}".strip(), f"{bar.total_s * 1000:,.1f}", row
        )
    ttft = cold_start.get("ttft_s")
    coverage = cold_start.get("coverage")
    summary = (
        f"first token after {ttft * 1000:,.0f} ms" if ttft is not None else "no first token yet"
    )
    if coverage is not None:
        summary += f"; the phases explain {coverage:.1%} of the time from the first command to it"
    return Group(table, Text(summary, style="bold"))


def _strip(bar: Bar, span_s: float, width: int) -> str:
    cells = [" "] * width
    for start, end in bar.intervals:
        first = min(width - 1, int(start / span_s * width))
        last = min(width - 1, int(end / span_s * width))
        for cell in range(first, max(first, last) + 1):
            cells[cell] = "█"
    return "".join(cells)
