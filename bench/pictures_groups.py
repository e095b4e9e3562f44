"""Pictures of ``bench/results/groups.json``: figures 8, 9, 13 and 14 of ParaServe, as ours."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

Measurements = dict[str, dict[str, Any]]

OURS, OTHERS, INK = "#1f6f8b", "#c9b79c", "#333333"
STAGES = ("s = 1", "s = 2", "s = 4", "chosen for 12 s")
RUNGS = ("single", "+prefetch", "+stream", "+overlap", "+warm", "+parallel")
SIZES = {1: "#9a9a9a", 2: "#c9b79c", 4: "#1f6f8b"}
BURSTS = (16, 32, 64, 128)
CURVES = {
    "512 tokens, the group becomes one worker": ("one worker goes on", OURS),
    "512 tokens, each worker keeps its layers": ("four stages to the end", "#9a9a9a"),
}


def draw_stages(axes: Axes, measurements: Measurements) -> None:
    """Figure 8: the first token by the number of stages."""
    labels = {"s = 1": "one node", "s = 2": "two nodes", "s = 4": "four nodes"}
    chosen = "chosen for\nan SLO of 12 s"
    _bars(axes, measurements, STAGES, [labels.get(one, chosen) for one in STAGES])
    axes.set_title("A model of 411 MB on no node, each link 200 Mbit/s: less is better")


def draw_ladder(axes: Axes, measurements: Measurements) -> None:
    """Figure 9: one technique more after the other."""
    _bars(axes, measurements, RUNGS, RUNGS)
    axes.set_title("The same start with one technique more after the other: less is better")


def draw_bursts(axes: Axes, measurements: Measurements) -> None:
    """Figure 14: the average first token of a burst by the size of groups."""
    for size, color in SIZES.items():
        found = [
            (many, measurements[f"{many} requests, groups of {size}"]["averages"]["ttft"])
            for many in BURSTS
            if f"{many} requests, groups of {size}" in measurements
        ]
        label = "one worker each" if size == 1 else f"groups of {size}"
        axes.plot(*zip(*found, strict=True), marker="o", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BURSTS, [str(many) for many in BURSTS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once for a model that no node has")
    axes.set_ylabel("average seconds to the first token")
    axes.set_title("Bursts on 16 simulated workers behind links of 50 Mbit/s")
    axes.legend(loc="upper left", frameon=False)


def draw_tokens(axes: Axes, measurements: Measurements) -> None:
    """Figure 13: tokens of one request over time, with and without scaling down."""
    for what, (label, color) in CURVES.items():
        by_s = measurements[what]["samples"]["tokens by the end of each second"]
        axes.plot(range(1, len(by_s) + 1), by_s, color=color, label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the request for a model that no node has")
    axes.set_ylabel("tokens at the client")
    axes.set_title("One request that four nodes begin to answer")
    axes.legend(loc="upper left", frameon=False)


def _bars(
    axes: Axes, measurements: Measurements, names: Sequence[str], labels: Sequence[str]
) -> None:
    """A bar for each median, a point for each start, and how many times the first one it is."""
    first = measurements[names[0]]["medians"]["ttft"]
    shown = [pair for pair in zip(names, labels, strict=True) if pair[0] in measurements]
    for place, (name, _) in enumerate(shown):
        middle, samples = measurements[name]["medians"]["ttft"], measurements[name]["samples"]
        axes.barh(place, middle, height=0.6, color=OURS if place else OTHERS)
        axes.plot(
            samples["ttft"], [place] * len(samples["ttft"]), "o", color=INK, markersize=3, alpha=0.7
        )
        times = f" ({first / middle:.1f} times as soon)" if place else ""
        axes.annotate(
            f"{middle:.1f} s{times}",
            (max(samples["ttft"]), place),
            (8, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(shown)), [label for _, label in shown])
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds to the first token at the client; bars are medians, points starts")
