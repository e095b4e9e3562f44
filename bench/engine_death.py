"""How long a stream pauses when every engine of its node is killed: ``make bench-engine-death``.

One system with two workers, anew for each figure; ``ready`` once each of them has its spare engine,
or with none (``PILOTLIGHT_SPARE_ENGINE=false``). In mid-stream every engine gets SIGKILL at the
same moment, so that no other instance, and no other engine, can take the request over. Measured is
the longest pause between two pieces of the stream's text: start of an engine, load of the model
from the host pool, computing prompt and output so far.

Prints one JSON document: the machine, medians and maxima, and every single figure.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cold_start import POOL_BYTES, machine
from openai import AsyncOpenAI

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_PROMPT, demo_model_folder
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.telemetry import configure_logging
from pilotlight.common.waiting import pause

WORKERS = 2
TOKENS = 200
KILLED_AFTER = 20
"""Pieces of text."""
DEADLINE_S = 120.0


def engines(log_dir: Path, action: str) -> set[int]:
    """Process ids of engines of which the workers' logs say something."""
    lines = (
        line
        for path in log_dir.glob("worker*.log")
        for line in path.read_text().splitlines()
        if line.startswith("{")
    )
    events = (json.loads(line) for line in lines)
    return {event["pid"] for event in events if event.get("action") == action}


async def until_there(log_dir: Path, action: str) -> set[int]:
    """Process ids, once there is one for each worker."""
    async with asyncio.timeout(DEADLINE_S):
        while len(found := engines(log_dir, action)) < WORKERS:
            await pause(0.05)
    return found


async def stream(home: Home, options: SystemOptions, victims: set[int]) -> tuple[str, float]:
    """The text, and the longest pause in it."""
    clock = SystemClock()
    text, longest_s, last_s = "", 0.0, None
    async with AsyncOpenAI(
        base_url=f"{options.url}/v1",
        api_key=home.api_key.read_text().strip(),
        max_retries=0,
        timeout=DEADLINE_S,
    ) as client:
        chunks = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": DEMO_PROMPT}],
            max_tokens=TOKENS,
            seed=1,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        pieces = 0
        async for chunk in chunks:
            if not chunk.choices or not chunk.choices[0].delta.content:
                continue
            now_s = clock.monotonic_s()
            longest_s = max(longest_s, now_s - (last_s or now_s))
            text, last_s, pieces = text + chunk.choices[0].delta.content, now_s, pieces + 1
            if pieces == KILLED_AFTER:
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
    return text, longest_s


async def measure(folder: Path, *, spare: bool) -> float:
    """Seconds of pause on a system of its own.

    Raises:
        SystemExit: the text is not that of an undisturbed stream.
    """
    home = Home(folder)
    options = SystemOptions(
        port=free_port(), workers=WORKERS, pool_bytes=POOL_BYTES, model_roots=(demo_model_folder(),)
    )
    os.environ["PILOTLIGHT_SPARE_ENGINE"] = str(spare).lower()
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            # In float32: what is computed again, in another batch, is then the same to the last
            # bit.
            slo = {"ttft_ms": 30_000, "tpot_ms": 1000}
            model = {
                "name": "m",
                "uri": demo_model_folder().as_uri(),
                "dtype": "float32",
                "slo": slo,
            }
            await asyncio.to_thread(admin.post, "/models", model)
            undisturbed, _ = await stream(home, options, set())
            victims = await until_there(home.logs, "engine_started")
            if spare:
                await until_there(home.logs, "spare_ready")
            text, pause_s = await stream(home, options, victims)
            if text != undisturbed:
                raise SystemExit(f"{text!r} instead of {undisturbed!r}")
            return pause_s


async def measure_all(folder: Path, repeats: int) -> dict[str, Any]:
    """With and without a spare, in turn."""
    figures: dict[str, list[float]] = {"with_spare_s": [], "without_spare_s": []}
    for number in range(repeats):
        for name, values in figures.items():
            values.append(await measure(folder / f"{name}-{number}", spare=name == "with_spare_s"))
    return {
        "machine": machine(),
        "median": {name: round(statistics.median(values), 3) for name, values in figures.items()},
        "max": {name: round(max(values), 3) for name, values in figures.items()},
        "raw": {name: [round(value, 3) for value in values] for name, values in figures.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="How long a stream pauses when every engine of its node is killed."
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    configure_logging("bench")
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        result = asyncio.run(measure_all(Path(folder), arguments.repeats))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
