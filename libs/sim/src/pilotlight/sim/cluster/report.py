"""A comparison as one HTML file, with its plots in it: nothing else has to be there to read it."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from html import escape

from pilotlight.sim.cluster.results import Result
from pilotlight.sim.cluster.scenario import Scenario

WIDTH, HEIGHT, EDGE = 720, 320, 48
COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#3a7d44", "#7d5ba6", "#5c4b3c", "#2a9d8f")
POINTS = 200
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #ddd; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: #444; }
"""


def report(scenario: Scenario, results: Sequence[Result], seed: int) -> str:
    """The page.

    Args:
        scenario: What was run.
        results: Of each contender.
        seed: Of the requests.
    """
    arrivals = scenario.arrivals
    devices = sum(one.count * one.devices for one in scenario.nodes)
    models = sum(one.models for one in scenario.applications)
    head = (
        f"{models} models on {devices} devices of {sum(one.count for one in scenario.nodes)} nodes; "
        f"{arrivals.kind} arrivals, {arrivals.per_s:g} a second for {arrivals.duration_s:g} s, "
        f"seed {seed}; SLOs times {scenario.slo_scale:g}."
    )
    title = escape(f"{scenario.name}: {', '.join(one.policy for one in results)}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{STYLE}</style><h1>{escape(scenario.name)}</h1><p>{escape(head)}</p>"
        f"{_table(results)}<h2>Time to first token</h2>"
        "<p>Share of requests whose first token came within a time.</p>"
        f"{_distribution(results)}<h2>Attainment by application</h2>"
        "<p>Share of requests whose first token came within its SLO.</p>"
        f"{_by_application(results)}</html>\n"
    )


def _table(results: Sequence[Result]) -> str:
    columns = (
        "policy", "TTFT attained", "TPOT attained", "TTFT p50", "TTFT p99", "device seconds",
        "starts", "stages", "requests",
    )  # fmt: skip
    rows = [
        (
            one.policy,
            f"{one.ttft_attainment:.3f}",
            f"{one.tpot_attainment:.3f}",
            f"{one.ttft_p50_s:.2f} s",
            f"{one.ttft_p99_s:.2f} s",
            f"{one.device_seconds:.0f}",
            str(one.starts),
            str(one.stages),
            str(one.requests),
        )
        for one in results
    ]
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _distribution(results: Sequence[Result]) -> str:
    """Distribution functions, over a logarithmic axis."""
    all_s = [value for one in results for value in (one.ttfts_s[:1] or [1.0])[:1]]
    low = max(1e-3, min(all_s, default=1e-3))
    high = max([one.ttfts_s[-1] for one in results if one.ttfts_s], default=1.0)
    decades = max(1e-9, math.log10(max(high, 2 * low) / low))

    def across(value_s: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * math.log10(max(value_s, low) / low) / decades

    parts = [_frame("seconds")]
    tick = 10.0 ** math.ceil(math.log10(low))
    while tick <= high:
        x = across(tick)
        parts.append(
            f"<line x1={x:.1f} x2={x:.1f} y1={EDGE} y2={HEIGHT - EDGE} stroke=#eee />"
            f"<text x={x:.1f} y={HEIGHT - EDGE + 16} text-anchor=middle>{tick:g}</text>"
        )
        tick *= 10
    for number, one in enumerate(results):
        points: list[str] = []
        for at in range(POINTS + 1):
            value_s = low * 10 ** (decades * at / POINTS)
            share = bisect_right(one.ttfts_s, value_s) / max(1, one.requests)
            y = HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * share
            points.append(f"{across(value_s):.1f},{y:.1f}")
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill=none stroke={colour} stroke-width=2 />'
        )
    return _svg([*parts, *_legend([one.policy for one in results])])


def _by_application(results: Sequence[Result]) -> str:
    names = [one.name for one in results[0].applications] if results else []
    parts = [_frame("")]
    wide = (WIDTH - 2 * EDGE) / max(1, len(names))
    bar = 0.8 * wide / max(1, len(results))
    for place, name in enumerate(names):
        left = EDGE + place * wide + 0.1 * wide
        for number, one in enumerate(results):
            tall = (HEIGHT - 2 * EDGE) * one.applications[place].ttft_attainment
            parts.append(
                f"<rect x={left + number * bar:.1f} y={HEIGHT - EDGE - tall:.1f} width={bar:.1f} "
                f"height={tall:.1f} fill={COLOURS[number % len(COLOURS)]} />"
            )
        parts.append(
            f"<text x={left + 0.4 * wide:.1f} y={HEIGHT - EDGE + 16} text-anchor=middle>"
            f"{escape(name)}</text>"
        )
    return _svg([*parts, *_legend([one.policy for one in results])])


def _frame(label: str) -> str:
    lines = [
        f"<line x1={EDGE} x2={WIDTH - EDGE} y1={y:.1f} y2={y:.1f} stroke=#ddd />"
        f"<text x={EDGE - 6} y={y + 4:.1f} text-anchor=end>{share:g}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
        for y in [HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * share]
    ]
    name = f"<text x={WIDTH - EDGE} y={HEIGHT - 10} text-anchor=end>{label}</text>"
    return "".join((*lines, name))


def _legend(names: Sequence[str]) -> list[str]:
    return [
        f"<rect x={EDGE + number * 110} y=12 width=12 height=12 fill={COLOURS[number % len(COLOURS)]} />"
        f"<text x={EDGE + number * 110 + 16} y=22>{escape(name)}</text>"
        for number, name in enumerate(names)
    ]


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img>{"".join(parts)}</svg>'
