"""What keeping promises gives an instance that is asked too much: ``make bench-promises``.

The engine's own scheduler (``pilotlight.engine.core``) in simulated time, under the arrivals and
lengths of ``bench/served_gpu.py``'s conversations: ten seconds at three rates for each of two
models, five draws. Steps take what they took on an H200, by five figures fitted to ``as served`` in
docs/benchmarks.md; nothing else of a GPU is in it. Compared are steps that keep promises
(``BatchLimits.keep_promises``), steps that do not, and steps as vLLM's defaults make them: up to
8,192 tokens, first come, first served. Goodput is as there: TTFT of at most 200 ms, TPOT of at most
20 ms.

Prints one JSON document in the form of ``bench/results``.
"""

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import served_gpu_load as load
from served_gpu import commit, conversations, machine

from pilotlight.engine.core.batch import Batch, Plan
from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockPool
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.policy.fairness import NO_TENANT
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import Promise, RequestKey, Sampling

RATES = {"4B": (8.0, 16.0, 32.0), "8B": (6.0, 12.0, 24.0)}
WINDOW_S, SEEDS = 10.0, range(20_231_121, 20_231_126)
SLO = Promise(first_token_in_s=load.TTFT_MS / 1000, token_s=load.TPOT_MS / 1000)
KV_TOKENS = 600_000
AROUND_S = 0.008
"""From a client to the engine and back."""
IDLE_S = 0.0005
NOISE = (0.97, 1.06)
NOT_KEPT = BatchLimits(
    step_tokens=10_240, chunk_tokens=1024, running=256, gather_s=0.010, prefix_cache=False
)
"""As a GPU's engine has them, but for promises."""
WAYS = {
    "kept": replace(NOT_KEPT, keep_promises=True),
    "not kept": NOT_KEPT,
    "vLLM's defaults": BatchLimits(step_tokens=8192, running=256, prefix_cache=False),
}


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds of a step: of each one, of a prompt's token, of a stream, of a token of its context,
    and the least of one with prompts, which is no graph.
    """

    step_s: float
    prompt_token_s: float
    stream_s: float
    context_token_s: float
    eager_s: float = 0.009

    def takes_s(self, batch: Batch) -> float:
        """Of a batch."""
        streams = [one for one in batch.segments if one.count == 1]
        prompt_tokens = batch.num_tokens - len(streams)
        context = sum(one.stop for one in streams)
        seconds = self.step_s + self.stream_s * len(streams) + self.context_token_s * context
        seconds += self.prompt_token_s * prompt_tokens
        return max(seconds, self.eager_s) if prompt_tokens else seconds


DEVICES = {
    "4B": Device(0.00235, 13.5e-6, 20e-6, 0.10e-6),
    "8B": Device(0.00415, 26.5e-6, 14e-6, 0.06e-6),
}


@dataclass(slots=True)
class Told:
    """A request's times."""

    came_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0

    @property
    def good(self) -> bool:
        """Within the SLO."""
        tpot_s = (self.last_s - self.first_s) / max(1, self.tokens - 1)
        ttft_s = self.first_s - self.came_s + AROUND_S
        return ttft_s * 1000 <= load.TTFT_MS and tpot_s * 1000 <= load.TPOT_MS


class Served:
    """One instance, asked at the times of a trace."""

    def __init__(self, device: Device, limits: BatchLimits, seed: int) -> None:
        tables = BlockTables(BlockPool(KV_TOKENS // BLOCK_TOKENS), "bench", prefix_cache=False)
        self._scheduler = BatchScheduler(tables, limits)
        self._device, self._dice = device, random.Random(seed)
        self._told: dict[RequestKey, Told] = {}
        self._now_s = 0.0

    def run(self, rate_per_s: float, seed: int) -> tuple[float, float]:
        """Goodput in requests a second, and tokens a second."""
        count = round(rate_per_s * WINDOW_S)
        prompts, outputs = conversations(count, seed, 1)
        due = list(zip(load.arrivals(count, rate_per_s, seed), prompts, outputs, strict=True))
        while due or self._scheduler.has_work:
            while due and due[0][0] <= self._now_s:
                self._ask(*due.pop(0))
            if self._scheduler.has_work:
                self._step()
            else:
                self._now_s = due[0][0]
        told = self._told.values()
        good = sum(one.good for one in told) / count * rate_per_s
        return good, sum(one.tokens for one in told) / max(one.last_s for one in told)

    def _ask(self, came_s: float, prompt_tokens: int, output_tokens: int) -> None:
        key = RequestKey(RequestId(str(len(self._told))), 0)
        sampling = Sampling(seed=0, max_tokens=output_tokens)
        request = Request(key, [0] * prompt_tokens, (), sampling, KV_TOKENS)
        request.stands(NO_TENANT, SLO, came_s)
        request.queued_s = self._now_s
        self._told[key] = Told(came_s)
        self._scheduler.submit(request)

    def _step(self) -> None:
        plan = self._scheduler.schedule(self._now_s)
        if not plan.requests:
            self._now_s += IDLE_S
            return
        began_s = self._now_s
        self._now_s += self._device.takes_s(plan.batch) * self._dice.uniform(*NOISE)
        self._scheduler.advance(plan)
        self._scheduler.promises.pace.ran(plan.batch, began_s, self._now_s)
        self._hand_out(plan)

    def _hand_out(self, plan: Plan) -> None:
        for request in plan.sampled:
            told = self._told[request.key]
            if request.first_s is None:
                request.first_s, request.first_position = self._now_s, request.position
                told.first_s = self._now_s
            told.last_s, told.tokens = self._now_s, told.tokens + 1
            if request.accept(0) is not None:
                self._scheduler.end(request, RequestEvent.FINISH)


def measured(shape: str, rate_per_s: float) -> dict[str, Sequence[tuple[float, float]]]:
    """Each way's goodput and tokens a second, by seed."""
    return {
        way: [Served(DEVICES[shape], limits, seed).run(rate_per_s, seed) for seed in SEEDS]
        for way, limits in WAYS.items()
    }


def main() -> None:
    """Simulate and print."""
    named, _, day = commit().partition(" ")
    rows: list[dict[str, object]] = []
    for shape, rates in RATES.items():
        for rate_per_s in rates:
            found = measured(shape, rate_per_s)
            for place, what, unit in (
                (0, "goodput", "good requests/s"),
                (1, "output tokens", "tokens/s"),
            ):
                samples = {
                    way: [round(one[place], 2) for one in runs] for way, runs in found.items()
                }
                rows.append(
                    {
                        "what": f"{shape}, {rate_per_s:g} requests/s: {what}",
                        "command": "make bench-promises",
                        "machine": machine(),
                        "load": "simulated time",
                        "commit": named,
                        "commit_date": day,
                        "date": datetime.now(UTC).date().isoformat(),
                        "unit": unit,
                        "samples": samples,
                        "medians": {way: statistics.median(runs) for way, runs in samples.items()},
                    }
                )
    print(json.dumps({"benchmark": "promises", "measurements": rows}, indent=1))


if __name__ == "__main__":
    main()
