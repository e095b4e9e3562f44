"""More models than places, all of them wanted all the time: ``make bench-starvation``.

``--models`` copies of the demo model, each another checkpoint, over ``--places`` workers whose
devices hold one of them, with ``--clients`` clients for each model: each asks, streams the answer
to its end, and asks again. The system knows only that each model's first token is due within
``--slo-ms``.

Prints one JSON document: the machine, requests, errors by code, times to the first token for each
model and for all, tokens per second, loads, and why instances made room. A request that still waits
when the time is over counts with the time that it has waited.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cold_start import POOL_BYTES, machine
from openai import APIError, APIStatusError, AsyncOpenAI

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_PROMPT, demo_model_folder
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.telemetry import configure_logging

ONE_MODEL_BYTES = 24 * 2**20
"""Of device memory: the demo model with its KV fits once."""
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Tally:
    """What happened to one model's requests."""

    ttft_s: list[float] = field(default_factory=list[float])
    tokens: int = 0
    """Of answers that are complete."""
    longest_pause_s: float = 0.0
    """Between two pieces of one stream's text."""
    errors: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the system."""

    models: int
    places: int
    clients: int
    duration_s: float
    slo_ms: float
    max_tokens: int


async def ask(client: AsyncOpenAI, model: str, seed: int, max_tokens: int, tally: Tally) -> None:
    """One request, to its end or to the end of the time."""
    clock = SystemClock()
    began_s = clock.monotonic_s()
    last_s: float | None = None
    try:
        chunks = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": DEMO_PROMPT}],
            max_tokens=max_tokens,
            seed=seed,
            extra_body={"ignore_eos": True},
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            tally.tokens += chunk.usage.completion_tokens if chunk.usage is not None else 0
            if not chunk.choices or not chunk.choices[0].delta.content:
                continue
            now_s = clock.monotonic_s()
            if last_s is None:
                tally.ttft_s.append(now_s - began_s)
            else:
                tally.longest_pause_s = max(tally.longest_pause_s, now_s - last_s)
            last_s = now_s
    except asyncio.CancelledError:
        if last_s is None:
            tally.ttft_s.append(clock.monotonic_s() - began_s)
        raise
    except APIError as error:
        status = error.status_code if isinstance(error, APIStatusError) else "stream"
        tally.errors[f"{status} {error.code or type(error).__name__}"] += 1
        if last_s is None:
            tally.ttft_s.append(clock.monotonic_s() - began_s)


async def closed_loop(
    client: AsyncOpenAI, model: str, first_seed: int, max_tokens: int, tally: Tally
) -> None:
    """Ask for ever, the next when the last has ended."""
    for seed in itertools.count(first_seed):
        await ask(client, model, seed, max_tokens, tally)


def register(home: Home, admin: AdminClient, load: Load) -> list[str]:
    """Copies of the demo model that differ in a figure of their configuration: each is another
    checkpoint, of the same cost.
    """
    names: list[str] = []
    for index in range(load.models):
        name = f"ember-{index}"
        copy = home.models / name
        shutil.copytree(demo_model_folder(), copy, copy_function=shutil.copy)
        config: dict[str, Any] = json.loads((copy / "config.json").read_text())
        config["rope_theta"] += index
        (copy / "config.json").write_text(json.dumps(config))
        slo = {"ttft_ms": load.slo_ms, "tpot_ms": 1000}
        admin.post("/models", {"name": name, "uri": copy.as_uri(), "slo": slo})
        names.append(name)
    return names


def events(log_dir: Path, prefix: str) -> Iterable[dict[str, Any]]:
    """What the processes of that name have logged."""
    for path in sorted(log_dir.glob(f"{prefix}*.log")):
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def seconds_of(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)
        for name, share in at.items()
    }


async def measure(home: Home, load: Load) -> dict[str, Any]:
    """Run the load on a system of its own."""
    os.environ["PILOTLIGHT_DEVICE_BYTES"] = str(ONE_MODEL_BYTES)
    options = SystemOptions(port=free_port(), workers=load.places, pool_bytes=POOL_BYTES)
    clock = SystemClock()
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            names = await asyncio.to_thread(register, home, admin, load)
        tallies = {name: Tally() for name in names}
        began_s = clock.monotonic_s()
        async with AsyncOpenAI(
            base_url=f"{options.url}/v1",
            api_key=home.api_key.read_text().strip(),
            max_retries=0,
            timeout=TIMEOUT_S,
        ) as client:
            tasks = [
                asyncio.create_task(
                    closed_loop(client, name, number * 1_000_000, load.max_tokens, tallies[name])
                )
                for name in names
                for number in range(load.clients)
            ]
            done, _ = await asyncio.wait(
                tasks, timeout=load.duration_s, return_when=asyncio.FIRST_EXCEPTION
            )
            took_s = clock.monotonic_s() - began_s
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()
        loads = sum(event.get("action") == "stage_loading" for event in events(home.logs, "worker"))
        drained = [
            event
            for event in events(home.logs, "scheduler")
            if event.get("action") == "instance_draining"
        ]
    every = [value for tally in tallies.values() for value in tally.ttft_s]
    errors = sum((tally.errors for tally in tallies.values()), Counter[str]())
    return {
        "machine": machine(),
        "models": load.models,
        "places": load.places,
        "clients_per_model": load.clients,
        "max_tokens": load.max_tokens,
        "slo_ttft_s": load.slo_ms / 1000,
        "took_s": round(took_s, 1),
        "requests": len(every),
        "errors": dict(errors),
        "ttft_s": seconds_of(every),
        "longest_pause_s": round(max(tally.longest_pause_s for tally in tallies.values()), 3),
        "tokens_per_s": round(sum(tally.tokens for tally in tallies.values()) / took_s, 1),
        "loads": loads,
        "drains": len(drained),
        "by_model": {
            name: {
                "requests": len(tally.ttft_s),
                "ttft_s": seconds_of(tally.ttft_s),
                "longest_pause_s": round(tally.longest_pause_s, 3),
                "tokens": tally.tokens,
            }
            for name, tally in tallies.items()
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="More models than places, all of them wanted all the time."
    )
    parser.add_argument("--duration-s", type=float, default=600)
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--places", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2, help="for each model")
    parser.add_argument("--slo-ms", type=float, default=2000)
    parser.add_argument("--max-tokens", type=int, default=64)
    load = Load(**vars(parser.parse_args()))
    configure_logging("bench")
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        result = asyncio.run(measure(Home(Path(folder) / "home"), load))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
