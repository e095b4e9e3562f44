"""Pictures of ``bench/results/cache.json``: mCache's workloads, and the modern mix."""

from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

Measurements = dict[str, dict[str, Any]]

OURS, OTHERS, REFERENCE, INK = "#1f6f8b", "#c9b79c", "#9a9a9a", "#333333"

LOOKS = {
    "pilotlight": ("Pilotlight", OURS, "o"),
    "iam": ("IAM (mCache)", INK, "D"),
    "gdsf": ("GDSF with cost", OTHERS, "s"),
    "lfu": ("LFU", OTHERS, "^"),
    "lru": ("LRU", REFERENCE, "v"),
}


def draw_mix(axes: Axes, measurements: Measurements) -> None:
    """Seconds of reloads for each request by the cache's size, beside true rates and the bound."""
    shares = (5, 10, 16, 40)
    found = [measurements[f"modern, cache of {share}%"] for share in shares]
    for name, (label, color, marker) in LOOKS.items():
        means = [fmean(one["samples"][name]) for one in found]
        axes.plot(range(len(shares)), means, color=color, marker=marker, label=label, linewidth=1.5)
    known = [fmean(one["samples"]["true-rates"]) for one in found]
    axes.plot(range(len(shares)), known, color=INK, linestyle="--", linewidth=1, label="true rates")
    bound = [one["bound"] for one in found]
    axes.plot(range(len(shares)), bound, color=INK, linestyle=":", linewidth=1, label="lower bound")
    axes.set_xticks(range(len(shares)), [f"{share} %" for share in shares])
    axes.set_xlabel("cache, of all models' bytes")
    axes.set_ylabel("seconds of reloads for each request")
    axes.set_ylim(bottom=0)
    axes.set_title("500 models of 0.5 to 140 GB, 20,000 requests: less is better")
    axes.legend(frameon=False, fontsize=9)


def draw_drift(axes: Axes, measurements: Measurements) -> None:
    """Load time over the exact optimum by how long popularity stays, seven models."""
    periods = ("120 s", "300 s", "600 s", "1200 s", None)
    start = "periods of drift: seven models, large, quantile"
    found = [
        measurements[f"{start}{f', drift each {one}' if one else ''}, cache of 60%"]
        for one in periods
    ]
    for name, (label, color, marker) in LOOKS.items():
        over = [fmean(one["samples"][name]) / one["optimum"] for one in found]
        axes.plot(range(len(periods)), over, color=color, marker=marker, label=label, linewidth=1.5)
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(periods)), [one or "never" for one in periods])
    axes.set_xlabel("popularity changes each")
    axes.set_ylabel("load time, of the exact optimum's")
    axes.set_title("Seven models (mCache, quantile), a cache of 60 %: less is better")
    axes.legend(frameon=False, fontsize=9)


def draw_paper(axes: Axes, measurements: Measurements) -> None:
    """Figure 8 of mCache: load time over the exact optimum by the cache's size, almost equally
    popular models.
    """
    shares = (20, 40, 60, 80, 100)
    found = [measurements[f"seven models, large, random, cache of {share}%"] for share in shares]
    for name, (label, color, marker) in LOOKS.items():
        over = [fmean(one["samples"][name]) / one["optimum"] for one in found]
        axes.plot(range(len(shares)), over, color=color, marker=marker, label=label, linewidth=1.5)
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(shares)), [f"{share} %" for share in shares])
    axes.set_xlabel("cache, of all models' bytes")
    axes.set_ylabel("load time, of the exact optimum's")
    axes.set_title("Seven models (mCache, random): less is better")
    axes.legend(frameon=False, fontsize=9)
