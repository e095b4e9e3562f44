"""The whole system at 80 % of what it can, for long: ``make soak-served``.

DURATION_S= for how long (30 minutes), SHARE= for another load; SHAPE= and WEIGHTS= for a model's
shape on this machine's GPU in place of the simulated engine (``tiny``: on its cores); LIMIT_S= for
all of it, where a command may not take longer: the load is shorter then.

It measures what the system can do with streams of 32 tokens, all it is asked for, until that is no
more than before; the median counts, without the first measure. Streams of equal length that follow
one another begin and end together, which suits an engine: so as much then arrives by chance, and if
it does not keep up, less, until it does: nobody is refused, and answers take no longer than they
took before. That is what it can. Then requests arrive at a share of that rate, whether or not
others were answered, for ``--duration-s``, in windows of a minute. There are as many gateways as
``pilotlight up`` has on as many cores. Wrong is: any error; a process, or
the device, whose memory in the last fifth of the time is more than in the second, times 1.05, and
16 MiB; a p99, of first bytes or whole answers, that is in the last fifth half as much again as in
the second, and 10 ms more; arrivals that pile up. Prints one JSON document, with how many tokens
there is KV for in the end, and ends with 1 if anything is wrong.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gateway_servers as servers
import served_gpu_cpu as cpu
from engine_gpu_job import SHAPES_TO_TRY
from gateway import asking, body, commit, metric, say
from served_gpu import machine
from served_gpu_models import prepare
from served_gpu_servers import used_bytes_of_device
from soak_memory import GROWTH_BYTES, GROWTH_RATIO, MIB

from pilotlight.cli.plan import default_gateways

WINDOW_S, WINDOWS = 60.0, 5
"""Of a window, and at least so many."""
AT_ONCE, AT_ONCE_ON_A_GPU = 64, 256
"""Streams at saturation: as many as an engine on a GPU runs at a time."""
DEVICE = "the device"
OWN = ("Pss_Anon:", "Pss_Shmem:")
"""Of a process's memory in /proc, what counts."""
KV_TOKENS = ("pilotlight_worker_kv_used_tokens", "pilotlight_worker_kv_free_tokens")
END_S = 40.0
"""From the end of the load to the end of the command."""
SATURATE_S = 20.0
NO_MORE_RATIO, SATURATIONS = 1.03, 5
"""What it can is measured until it is no more than so many times what was measured before, and so
often at most: what is compiled, and given to processes, at the first full load is not what it can.
"""
WARM_S = 10.0
BY_CHANCE = {"concurrency": 8, "warm_s": 5.0, "duration_s": 15.0}
LESS_SHARES = (1.0, 0.9, 0.8, 0.7)
"""Of what it can with streams that follow one another, what arrives by chance."""
SLOWER_RATIO, SLOWER_MS = 1.5, 10.0
TURNED_AWAY = "429"
"""The status of a request that comes when too many wait."""
KEPT_UP = 0.95
"""Of the arrivals that are due must have been answered in the end."""
FIRST_ANSWER_S = 180.0

Window = dict[str, Any]


def resident_bytes(root_pid: int) -> dict[str, int]:
    """By role, all processes beneath one; what several map, such as a database's buffers, is shared
    out between them, and counts once. Without mapped files: they are the machine's cache, and how
    much of a library is whose depends on who else runs with it.
    """
    found: Counter[str] = Counter()
    for pid, (role, _) in cpu.read(root_pid).processes.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # It has just ended.
        found[role] += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(OWN))
    return dict(found)


def memory_bytes(root_pid: int) -> dict[str, int]:
    """By role, and what is in use of the first device, where there is one."""
    used = used_bytes_of_device()
    return resident_bytes(root_pid) | ({} if used is None else {DEVICE: used})


def saturation_per_s(server: servers.Server, at_once: int) -> float:
    """Streams a second with which it keeps up when they arrive by chance."""
    most_per_s, usual_ms = following_per_s(server, at_once)
    for share in LESS_SHARES:
        rate_per_s = share * most_per_s
        with asking(server, body(stream=True), rate_per_s=rate_per_s, **BY_CHANCE) as client:
            told = client.figures()
        took_ms, refused = told["latency_ms_p50"], told.get("refused", {}).get(TURNED_AWAY, 0)
        say(f"{rate_per_s:.0f}/s arrive: p50 {took_ms} ms for {usual_ms} ms, {refused} refused")
        if told["errors"] > refused:
            raise SystemExit(f"wrong answers above saturation: {told['first_errors']}")
        if not refused and took_ms <= usual_ms:
            return rate_per_s
    raise SystemExit(f"it does not keep up with {rate_per_s:.0f} streams/s that arrive by chance")


def following_per_s(server: servers.Server, at_once: int) -> tuple[float, float]:
    """Streams a second when it is given all that it takes, once that grows no more, and the
    milliseconds that one takes: medians of all measures but the first.
    """
    job = {"concurrency": at_once, "warm_s": WARM_S, "duration_s": SATURATE_S}
    found: list[Window] = []
    for _ in range(SATURATIONS):
        with asking(server, body(stream=True), **job) as client:
            told = client.figures()
        say(f"saturation: {told['per_s']} streams/s, {told['errors']} errors")
        if told["errors"]:
            raise SystemExit(f"wrong answers at saturation: {told['first_errors']}")
        most = max((one["per_s"] for one in found), default=0.0)
        found.append(told)
        if told["per_s"] <= most * NO_MORE_RATIO:
            break
    return (
        statistics.median(one["per_s"] for one in found[1:]),
        statistics.median(one["latency_ms_p50"] for one in found[1:]),
    )


def held(server: servers.Server, rate_per_s: float, duration_s: float) -> list[Window]:
    """The windows of a load that comes at this rate."""
    found: list[Window] = []
    windows = max(WINDOWS, round(duration_s / WINDOW_S))
    job = {
        "concurrency": 8,
        "warm_s": WARM_S,
        "duration_s": duration_s,
        "rate_per_s": rate_per_s,
        "windows": windows,
    }
    with asking(server, body(stream=True), **job) as client:
        for number in range(windows):
            window = client.figures()
            window["memory_bytes"] = memory_bytes(server.pid)
            found.append(window)
            sizes = {role: size // MIB for role, size in window["memory_bytes"].items()}
            say(
                f"window {number + 1} of {windows}: {window['per_s']}/s, {window['errors']} errors, "
                f"p50 {window['latency_ms_p50']} ms, p99 {window['latency_ms_p99']} ms, MiB {sizes}"
            )
    return found


def fifth(
    windows: Sequence[Window], number: int, value_of: Callable[[Window], float | None]
) -> float:
    """A median over the windows of a fifth of the time, of five from 0."""
    part = windows[number * len(windows) // 5 : (number + 1) * len(windows) // 5]
    return statistics.median(value for window in part if (value := value_of(window)) is not None)


def verdicts(windows: Sequence[Window], rate_per_s: float) -> list[str]:
    """What the system did not keep to; empty: nothing."""
    wrong: list[str] = []
    errors = sum(window["errors"] for window in windows)
    if errors:
        told = next(window["first_errors"] for window in windows if window["errors"])
        wrong.append(f"{errors} wrong answers: {told}")
    answered = sum(window["requests"] for window in windows)
    due = rate_per_s * sum(window["seconds"] for window in windows)
    if answered < KEPT_UP * due:
        wrong.append(f"{answered} answers of {due:.0f} that were due")
    lasting = set.intersection(*(set(window["memory_bytes"]) for window in windows))
    for role in sorted(lasting):
        second, last = (
            fifth(windows, number, lambda window, role=role: window["memory_bytes"][role])
            for number in (1, 4)
        )
        if last > second * GROWTH_RATIO + GROWTH_BYTES:
            wrong.append(f"{role} grew from {second / MIB:.1f} to {last / MIB:.1f} MiB")
    for name in ("latency_ms_p99", "first_ms_p99"):
        second, last = (
            fifth(windows, number, lambda window, name=name: window[name]) for number in (1, 4)
        )
        if last > second * SLOWER_RATIO and last > second + SLOWER_MS:
            wrong.append(f"{name} grew from {second:.1f} to {last:.1f}")
    return wrong


def main() -> int:
    """Measure, judge and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--duration-s", type=float, default=1800.0)
    parser.add_argument("--share", type=float, default=0.8, help="of what it can")
    parser.add_argument("--shape", help="of a model on the GPU; none: the simulated engine")
    parser.add_argument("--weights", type=Path, help="folder for the weights of a shape")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of the whole command")
    asked, began_s = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pilotlight-soak-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        model, kind, variables, at_once = servers.DEMO, "sim", {}, AT_ONCE
        if asked.shape:
            model = (asked.weights or Path(folder)).absolute() / asked.shape
            kind, at_once = (
                ("cpu", AT_ONCE) if asked.shape in SHAPES_TO_TRY else ("cuda", AT_ONCE_ON_A_GPU)
            )
            prepare(asked.shape, model)
            size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            variables = {"PILOTLIGHT_POOL_BYTES": str(int(1.3 * size) + (2 << 30))}
        system = servers.ours(
            Path(folder) / "run",
            gateways=default_gateways(len(os.sched_getaffinity(0))),
            model=model,
            kind=kind,
            variables=variables,
        )
        with system as up:
            servers.await_chat(up, FIRST_ANSWER_S)
            rate_per_s = asked.share * saturation_per_s(up, at_once)
            left_s = asked.limit_s - (time.monotonic() - began_s) - WARM_S - END_S
            windows = held(up, rate_per_s, min(asked.duration_s, left_s))
            kv_tokens = sum(metric(up, name) for name in KV_TOKENS)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "engine": asked.shape or "simulated",
        "rate_per_s": round(rate_per_s, 2),
        "share": asked.share,
        "kv_tokens": kv_tokens,
        "wrong": verdicts(windows, rate_per_s),
        "windows": windows,
    }
    print(json.dumps(document, indent=2))
    return 1 if document["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
