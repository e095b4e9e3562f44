"""How busy micro-batches keep the stages of a group: ``make bench-groups-busy``.

A system on this machine, as ``groups`` starts it, whose group keeps its stages
(``PILOTLIGHT_CONSOLIDATE``). Several requests run at once, and while all of them do, the processor
time of each stage's engine is taken, which has one thread: its share of the time that passes is how
much of it the stage computes. Beside it one worker with the whole model.

The last line is ``RESULT`` and JSON: for each number of stages and of requests, that share by
stage, and tokens a second of all requests. The engines need a core each.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cold_start import machine
from groups import MODEL, PROMPT, SETTINGS, SLO, write_model
from openai import OpenAI

from pilotlight.cli.client import AdminClient
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.common.clock import SystemClock

ENGINE = b"pilotlight.worker.engine_main"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WORKER = b"PILOTLIGHT_WORKER_ID="


def engines() -> dict[str, int]:
    """The engine of each worker on this machine, by the worker's id."""
    found: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if ENGINE in words:
                worker = int(words[words.index(b"--parent") + 1])
                variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
                (one,) = (value for value in variables if value.startswith(WORKER))
                found[one.removeprefix(WORKER).decode()] = int(process.name)
        except OSError:
            continue  # It has ended meanwhile.
    return found


def computed_s(pid: int) -> float:
    """Processor time of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS_PER_S


def keep_apart(pids: list[int]) -> None:
    """A core for each engine, as stages have on nodes of their own. One wakes the other, and the
    system may have them take turns on one core while another one is idle.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(pids):
        raise SystemExit(f"{len(pids)} engines need as many cores, and there are {len(cores)}")
    for core, pid in zip(cores, pids, strict=False):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


@dataclass(slots=True)
class Window:
    """The time in which all requests have a first token and none has its last."""

    pids: list[int]
    """Engines, the one that leads first."""
    requests: int
    came: int = 0
    """Tokens in it."""
    began_s: float = 0.0
    took_s: float = 0.0
    shares: list[float] = field(default_factory=list[float])
    _running: int = 0
    _before_s: list[float] = field(default_factory=list[float])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def token(self, now_s: float, *, first: bool, last: bool) -> None:
        """One came, of any request."""
        with self._lock:
            self._running += first
            if self.took_s:
                return
            if last and self.began_s:
                self.took_s = now_s - self.began_s
                after_s = map(computed_s, self.pids)
                self.shares = [
                    (after - before) / self.took_s
                    for after, before in zip(after_s, self._before_s, strict=True)
                ]
            elif self.began_s:
                self.came += 1
            elif self._running == self.requests:
                self.began_s, self._before_s = now_s, list(map(computed_s, self.pids))


def under_load(
    options: SystemOptions, home: Home, pids: list[int], requests: int, tokens: int
) -> dict[str, Any]:
    """The figures of some requests at once."""
    window, clock = Window(pids, requests), SystemClock()
    key = home.api_key.read_text().strip()

    def one(number: int) -> None:
        with OpenAI(base_url=f"{options.url}/v1", api_key=key, max_retries=0, timeout=600) as asks:
            stream = asks.completions.create(
                model=MODEL,
                prompt=f"{number}: {PROMPT}",
                temperature=0,
                max_tokens=tokens,
                stream=True,
                logprobs=0,
                extra_body={"ignore_eos": True},
            )
            came = 0
            for chunk in stream:
                for choice in chunk.choices:
                    for _ in choice.logprobs.tokens or () if choice.logprobs else ():
                        came += 1
                        now_s = clock.monotonic_s()
                        window.token(now_s, first=came == 1, last=came == tokens)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not window.took_s:
        raise SystemExit(f"{requests} requests of {tokens} tokens were never all under way")
    return {
        "computing": [round(share, 3) for share in window.shares],
        "tokens_per_s": round(window.came / window.took_s, 2),
        "window_s": round(window.took_s, 2),
    }


async def measure(
    root: Path, stages: int, loads: list[int], layers: int, tokens: int
) -> dict[str, Any]:
    """A system whose start has that many stages, under each load.

    Args:
        root: For its state, and the model.
        stages: Of the group; 1: one worker with the whole model.
        loads: Numbers of requests at once.
        layers: Of the model.
        tokens: Of each request.
    """
    folder = root / "model"
    if not folder.exists():
        await asyncio.to_thread(write_model, folder, layers)
    os.environ.update(SETTINGS, PILOTLIGHT_MAX_STAGES=str(stages), PILOTLIGHT_CONSOLIDATE="false")
    options = SystemOptions(port=free_port(), nodes=stages, link="200mbit", model_roots=(folder,))
    home = Home(root / f"home-{stages}")
    found: dict[str, Any] = {}
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            body = {
                "name": MODEL,
                "uri": folder.as_uri(),
                "slo": SLO,
                "dtype": "float32",
                "max_instances": 1,
            }
            await asyncio.to_thread(admin.post, "/models", body)
            await asyncio.to_thread(under_load, options, home, [], 1, 2)
            (one,) = (await asyncio.to_thread(admin.get, "/instances"))["instances"]
            places = [place["worker_id"] for place in one["body"]["placements"]]
            if len(places) != stages:
                raise SystemExit(f"a start of {stages} stages was expected, and had {len(places)}")
            pids = [engines()[place] for place in places]
            keep_apart(pids)
            for requests in loads:
                found[str(requests)] = await asyncio.to_thread(
                    under_load, options, home, pids, requests, tokens
                )
    shutil.rmtree(home.root, ignore_errors=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How busy micro-batches keep stages.")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotlight-groups-") as name:
        root = Path(name)
        # PostgreSQL runs as another user when we are root, and passes through.
        root.chmod(0o711)
        result: dict[str, Any] = {
            f"s{stages}": asyncio.run(
                measure(root, stages, asked.requests, asked.layers, asked.tokens)
            )
            for stages in asked.stages
        }
    result |= {"load": round(os.getloadavg()[0], 1), "machine": machine()}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
