"""Which limits of a step suit prompts that come together: ``python bench/admission.py``.

A simulation of clients that ask again as soon as they are answered, as those of ``make
bench-served-gpu`` do, on the engine's own batch scheduler. What a step takes is a straight line
through what was measured on an H200 (``docs/benchmarks.md``); a gateway hands requests over one by
one, each so long after the other. For each choice of limits it prints what clients see, beside
vLLM's figures in ``bench/results/served_gpu.json``, and in how many of all figures vLLM is better.
"""

import argparse
import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pilotlight.engine.core.batch import Plan
from pilotlight.engine.core.blocks import BlockPool
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import FinishReason, RequestKey, Sampling

PROMPT_TOKENS, OUTPUT_TOKENS, TURNS = 161, 128, {8: 6, 64: 3, 128: 3}
WAY_S = 0.003
"""From a client to the engine, beside the time for which the gateway has the request alone."""
BLOCKS = 1 << 14
SEEDS = 2
FIGURES = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "itl_ms_p50", "itl_ms_p99")
RATE = "output_tokens_per_s"
SERVED = Path(__file__).with_name("results") / "served_gpu.json"


@dataclass(frozen=True)
class Machine:
    """What a step takes, in milliseconds."""

    step_ms: float
    request_ms: float
    """As much more for each request that gets a token."""
    prompt_token_ms: float

    def takes_s(self, plan: Plan) -> float:
        """Of one batch."""
        prompts = sum(one.count for one in plan.batch.segments if one.count > 1)
        rows = len(plan.requests)
        return (self.step_ms + self.request_ms * rows + self.prompt_token_ms * prompts) / 1000


MACHINES = {"4B": Machine(2.36, 0.034, 0.0115), "8B": Machine(4.2, 0.022, 0.0230)}


@dataclass
class Seen:
    """What one client saw of one request."""

    asked_s: float
    came_s: list[float] = field(default_factory=list[float])


def closed_loop(
    machine: Machine, limits: BatchLimits, clients: int, apart_s: float, seed: int
) -> dict[str, float]:
    """What so many clients see."""
    scheduler = BatchScheduler(BlockTables(BlockPool(BLOCKS), "m", prefix_cache=False), limits)
    dice, now_s, gateway_s = random.Random(seed), 0.0, 0.0
    coming: list[tuple[float, int]] = []
    seen: list[Seen] = []

    def ask() -> None:
        nonlocal gateway_s
        if len(seen) < clients * TURNS[clients]:
            gateway_s = max(gateway_s, now_s) + apart_s
            heapq.heappush(coming, (gateway_s + WAY_S * dice.uniform(0.5, 1.5), len(seen)))
            seen.append(Seen(now_s))

    for _ in range(clients):
        ask()
    sampling = Sampling(seed=0, max_tokens=OUTPUT_TOKENS, temperature=0.0)
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            at_s, number = heapq.heappop(coming)
            key = RequestKey(RequestId(str(number)), 1)
            request = Request(key, [1] * PROMPT_TOKENS, (), sampling, 4096)
            request.queued_s = at_s
            scheduler.submit(request)
        plan = scheduler.schedule(now_s)
        now_s += machine.takes_s(plan)
        scheduler.advance(plan)
        for request in plan.sampled:
            seen[int(request.key.request_id)].came_s.append(now_s)
            if request.accept(1) is FinishReason.LENGTH:
                scheduler.end(request, RequestEvent.FINISH)
                ask()
    return figures(seen, now_s)


def figures(seen: Sequence[Seen], took_s: float) -> dict[str, float]:
    """As ``bench/served_gpu.py`` has them."""

    def at(values: Sequence[float], share: float) -> float:
        return 1000 * sorted(values)[int(share * (len(values) - 1))]

    first = [one.came_s[0] - one.asked_s for one in seen]
    gaps = [b - a for one in seen for a, b in zip(one.came_s, one.came_s[1:], strict=False)]
    each = [(one.came_s[-1] - one.came_s[0]) / (len(one.came_s) - 1) for one in seen]
    values = (at(first, 0.5), at(first, 0.99), at(each, 0.5), at(gaps, 0.5), at(gaps, 0.99))
    rate = sum(len(one.came_s) for one in seen) / took_s
    return {**dict(zip(FIGURES, values, strict=True)), RATE: rate}


def vllms() -> dict[str, float]:
    """What vLLM's clients saw, by the name of the measurement."""
    document = json.loads(SERVED.read_text())
    return {one["what"]: one["medians"].get("vLLM", 0.0) for one in document["measurements"]}


def main() -> None:
    """Try every choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[512, 2048, 8192, 10240])
    parser.add_argument("--gather-ms", type=float, nargs="+", default=[0.0, 10.0])
    parser.add_argument("--apart-ms", type=float, nargs="+", default=[0.3, 0.6, 1.0, 1.5])
    options = parser.parse_args()
    peer = vllms()
    for step_tokens in options.step_tokens:
        for gather_ms in options.gather_ms:
            limits = BatchLimits(step_tokens=step_tokens, gather_s=gather_ms / 1000)
            missed = compared = 0
            for name, machine in MACHINES.items():
                for clients in TURNS:
                    for apart_ms in options.apart_ms:
                        runs = [
                            closed_loop(machine, limits, clients, apart_ms / 1000, seed)
                            for seed in range(SEEDS)
                        ]
                        row = {one: round(fmean(run[one] for run in runs), 2) for one in runs[0]}
                        for one, value in row.items():
                            theirs = peer[f"{name}: {clients} concurrent: {one}"]
                            missed += value < theirs if one == RATE else value > theirs
                            compared += 1
                        print(f"  {name}, {clients} clients, {apart_ms} ms apart: {row}")
            print(
                f"{step_tokens} tokens, {gather_ms} ms: missed {missed} of {compared}", flush=True
            )


if __name__ == "__main__":
    main()
