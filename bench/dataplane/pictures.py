"""Pictures of a document that ``make bench-dataplane`` printed: ``make bench-pictures FILE=document.json``.

``pictures.py DOCUMENT FOLDER``; the interpreter needs matplotlib, and nothing of Pilotlight. Bars and points are medians, whiskers the
least and the most of all rounds. The same document gives the same bytes.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, OTHERS, REFERENCE, INK = "#1f6f8b", "#c9b79c", "#9a9a9a", "#333333"
SIZE = (7.2, 4.0)
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pilotlight",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": "white",
}
SCENARIOS = {"s3": "S3 (radosgw)", "cold": "disk", "warm": "page cache"}
NAMES = {"pilotlight": "Pilotlight", "boto3": "boto3", "aws": "aws s3 cp", "runai": "Run:ai streamer", "cp": "cp"}


def spread(values: list[float]) -> tuple[float, list[list[float]]]:
    """Median, and how far the others are from it, as matplotlib takes it."""
    middle = statistics.median(values)
    return middle, [[middle - min(values)], [max(values) - middle]]


def draw_aggregate(axes: Axes, document: dict[str, Any]) -> None:
    """Time of one model by number of nodes."""
    counts = sorted(document["median_s"], key=int)
    first = document["median_s"]["1"]
    for place, count in enumerate(counts):
        middle, whiskers = spread([run["seconds"] for run in document["runs"][count]])
        axes.bar(place, middle, width=0.55, color=OURS)
        axes.errorbar(place, middle, yerr=whiskers, color=INK, capsize=4, linewidth=1)
        axes.hlines(first / int(count), place - 0.38, place + 0.38, color=INK, linestyle="--", linewidth=1)
        share = "" if count == "1" else f" ({middle / first:.0%} of one)"
        axes.annotate(f"{middle:.1f} s{share}", (place, middle), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set_xticks(range(len(counts)), [f"{count} node{'s' if count != '1' else ''}" for count in counts])
    axes.set_ylabel("seconds until all of it is in memory, verified")
    axes.set_ylim(0, first * 1.28)
    size_mb, rate = round(document["bytes"] / 1e6), document["rate"].replace("mbit", " Mbit/s")
    axes.set_title(f"One model of {size_mb} MB, each node fetches its layers over a link of {rate}")
    words = (
        "dashed: one node's time divided by the nodes.\nParaServe (Fig. 8): cold starts up to 4.7 times shorter\n"
        "with four workers, the rest of a start included"
    )
    axes.text(0.98, 0.95, words, transform=axes.transAxes, ha="right", va="top", color=INK, fontsize=9)


def draw_chain(axes: Axes, document: dict[str, Any]) -> None:
    """Time until the last receiver has a model, by number of receivers."""
    runs = document["runs"]
    counts = sorted(int(name.removeprefix("chain ")) for name in runs if name.startswith("chain "))
    star = {count: runs.get(f"each from the source {count}", runs["chain 1"] if count == 1 else None) for count in counts}
    lines = {
        "each receiver from the source": ({count: found for count, found in star.items() if found}, OTHERS, "s"),
        "a chain": ({count: runs[f"chain {count}"] for count in counts}, OURS, "o"),
    }
    for label, (found, color, marker) in lines.items():
        points = {count: spread([run["seconds"] for run in each]) for count, each in found.items()}
        middles = [middle for middle, _ in points.values()]
        whiskers = [[points[count][1][side][0] for count in points] for side in (0, 1)]
        axes.errorbar(list(points), middles, yerr=whiskers, color=color, marker=marker, linewidth=2, capsize=4, label=label)
        above = label != "a chain"
        for count, middle in zip(points, middles, strict=True):
            if above and count == 1:
                continue
            offset, ends = ((-8, 6), "right") if above else ((0, 9), "center")
            axes.annotate(f"{middle:.1f} s", (count, middle), textcoords="offset points", xytext=offset, ha=ends)
    axes.axhline(document["link_alone_s"], color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        "the bytes alone on one link", (counts[-1], document["link_alone_s"]), (0, -13), textcoords="offset points", ha="right"
    )
    axes.set_xticks(counts)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    axes.set_xlabel("receivers")
    axes.set_ylabel("seconds until the last has all, verified")
    size_mb, rate = document["bytes"] / 2**20, document["rate"].replace("mbit", " Mbit/s")
    axes.set_title(f"{size_mb:.0f} MiB from one node to others, every link {rate}")
    words = "BlitzScale (5.1, Fig. 13): the time of a chain\ndoes not depend on the number of receivers"
    # Below the line of the one and above that of the other.
    axes.text(0.98, 0.44, words, transform=axes.transAxes, ha="right", va="top", color=INK, fontsize=9)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.45), frameon=False)


def draw_fetch(axes: Axes, document: dict[str, Any]) -> None:
    """MB/s of everyone from every place."""
    place, ticks, labels = 0.0, [], []
    for scenario, title in SCENARIOS.items():
        if scenario not in document["scenarios"]:
            continue
        measured = document["scenarios"][scenario]
        began = place
        for name in measured["medians"]:
            middle, whiskers = spread([run["bytes"] / run["seconds"] / 1e6 for run in measured["runs"][name]])
            color = OURS if name == "pilotlight" else REFERENCE if name == "cp" else OTHERS
            axes.barh(place, middle, height=0.7, color=color)
            axes.errorbar(middle, place, xerr=whiskers, color=INK, capsize=3, linewidth=1)
            most = middle + whiskers[1][0]
            cpu = measured["medians"][name]["cpu_s_per_gib"]
            axes.annotate(
                f"{middle:.0f} ({cpu:.1f} CPU s/GiB)", (most, place), (6, 0), textcoords="offset points", va="center", fontsize=8
            )
            ticks.append(place)
            labels.append(NAMES[name])
            place += 1
        axes.text(
            -0.24, (began + place - 1) / 2, title, transform=axes.get_yaxis_transform(), ha="center", va="center", rotation=90
        )
        place += 0.6
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    axes.set_xlabel("MB/s, medians")
    axes.set_title("1 GiB of parameters into memory, we hash them too; more is better")


DRAWN = {"aggregate": draw_aggregate, "chain": draw_chain, "fetch": draw_fetch}


def main() -> None:
    """Draw what the document has."""
    document, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    mpl.rcParams.update(STYLE)
    for name, draw in DRAWN.items():
        if name not in document:
            continue
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure.add_subplot(), document[name])
        figure.savefig(folder / f"dataplane-{name}.svg", metadata={"Date": None})
        print(folder / f"dataplane-{name}.svg")


if __name__ == "__main__":
    main()
