"""Pictures of ``bench/results/scheduler.json``: figures 7 and 10 of ParaServe, as we have them."""

from typing import Any

from matplotlib.axes import Axes

Measurements = dict[str, dict[str, Any]]

LOOKS = {
    "single": ("#9a9a9a", ":", "serverless vLLM (single)"),
    "locality": ("#c9b79c", "--", "ServerlessLLM (locality)"),
    "paraserve": ("#b5651d", "--", "ParaServe"),
    "paraserve+cache": ("#b5651d", "-", "ParaServe with cache"),
    "pilotlight-bare": ("#1f6f8b", "--", "Pilotlight's policy on ParaServe's platform"),
    "pilotlight": ("#1f6f8b", "-", "Pilotlight"),
}
CURVES = {
    "alone, as before": ("#9a9a9a", "30 workers, each alone, nothing overlapped"),
    "alone, overlapped": ("#c9b79c", "30 workers, each alone"),
    "groups, overlapped": ("#1f6f8b", "eight groups, which become 30 instances"),
}


def draw_attainment(axes: Axes, measurements: Measurements) -> None:
    """Figure 10: share of requests in time, by the coefficient of variation of arrivals."""
    measured = measurements["figure 10, testbed 1, 0.6 requests/s, TTFT"]
    places = range(len(measured["cv"]))
    for policy, values in measured["samples"].items():
        color, line, label = LOOKS[policy]
        axes.plot(
            places, values, color=color, linestyle=line, marker="o", markersize=4, label=label
        )
    axes.set_xticks(list(places), [f"{cv:g}" for cv in measured["cv"]])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("coefficient of variation of each model's arrivals")
    axes.set_ylabel("share of first tokens within their SLO")
    axes.set_title("384 models on 20 GPUs (ParaServe's testbed 1), 0.6 requests a second")
    axes.legend(loc="lower left", frameon=False, fontsize=8)


def draw_burst(axes: Axes, measurements: Measurements) -> None:
    """Figure 7: what 30 new workers carry over time."""
    name = "figure 7, until 30 new workers of Llama2-13B carry 30 requests/s"
    curves = measurements[name]["capacity"]
    last_s = 1.1 * max(curve[-1][0] for curve in curves.values())
    for way, curve in curves.items():
        color, label = CURVES[way]
        times = [0.0, *(at_s for at_s, _ in curve), last_s]
        carried = [0, *(many for _, many in curve), curve[-1][1]]
        axes.step(times, carried, where="post", color=color, linewidth=2, label=label)
    axes.set_xlim(0, last_s)
    axes.set_xlabel("seconds after the burst")
    axes.set_ylabel("requests a second that are carried")
    axes.set_title("30 workers start at once, each behind 16 Gbit/s")
    axes.legend(loc="center right", edgecolor="none", framealpha=1.0, fontsize=9)
