"""What tokens cost on their way, in processor time: ``python bench/token_path.py``.

One nats-server, one worker process with a simulated engine, and this process in the place of a
gateway: it submits, takes tokens and acknowledges with the gateway's own ``Relay``, and does
nothing else. The engine takes no time (``--step-s 0``), or as long as a model's step.

::

    engine ─> worker ─> NATS ─> Relay ─> one task for each stream

Prints a line of JSON for each number of streams at a time: milliseconds of processor time of the
worker, of nats-server and of this process for each request, the rate, and the gaps that a stream
sees between its pieces. Processor time says more than the clock where other programs run.
"""

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from pilotlight.cli.embedded import NatsServer
from pilotlight.common.clock import SystemClock
from pilotlight.common.messages.hold import Hold, WorkerHold, worker_hold_subject
from pilotlight.common.messages.reports import WORKER_REPORTS, WorkerReport
from pilotlight.common.messages.tokens import Submit
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import server_config
from pilotlight.common.service import Background
from pilotlight.common.settings import BusSettings
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.relay import Relay
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import (
    Digest,
    Epoch,
    GatewayId,
    Generation,
    InstanceId,
    ModelName,
    RequestId,
    WorkerId,
)
from pilotlight.policy.model import Dtype, Model, ScalingBounds, Slo
from pilotlight.policy.request import Sampling
from pilotlight.policy.testing import tiny_spec

WORKER, GATEWAY, INSTANCE = WorkerId("node-bench-w0"), GatewayId("gw-bench"), InstanceId("inst-1")
ROOM_BYTES = 1 << 30
START_S, ANSWER_S = 30.0, 60.0
PROMPT_IDS = list(range(1, 33))
NS = 1e-9


@dataclass
class Row:
    """What a number of streams at a time came to."""

    gaps_s: list[float] = field(default_factory=list[float])
    first_s: list[float] = field(default_factory=list[float])
    pieces: int = 0
    tokens: int = 0


def cpu_s(pid: int) -> float:
    """Processor time of a process and all of its threads, in seconds."""
    tasks = Path(f"/proc/{pid}/task")
    return NS * sum(int((one / "schedstat").read_text().split()[0]) for one in tasks.iterdir())


def child_named(name: str) -> int:
    """This process's child whose program is called so."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text()[:-1] == name)


def model() -> Model:
    """Anything that the simulation runs."""
    return Model(
        name=ModelName("bench"),
        uri="file:///models/bench",
        revision=None,
        source_version="1",
        digest=Digest("a" * 64),
        text_digest=Digest("b" * 64),
        dtype=Dtype.BFLOAT16,
        spec=tiny_spec(),
        slo=Slo(ttft_ms=1000.0, tpot_ms=100.0),
        scaling=ScalingBounds(),
    )


async def hold(bus: NatsBus) -> None:
    """Have the worker hold the model, and wait until it does."""
    held = asyncio.Event()

    async def on_report(report: WorkerReport) -> None:
        if any(stage.state is HeldState.READY for stage in report.facts.held):
            held.set()
            return
        it = model()
        wanted = Hold(
            instance_id=INSTANCE,
            generation=Generation(1),
            model=it,
            stage=it.spec.whole,
            device_bytes=ROOM_BYTES,
        )
        command = WorkerHold(worker_id=WORKER, epoch=Epoch(1), holds=(wanted,))
        await bus.publish(worker_hold_subject(WORKER), command)

    subscription = await bus.subscribe(WORKER_REPORTS, WorkerReport, on_report)
    async with asyncio.timeout(START_S):
        await held.wait()
    await subscription.end()


async def ask(relay: Relay, number: int, tokens: int, row: Row, *, logprobs: bool) -> None:
    """One stream."""
    submit = Submit(
        request_id=RequestId(f"req-{number:08d}-{os.getpid()}"),
        attempt=1,
        gateway_id=GATEWAY,
        instance_id=INSTANCE,
        model=ModelName("bench"),
        prompt_ids=PROMPT_IDS,
        sampling=Sampling(
            seed=number, max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs
        ),
    )
    begun_s = last_s = time.perf_counter()
    attempt = relay.open(submit.request_id, 1, WORKER, INSTANCE, 0)
    reply = await relay.submit(attempt, submit, WORKER)
    if not reply.accepted:
        raise SystemExit(f"refused: {reply.message}")
    got = 0
    while attempt.finish is None or got < tokens:
        fresh = await attempt.next(ANSWER_S)
        now_s = time.perf_counter()
        if fresh:
            (row.gaps_s if got else row.first_s).append(now_s - (last_s if got else begun_s))
            got, last_s = got + len(fresh), now_s
            row.pieces += 1
    row.tokens += got
    relay.close(attempt)


async def measure(relay: Relay, pids: dict[str, int], options: argparse.Namespace) -> None:
    """Every number of streams."""
    numbers = itertools.count()
    for concurrent in options.concurrent:
        for counted in (False, True):
            row, requests = Row(), max(concurrent, options.requests if counted else concurrent)
            left = iter(range(requests))

            async def one_after_the_other(row: Row = row, left: Iterator[int] = left) -> None:
                for _ in left:
                    await ask(relay, next(numbers), options.tokens, row, logprobs=options.logprobs)

            before = {name: cpu_s(pid) for name, pid in pids.items()}
            begun_s = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrent):
                    group.create_task(one_after_the_other())
            took_s = time.perf_counter() - begun_s
            cpu = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
            if not counted:
                continue
            gaps = sorted(row.gaps_s)
            print(
                json.dumps(
                    {
                        "concurrent": concurrent,
                        "requests": requests,
                        "cpu_ms_per_request": {
                            name: round(1000 * spent / requests, 3) for name, spent in cpu.items()
                        },
                        "requests_per_s": round(requests / took_s, 1),
                        "tokens_per_piece": round(row.tokens / row.pieces, 2),
                        "first_ms_p50": round(1000 * statistics.median(row.first_s), 2),
                        "gap_ms_p50": round(1000 * gaps[len(gaps) // 2], 2) if gaps else None,
                        "gap_ms_p99": round(1000 * gaps[len(gaps) * 99 // 100], 2)
                        if gaps
                        else None,
                    }
                ),
                flush=True,
            )


def free_port() -> int:
    """One that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def run(options: argparse.Namespace, folder: Path) -> None:
    """Start everything, measure, stop it."""
    server = NatsServer(folder / "nats", free_port(), server_config({}))
    (folder / "nats").mkdir()
    await server.start()
    environment = {
        **os.environ,
        "PILOTLIGHT_NATS_URL": server.url,
        "PILOTLIGHT_NODE_ID": "node-bench",
        "PILOTLIGHT_RUN_DIR": str(folder / "run"),
        "PILOTLIGHT_OBJECT_STORE_URL": f"file://{folder}/store",
        "PILOTLIGHT_SIM_DECODE_STEP_S": str(options.step_s),
        "PILOTLIGHT_SIM_PREFILL_TOKENS_PER_S": "1e12",
        "PILOTLIGHT_DEVICE_BYTES": str(ROOM_BYTES),
        "PILOTLIGHT_LOG_LEVEL": "warning",
        "PILOTLIGHT_TRACE_SAMPLE_RATIO": "0.01",
        "PILOTLIGHT_MAX_REQUESTS": "4096",
    }
    (folder / "run").mkdir()
    command = [sys.executable, "-m", "pilotlight.worker", "--sim", "1"]
    worker = await asyncio.create_subprocess_exec(*command, env=environment)
    bus = await NatsBus.connect(
        BusSettings(nats_url=server.url, secrets_dir=None), user="gateway", name="bench"
    )
    background, clock = Background(), SystemClock()
    fleet = Fleet(bus, clock, background)
    relay = Relay(bus, clock, background, fleet, GATEWAY)
    try:
        await relay.start()
        await hold(bus)
        pids = {"worker": worker.pid, "nats": child_named("nats-server"), "receiver": os.getpid()}
        await measure(relay, pids, options)
        await relay.stop()
    finally:
        worker.terminate()
        async with asyncio.timeout(START_S):
            await worker.wait()
        await background.stop()
        await bus.close()
        await server.stop()


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--requests", type=int, default=1000, help="at each number of streams")
    parser.add_argument("--tokens", type=int, default=32, help="of each stream")
    parser.add_argument("--step-s", type=float, default=0.0, help="of the engine")
    parser.add_argument("--logprobs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="token-path-") as folder:
        uvloop.run(run(options, Path(folder)))


if __name__ == "__main__":
    main()
