"""Pictures of ``bench/results/medusa.json`` and ``medusa_traces.json``: MEDUSA's figures 7 to 11,
as ours.
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

Measurements = dict[str, dict[str, Any]]

OURS, OTHERS, REFERENCE, INK = "#1f6f8b", "#c9b79c", "#9a9a9a", "#333333"
SHAPES = {
    "mistral-7b": "Mistral 7B",
    "llama2-7b": "Llama2 7B",
    "llama2-13b": "Llama2 13B",
    "qwen1.5-0.5b": "Qwen1.5 0.5B",
    "qwen1.5-1.8b": "Qwen1.5 1.8B",
    "qwen1.5-4b": "Qwen1.5 4B",
    "qwen1.5-7b": "Qwen1.5 7B",
    "qwen1.5-14b": "Qwen1.5 14B",
    "yi-6b": "Yi 6B",
    "yi-9b": "Yi 9B",
}
SHOWN = "qwen1.5-4b"
"""Of the figures that the paper has of one model."""
PLAIN = "the loading phase without materialization, kernels compiled before"
MEDUSA = "the loading phase as MEDUSA has it: pointers, triggering, room before weights"
ORDER = "room first, then the first layer's 35 sizes beside the weights"
MATERIALIZED = "the loading phase with everything materialized"
VLLM = "vLLM's loading phase, compiled before"
VLLM_EAGER = "vLLM's loading phase without graphs"
BUILD = "a build by part"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    VLLM: ("vLLM, compiled before", {"marker": "s", "color": REFERENCE}),
    VLLM_EAGER: (
        "vLLM without graphs",
        {"marker": "s", "color": REFERENCE, "markerfacecolor": "white"},
    ),
    PLAIN: ("ours, nothing materialized", {"marker": "o", "color": OTHERS}),
    MEDUSA: ("MEDUSA's way in our engine", {"marker": "D", "color": INK}),
    MATERIALIZED: ("ours", {"marker": "o", "color": OURS}),
}
STAGES = {
    "init": "#5b7f8c",
    "weights": "#c9b79c",
    "first layer at 35 sizes": "#d98e5f",
    "graphs": "#1f6f8b",
    "profiling": "#9a9a9a",
    "warm-up": "#e3c26f",
    "capture": "#b0563f",
}
STEPS = {
    "start": "start of the first engine",
    "load": "load",
    "prefill": "profile of prompts",
    "decode": "profile of steps",
    "canary": "canary",
    "kernels": "all kernels",
    "graphs": "graphs",
    "validate": "proof in a second process",
    "store": "store",
}
SHADES = (
    *("#1f6f8b", "#c9b79c", "#5b7f8c", "#e3c26f", "#b0563f", "#9a9a9a", "#d98e5f", "#7aa874"),
    "#333333",
)
LINES = {
    "plain": ("nothing materialized", {"marker": "o", "color": OTHERS}),
    "eager": ("without graphs", {"marker": "s", "color": REFERENCE}),
    "medusa": ("MEDUSA's way", {"marker": "D", "color": INK}),
    "ours": ("ours", {"marker": "o", "color": OURS}),
}


def has_build(measurements: Measurements) -> bool:
    """Figure 9 can be drawn."""
    return any(f"{BUILD}, {shape}" in measurements for shape in SHAPES)


def medusa_height(measurements: Measurements, *, build: bool) -> float:
    """Inches of a picture that has a line for each model, or for each that was built."""
    ways = (BUILD,) if build else tuple(WAYS)
    shown = [shape for shape in SHAPES if any(f"{way}, {shape}" in measurements for way in ways)]
    return 1.9 + 0.45 * len(shown)


def draw_loading(axes: Axes, measurements: Measurements) -> None:
    """Figure 7: the loading phase by model and way; seconds on a logarithmic axis."""
    totals = {
        shape: {
            way: measurements[f"{way}, {shape}"]["medians"]["total_s"]
            for way in WAYS
            if f"{way}, {shape}" in measurements
        }
        for shape in SHAPES
    }
    shown = [shape for shape, found in totals.items() if found]
    for place, shape in enumerate(shown):
        found = totals[shape].values()
        axes.hlines(place, min(found), max(found), color="#dddddd", linewidth=2, zorder=1)
    for way, (label, style) in WAYS.items():
        points = [
            (totals[shape][way], at) for at, shape in enumerate(shown) if way in totals[shape]
        ]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), linestyle="", markersize=7, label=label, **style)
        for seconds, place in points:
            words = f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"
            axes.annotate(
                words, (seconds, place), (0, 7), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [SHAPES[shape] for shape in shown])
    axes.set_ylim(len(shown) - 0.4, -0.7)
    axes.set_xlabel("seconds from the command to ready, libraries up, weights in host memory")
    axes.set_title("Loading phase, one GPU: less is better")
    axes.xaxis.set_major_formatter("{x:g}")
    _legend_below(axes)


def draw_stages(axes: Axes, measurements: Measurements) -> None:
    """Figure 8: stages of one model's loading phase, in the ways of our engine."""
    bars: list[tuple[str, list[tuple[str, float]]]] = []
    for way, label, stages in (
        (PLAIN, "(a) nothing\nmaterialized", _of_plain),
        (MEDUSA, "(b) MEDUSA's\nway", _of_medusa),
        (ORDER, "MEDUSA's order,\ngraphs not rebuilt", _of_order),
        (MATERIALIZED, "(c) ours", _of_ours),
    ):
        if way == ORDER and f"{MEDUSA}, {SHOWN}" in measurements:
            continue
        if f"{way}, {SHOWN}" in measurements:
            bars.append((label, stages(measurements[f"{way}, {SHOWN}"]["medians"])))
    labelled: set[str] = set()
    for place, (_, stages_of) in enumerate(bars):
        left = 0.0
        for stage, seconds in stages_of:
            axes.barh(
                place,
                seconds,
                left=left,
                height=0.55,
                color=STAGES[stage],
                label="" if stage in labelled else stage,
            )
            labelled.add(stage)
            left += seconds
        axes.annotate(
            f"{left:.2f} s", (left, place), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds; what comes beside the weights is within them")
    axes.set_title(f"Loading phase of {SHAPES[SHOWN]} by stage: less is better")
    _legend_below(axes)
    vllm = [
        f"{label} {measurements[f'{way}, {SHOWN}']['medians']['total_s']:.1f} s"
        for way, (label, _) in WAYS.items()
        if way in (VLLM, VLLM_EAGER) and f"{way}, {SHOWN}" in measurements
    ]
    if vllm:
        words = "not drawn: " + ",\n".join(vllm)
        axes.text(
            0.98,
            0.5,
            words,
            transform=axes.transAxes,
            ha="right",
            va="center",
            color=INK,
            fontsize=9,
        )


def _legend_below(axes: Axes) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _of_plain(told: Mapping[str, float]) -> list[tuple[str, float]]:
    return [
        ("init", told["init_s"]),
        ("weights", told["weights_s"]),
        ("profiling", told["profile_s"]),
        ("warm-up", told["warm_up_s"]),
        ("capture", told["capture_s"]),
    ]


def _of_medusa(told: Mapping[str, float]) -> list[tuple[str, float]]:
    """The weights come beside all that is after the first ones."""
    rest = told["weights_and_graphs_s"] - told["trigger_s"] - told["restore_s"]
    return [
        ("init", told["init_s"]),
        ("weights", told["first_weights_s"]),
        ("first layer at 35 sizes", told["trigger_s"]),
        ("graphs", told["restore_s"]),
        ("weights", max(0.0, rest)),
    ]


def _of_order(told: Mapping[str, float]) -> list[tuple[str, float]]:
    return [
        ("init", told["init_s"]),
        ("weights", told["first_weights_s"]),
        ("first layer at 35 sizes", told["trigger_s"]),
        ("weights", max(0.0, told["weights_and_trigger_s"] - told["trigger_s"])),
    ]


def _of_ours(told: Mapping[str, float]) -> list[tuple[str, float]]:
    return [
        ("init", told["kernels_s"] + told["init_s"]),
        ("weights", told["weights_s"]),
        ("graphs", told["graphs_left_s"]),
    ]


def draw_build(axes: Axes, measurements: Measurements) -> None:
    """Figure 9: parts of a build."""
    shown = [shape for shape in SHAPES if f"{BUILD}, {shape}" in measurements]
    for place, shape in enumerate(shown):
        told, left = measurements[f"{BUILD}, {shape}"]["medians"], 0.0
        for number, (step, label) in enumerate(STEPS.items()):
            seconds = told.get(f"{step}_s", 0.0)
            axes.barh(
                place,
                seconds,
                left=left,
                height=0.55,
                color=SHADES[number],
                label="" if place else label,
            )
            left += seconds
        axes.annotate(
            f"{left:.0f} s", (left, place), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(shown)), [SHAPES[shape] for shape in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds; MEDUSA's offline phase takes 39.2 in mean")
    axes.set_title("A build by part: less is better")
    _legend_below(axes)


def draw_rates(axes: Axes, measurements: Measurements) -> None:
    """Figure 10: P99 of first tokens by requests a second."""
    _draw_traces(axes, measurements, by="rate")
    axes.set_xscale("log")
    rates = sorted({rate for points in _points(measurements).values() for rate, _, _ in points})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("requests a second")
    axes.set_title(f"First tokens under Poisson arrivals, simulated, {SHAPES[SHOWN]}, four GPUs")


def draw_throughput(axes: Axes, measurements: Measurements) -> None:
    """Figure 11: P99 of first tokens by requests that end."""
    _draw_traces(axes, measurements, by="ended")
    axes.set_xlabel("requests that end a second")
    axes.set_title(f"First tokens by throughput, simulated, {SHAPES[SHOWN]}, four GPUs")


def _draw_traces(axes: Axes, measurements: Measurements, by: str) -> None:
    points = _points(measurements)
    for name, (label, style) in LINES.items():
        if name not in points:
            continue
        rates, ended, high = zip(*points[name], strict=True)
        axes.plot(rates if by == "rate" else ended, high, linewidth=2, label=label, **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds to the first token, P99")
    axes.legend(loc="upper left", frameon=False)


def _points(measurements: Measurements) -> dict[str, list[tuple[float, float, float]]]:
    """Of each strategy: rate, requests that end a second, P99 of the first token."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for what, measured in measurements.items():
        medians: dict[str, float] = measured["medians"]
        rates = [name.split("/s ")[0] for name in medians if name.endswith("ttft_p99_s")]
        found[what.partition(",")[0]] = [
            (float(rate), medians[f"{rate}/s ended_per_s"], medians[f"{rate}/s ttft_p99_s"])
            for rate in sorted(rates, key=float)
        ]
    return found
