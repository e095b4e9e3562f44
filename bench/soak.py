"""The whole system under thousands of requests: ``make soak``.

SOAK_REQUESTS=, SOAK_AT_ONCE= for other numbers.

An embedded system with the demo model on this machine's cores. The requests are a mixture
(``soak_requests``): short and long, streamed and not, greedy and sampled, with shared prefixes, log
probabilities, grammars, and some that are left in the middle. The device has 128 MiB, so that KV is
full after some hundreds of them. With fewer than 2,000 the second fifth comes before that: the
engine still grows.

Every answer must be right: greedy ones are compared with what was said to the same prompt alone. No
process of the system may grow (``soak_memory.verdicts`` is the rule). Prints one JSON document with
the memory over the time; ends with 1 if anything is wrong.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from cold_start import machine, until_unloaded
from soak_memory import MIB, ROLES, Sample, look, medians, told, verdicts
from soak_requests import Ask, ask, draw, fault, references

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_MODEL, demo_model_folder, ensure_demo_model
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.common.clock import SystemClock
from pilotlight.common.waiting import cancel_all, every

DEVICE_BYTES = 128 * MIB
POOL_BYTES = 256 * MIB
LOOK_S = 2.0
REQUEST_DEADLINE_S = 120.0
TOLD_FAULTS = 20
TOLD_SAMPLES = 60
TOLD_LINES = 40
SHOW_EVERY = 500


class Soak:
    """One run."""

    def __init__(self, options: SystemOptions, home: Home, seed: int) -> None:
        self.clock = SystemClock()
        self.samples: list[Sample] = []
        self.faults: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.done = 0
        self._model = DEMO_MODEL
        self._rng = random.Random(seed)
        self._references = references(self._model)
        self._answers: list[str] = []
        self._url = options.url
        self._key = home.api_key.read_text().strip()

    async def run(self, requests: int, at_once: int) -> None:
        """All requests, so many at once."""
        limits = httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        headers = {"Authorization": f"Bearer {self._key}"}
        async with httpx2.AsyncClient(
            base_url=self._url, headers=headers, timeout=REQUEST_DEADLINE_S, limits=limits
        ) as http:
            for body in self._references:
                answer = await ask(http, Ask("greedy", body))
                if answer.status != 200:
                    self.faults.append(f"reference: status {answer.status}: {answer.error}")
                self._answers.append(answer.text)
            looking = asyncio.create_task(self._look(), name="look at the processes")
            try:
                todo = iter(range(requests))
                await asyncio.gather(*(self._ask_on(http, todo) for _ in range(at_once)))
                self._sample()
            finally:
                await cancel_all([looking])

    async def _ask_on(self, http: httpx2.AsyncClient, todo: Iterator[int]) -> None:
        for _ in todo:
            one = draw(self._rng, self._model, self._references)
            try:
                wrong = fault(one, await ask(http, one), self._answers)
            except (httpx2.HTTPError, json.JSONDecodeError) as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                self.faults.append(f"{one.kind}, {'streamed' if one.stream else 'whole'}: {wrong}")
            self.kinds[one.kind] += 1
            self.done += 1
            if self.done % SHOW_EVERY == 0:
                self._sample()
                sizes = {
                    role: told(taken)["rss_mib"] for role, taken in self.samples[-1].taken.items()
                }
                print(
                    f"… {self.done} requests, {len(self.faults)} wrong, RSS in MiB: {sizes}",
                    file=sys.stderr,
                    flush=True,
                )

    async def _look(self) -> None:
        async for _ in every(LOOK_S):
            self._sample()

    def _sample(self) -> None:
        self.samples.append(Sample(self.done, self.clock.monotonic_s(), look(os.getpid())))


async def measure(home: Home, requests: int, at_once: int, seed: int) -> dict[str, Any]:
    """Run everything on a system of its own."""
    os.environ["PILOTLIGHT_DEVICE_BYTES"] = str(DEVICE_BYTES)
    options = SystemOptions(
        port=free_port(), pool_bytes=POOL_BYTES, model_roots=(demo_model_folder().parent,)
    )
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        before = look(os.getpid())
        soak = Soak(options, home, seed)
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            await asyncio.to_thread(ensure_demo_model, admin)
            start_s = soak.clock.monotonic_s()
            await soak.run(requests, at_once)
            took_s = soak.clock.monotonic_s() - start_s
            await asyncio.to_thread(admin.post, f"/models/{DEMO_MODEL}/evict")
            await until_unloaded(admin)
        after = look(os.getpid())
    wrong = verdicts(before, soak.samples, after, DEVICE_BYTES)
    if soak.faults:
        wrong.append(f"{len(soak.faults)} of {soak.done} answers were wrong")
    return {
        "machine": machine(),
        "requests": soak.done,
        "at_once": at_once,
        "seconds": round(took_s, 1),
        "kinds": dict(soak.kinds),
        "wrong": wrong,
        "wrong_answers": soak.faults[:TOLD_FAULTS],
        "processes": {
            role: {
                "before": told(before[role]),
                "fifths": [told(taken) for taken in medians(soak.samples, role)],
                "evicted": told(after[role]),
            }
            for role in (*ROLES.values(), "nats-server")
            if role in before and role in after
        },
        "over_time": _over_time(soak.samples),
    }


def _over_time(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Some of the samples: RSS in MiB."""
    return [
        {
            "done": sample.done,
            "at_s": round(sample.at_s - samples[0].at_s, 1),
            "rss_mib": {
                role: told(taken)["rss_mib"] for role, taken in sorted(sample.taken.items())
            },
        }
        for sample in samples[:: -(-len(samples) // TOLD_SAMPLES)]
    ]


def main() -> int:
    """Measure, judge and print."""
    parser = argparse.ArgumentParser(description="The whole system under thousands of requests.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotlight-soak-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        home = Home(Path(folder) / "home")
        result = asyncio.run(measure(home, arguments.requests, arguments.at_once, arguments.seed))
        if result["wrong"]:
            result["log_ends"] = {
                path.name: path.read_text(errors="replace").splitlines()[-TOLD_LINES:]
                for path in sorted(home.logs.glob("*.log"))
            }
    print(json.dumps(result, indent=2))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
