"""Cold and warm first tokens of the demo model on this machine: ``make bench-cold-start``.

Three ways to the first token, each several times, in one run of one system:

* ``remote``: nothing of the model is on the node; its source is limited to ``--link``;
* ``host``: its parameters lie in the host pool, no engine holds them;
* ``warm``: an instance is ready.

Prints one JSON document: the machine, the medians, and every single figure.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from openai import OpenAI

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_PROMPT, demo_model_folder
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.cli.waterfall import is_whole
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.errors import NotFound
from pilotlight.common.waiting import pause

POOL_BYTES = 1 << 30
RECORD_TRIES = 200


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown",
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def ask(
    options: SystemOptions, home: Home, model: str, clock: Clock, prompt: str
) -> tuple[float, str]:
    """Seconds to the first token, and the trace."""
    with OpenAI(
        base_url=f"{options.url}/v1",
        api_key=home.api_key.read_text().strip(),
        max_retries=0,
        timeout=120,
    ) as client:
        began_s = clock.monotonic_s()
        with client.chat.completions.with_streaming_response.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=16,
            stream=True,
        ) as response:
            first_s = None
            for chunk in response.parse():
                if first_s is None and chunk.choices and chunk.choices[0].delta.content:
                    first_s = clock.monotonic_s()
            assert first_s is not None
            return first_s - began_s, response.headers["x-trace-id"]


async def record_of(admin: AdminClient, trace_id: str) -> dict[str, Any]:
    """The finished cold start of a trace."""
    for _ in range(RECORD_TRIES):
        try:
            records = (await asyncio.to_thread(admin.get, f"/traces/{trace_id}"))["cold_starts"]
        except NotFound:
            records = []
        if records and is_whole(records[0]):
            return records[0]
        await pause(0.05)
    raise NotFound(f"no finished cold start belongs to trace {trace_id}")


async def until_unloaded(admin: AdminClient) -> None:
    """Until no worker holds anything."""
    for _ in range(RECORD_TRIES):
        workers = (await asyncio.to_thread(admin.get, "/workers"))["workers"]
        if not any(worker["held"] for worker in workers):
            return
        await pause(0.05)
    raise NotFound("a worker does not let go of its model")


async def measure(home: Home, repeats: int, link: str, prompt: str) -> dict[str, Any]:
    """Run everything on a system of its own."""
    clock = SystemClock()
    figures: dict[str, list[float]] = {"remote_ttft_s": [], "host_ttft_s": [], "warm_ttft_s": []}
    coverage: dict[str, list[float]] = {"remote": [], "host": []}
    phases: dict[str, list[float]] = {}
    options = SystemOptions(port=free_port(), link=link, pool_bytes=POOL_BYTES)
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            for index in range(repeats):
                model = f"ember-{index}"
                copy = home.models / model
                shutil.copytree(demo_model_folder(), copy, copy_function=shutil.copy)
                slo = {"ttft_ms": 5000, "tpot_ms": 200}
                await asyncio.to_thread(
                    admin.post, "/models", {"name": model, "uri": copy.as_uri(), "slo": slo}
                )
                for way in ("remote", "host"):
                    seconds, trace_id = await asyncio.to_thread(
                        ask, options, home, model, clock, prompt
                    )
                    record = await record_of(admin, trace_id)
                    figures[f"{way}_ttft_s"].append(seconds)
                    coverage[way].append(record["coverage"])
                    if way == "remote":
                        for phase in record["phases"]:
                            phases.setdefault(phase["name"], [0.0] * repeats)[index] += (
                                phase["end_s"] - phase["start_s"]
                            )
                    else:
                        seconds, _ = await asyncio.to_thread(
                            ask, options, home, model, clock, prompt
                        )
                        figures["warm_ttft_s"].append(seconds)
                    await asyncio.to_thread(admin.post, f"/models/{model}/evict")
                    await until_unloaded(admin)
    return {
        "machine": machine(),
        "link": link,
        "median": {name: round(statistics.median(values), 4) for name, values in figures.items()},
        "median_coverage": {
            name: round(statistics.median(values), 4) for name, values in coverage.items()
        },
        "least_coverage": {name: round(min(values), 4) for name, values in coverage.items()},
        "median_phase_s": {
            name: round(statistics.median(values), 4) for name, values in phases.items()
        },
        "raw": {name: [round(value, 4) for value in values] for name, values in figures.items()},
        "raw_coverage": {
            name: [round(value, 4) for value in values] for name, values in coverage.items()
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cold and warm first tokens of the demo model.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--link", default="200mbit")
    parser.add_argument(
        "--prompt-words",
        type=int,
        default=0,
        help="ask with a prompt of so many words instead of the demo's",
    )
    arguments = parser.parse_args()
    prompt = " ".join(["light"] * arguments.prompt_words) or DEMO_PROMPT
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        result = asyncio.run(
            measure(Home(Path(folder) / "home"), arguments.repeats, arguments.link, prompt)
        )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
