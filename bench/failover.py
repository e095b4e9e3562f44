"""How long no scheduler leads when the leading one dies or stops: ``make bench-failover``.

One system with standbys. Again and again its leader gets SIGKILL, or SIGSTOP for longer than its
lease, while nothing is loaded, and a request comes at the same moment. Measured from the signal:

* ``command_s``: to the first command of the next leader, as it passes NATS;
* ``first_token_s``: to the first token of the request, which was held meanwhile, on a simulated
  worker.

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
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from cold_start import machine
from openai import AsyncOpenAI

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_MODEL, DEMO_PROMPT, demo_model_folder, ensure_demo_model
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.messages.hold import WorkerHold, worker_hold_subject
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import ADMIN
from pilotlight.common.settings import BusSettings
from pilotlight.common.telemetry import configure_logging
from pilotlight.common.waiting import pause
from pilotlight.policy.ids import WorkerId

POOL_BYTES = 256 << 20
DEADLINE_S = 30.0
STOPPED_S = 5.0
WAYS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Bench:
    """A running system, and what its schedulers say."""

    def __init__(self, home: Home, options: SystemOptions) -> None:
        self.home = home
        self.options = options
        self.clock = SystemClock()
        self.commanded: dict[int, float] = {}
        """When the first command of each epoch passed."""

    async def on_command(self, command: WorkerHold) -> None:
        """Note an epoch's first command."""
        self.commanded.setdefault(command.epoch, self.clock.monotonic_s())

    async def until(self, condition: Callable[[], Awaitable[Any]], what: str) -> Any:
        """What a condition gives, as soon as that is true.

        Raises:
            DeadlineExceeded: it never was.
        """
        ends_s = self.clock.monotonic_s() + DEADLINE_S
        while self.clock.monotonic_s() < ends_s:
            if found := await condition():
                return found
            await pause(0.02)
        raise DeadlineExceeded(f"{what}: not within {DEADLINE_S:g} s")

    async def schedulers(self) -> dict[int, float]:
        """Epoch of each scheduler that answers, by process id; 0 of one that stands by."""
        found: dict[int, float] = {}
        for path in self.home.run_dir.glob("scheduler-*.sock"):
            transport = httpx2.AsyncHTTPTransport(uds=str(path))
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://local", timeout=0.5
            ) as http:
                try:
                    page = (await http.get("/metrics")).text
                except httpx2.TransportError:
                    continue
            lines = (
                line for line in page.splitlines() if line.startswith("pilotlight_scheduler_epoch ")
            )
            found[int(path.stem.removeprefix("scheduler-"))] = float(next(lines).split()[1])
        return found

    async def leader(self) -> tuple[int, float] | None:
        """Process id and epoch of the only leader, while every scheduler answers."""
        found = await self.schedulers()
        leading = [(pid, epoch) for pid, epoch in found.items() if epoch]
        return leading[0] if len(found) == self.options.schedulers and len(leading) == 1 else None

    async def ask(self) -> float:
        """When the first token of a request came."""
        key = self.home.api_key.read_text().strip()
        async with AsyncOpenAI(
            base_url=f"{self.options.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S
        ) as client:
            stream = await client.chat.completions.create(
                model=DEMO_MODEL,
                messages=[{"role": "user", "content": DEMO_PROMPT}],
                max_tokens=4,
                stream=True,
            )
            first_s: float | None = None
            async for chunk in stream:
                if first_s is None and chunk.choices and chunk.choices[0].delta.content:
                    first_s = self.clock.monotonic_s()
            assert first_s is not None
            return first_s

    async def fail_over(self, number: signal.Signals) -> tuple[float, float]:
        """Seconds to the next leader's first command, and to the first token."""
        pid, epoch = await self.until(self.leader, "one leader, and the others standing by")
        signalled_s = self.clock.monotonic_s()
        os.kill(pid, number)
        asked = asyncio.create_task(self.ask())

        async def next_epoch() -> int | None:
            return min((one for one in self.commanded if one > epoch), default=None)

        following = await self.until(next_epoch, "a command of the next leader")
        first_token_s = await asked
        if number == signal.SIGSTOP:
            await pause(max(0.0, signalled_s + STOPPED_S - self.clock.monotonic_s()))
            os.kill(pid, signal.SIGCONT)
        return self.commanded[following] - signalled_s, first_token_s - signalled_s


@asynccontextmanager
async def bench_system(home: Home, schedulers: int) -> AsyncGenerator[Bench]:
    """A system whose commands are listened to."""
    options = SystemOptions(
        port=free_port(),
        schedulers=schedulers,
        worker_kind="sim",
        pool_bytes=POOL_BYTES,
        model_roots=(demo_model_folder(),),
    )
    bench = Bench(home, options)
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)) as system:
        assert system.endpoints is not None
        settings = BusSettings(nats_url=system.endpoints.nats_url, secrets_dir=home.secrets)
        bus = await NatsBus.connect(settings, user=ADMIN, name="bench")
        await bus.subscribe(worker_hold_subject(WorkerId("*")), WorkerHold, bench.on_command)
        yield bench
        await bus.close()


async def measure(home: Home, repeats: int, schedulers: int) -> dict[str, Any]:
    """Run everything on a system of its own."""
    figures: dict[str, list[float]] = {}
    async with bench_system(home, schedulers) as bench:
        with AdminClient(bench.options.url, home.admin_key.read_text().strip()) as admin:
            await asyncio.to_thread(ensure_demo_model, admin)

            async def unloaded() -> bool:
                workers = (await asyncio.to_thread(admin.get, "/workers"))["workers"]
                return not any(worker["held"] for worker in workers)

            for _ in range(repeats):
                for way, number in WAYS.items():
                    command_s, first_token_s = await bench.fail_over(number)
                    figures.setdefault(f"{way}_command_s", []).append(command_s)
                    figures.setdefault(f"{way}_first_token_s", []).append(first_token_s)
                    await bench.until(bench.leader, "one leader, and the others standing by")
                    await asyncio.to_thread(admin.post, f"/models/{DEMO_MODEL}/evict")
                    await bench.until(unloaded, "nothing loaded")
    return {
        "machine": machine(),
        "schedulers": schedulers,
        "median": {name: round(statistics.median(values), 3) for name, values in figures.items()},
        "max": {name: round(max(values), 3) for name, values in figures.items()},
        "raw": {name: [round(value, 3) for value in values] for name, values in figures.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="How long no scheduler leads when the leading one dies or stops."
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--schedulers", type=int, default=3)
    arguments = parser.parse_args()
    configure_logging("bench")
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        result = asyncio.run(
            measure(Home(Path(folder) / "home"), arguments.repeats, arguments.schedulers)
        )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
