"""One instance of ``bench/promises.py``: the engine's own scheduler, a device that takes time, and
gateways before it (``promises_gateways.py``).

The figures of a device are fitted to what was served on an H200, those of 8B to the times of its
steps (docs/benchmarks.md).
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from promises_gateways import WAY_S, Asked, Gateways, Handed
from served_gpu_client import Answer

from pilotlight.engine.core.batch import Batch, Plan
from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockPool
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.pace import Pace
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.policy.fairness import NO_TENANT
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import Promise, RequestKey, Sampling

KV_TOKENS = 600_000
IDLE_S = 0.0005
NOISE = (0.97, 1.06)
FIRST_STREAMS = 8
COMPILING = (2.0, 3.0)
"""A step whose kernels compile takes so many times as long."""
SIZE_TOKENS = 512
"""Prompts of a step that differ by less are of one size."""


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds of a step: of each one, of each of its first streams and of what more there are, of a
    token of their contexts, of a prompt's token and of each that it attends to, and the least of a
    step with prompts, which is no graph.
    """

    step_s: float
    first_stream_s: float
    stream_s: float
    context_token_s: float
    prompt_token_s: float
    attended_s: float
    eager_s: float

    def takes_s(self, batch: Batch) -> float:
        """Of a batch."""
        streams = [one for one in batch.segments if one.count == 1]
        prompts = [one for one in batch.segments if one.count > 1]
        context = sum(one.stop for one in streams)
        first = min(len(streams), FIRST_STREAMS)
        seconds = self.step_s + self.first_stream_s * first + self.context_token_s * context
        seconds += self.stream_s * (len(streams) - first)
        for one in prompts:
            seconds += one.count * self.prompt_token_s
            seconds += one.count * (one.start + one.count / 2) * self.attended_s
        return max(seconds, self.eager_s) if prompts else seconds


DEVICES = {
    "4B": Device(0.00246, 60e-6, 6e-6, 0.10e-6, 10.1e-6, 0.94e-9, 0.012),
    "8B": Device(0.00450, 31e-6, 9e-6, 0.032e-6, 20.7e-6, 1.33e-9, 0.0165),
}
PLANS_S, PROMPTS_S = 0.002, 0.004
"""The device waits so long for a step that is planned when the one before it has ended; for one
with prompts."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What goes wrong beside the load."""

    compiled_steps: int = 0
    """As many steps of each new size of prompts take ``COMPILING`` times as long."""
    predicted: float = 1.0
    """What is predicted, as a part of what was learned."""
    host_s: float = 0.0
    """As much longer does each step with prompts take."""


class WrongPace(Pace):
    """Learns as ever, and predicts a share of it."""

    __slots__ = ("_share",)

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def streams_s(self, contexts: Iterable[int]) -> float | None:
        """As learned, times the share."""
        seconds = super().streams_s(contexts)
        return None if seconds is None else seconds * self._share

    @property
    def launches_s(self) -> float:
        """As learned, times the share."""
        return super().launches_s * self._share

    @property
    def prompt_token_s(self) -> float | None:
        """As learned, times the share."""
        seconds = super().prompt_token_s
        return None if seconds is None else seconds * self._share


class Served:
    """One instance, asked at the times of a trace, or by clients in turn."""

    def __init__(
        self, device: Device, limits: BatchLimits, seed: int, trial: Trial | None = None
    ) -> None:
        tables = BlockTables(BlockPool(KV_TOKENS // BLOCK_TOKENS), "bench", prefix_cache=False)
        self._scheduler = BatchScheduler(tables, limits)
        self._device, self._dice = device, random.Random(seed)
        self._trial, self._sizes = trial or Trial(), Counter[int]()
        if trial is not None:
            self._scheduler.promises.pace = WrongPace(trial.predicted)
        self._promise, self._began_s = Promise(), 0.0
        self._answers: dict[RequestKey, Answer] = {}
        self._gateways = Gateways(self._dice)
        self._through: dict[RequestKey, int] = {}
        """Which gateway."""
        self._coming: list[Handed] = []
        self._next: list[Asked] = []
        self._ahead: Plan | None = None
        self._now_s = 0.0

    def arriving(self, asked: Sequence[Asked], promise: Promise) -> list[Answer]:
        """At the times of a trace."""
        self._promise, self._began_s = promise, self._now_s
        for one in asked:
            self._gateways.ask(self._began_s + one.at_s, one)
        return self._run()

    def in_turn(self, asked: Sequence[Asked], clients: int, promise: Promise) -> list[Answer]:
        """By so many clients, each with the next as soon as it has an answer."""
        self._promise, self._began_s = promise, self._now_s
        self._next = list(asked[clients:])
        for one in asked[:clients]:
            self._gateways.ask(self._began_s, one)
        return self._run()

    def _run(self) -> list[Answer]:
        while self._waits_for_none():
            while self._coming and self._coming[0].at_s <= self._now_s:
                self._ask(heapq.heappop(self._coming))
            if self._scheduler.has_work:
                self._step()
        answers, self._answers = list(self._answers.values()), {}
        return answers

    def _waits_for_none(self) -> bool:
        """Lets what was sent until now reach the engine; where nothing is there, the next comes.

        False: nothing comes any more.
        """
        self._hand_over(self._now_s)
        if not self._scheduler.has_work:
            begins_s = self._gateways.begins_s
            if not self._coming and begins_s is not None:
                self._hand_over(begins_s)
            if not self._coming:
                return False
            self._now_s = max(self._now_s, self._coming[0].at_s)
        return True

    def _hand_over(self, until_s: float) -> None:
        for one in self._gateways.handed(until_s):
            heapq.heappush(self._coming, one)

    def _ask(self, handed: Handed) -> None:
        asked = handed.asked
        key = RequestKey(RequestId(f"{self._began_s}-{len(self._answers)}"), 0)
        sampling = Sampling(seed=0, max_tokens=asked.output_tokens)
        request = Request(key, [0] * asked.prompt_tokens, (), sampling, KV_TOKENS)
        request.stands(NO_TENANT, self._promise, handed.known_s)
        request.queued_s = max(self._now_s, handed.at_s)
        self._answers[key] = Answer(None, handed.sent_s, prompt_tokens=asked.prompt_tokens)
        self._through[key] = handed.gateway
        self._scheduler.submit(request)

    def _step(self) -> None:
        """One step, and the next one's plan where it is made before this one's tokens are known."""
        began_s, ahead = self._now_s, self._ahead is not None
        plan = self._ahead or self._scheduler.schedule(began_s)
        if not plan.requests:
            self._now_s += IDLE_S
            return
        prompts = any(one.count > 1 for one in plan.batch.segments)
        waits_s = 0.0 if ahead else PROMPTS_S if prompts else PLANS_S
        ends_s = began_s + waits_s + self._takes_s(plan.batch)
        self._ahead = self._following(plan, ends_s)
        self._now_s = ends_s
        self._scheduler.advance(plan)
        self._scheduler.promises.pace.ran(plan.batch, began_s, self._now_s)
        self._hand_out(plan)

    def _following(self, plan: Plan, ends_s: float) -> Plan | None:
        """What is launched behind a step that begins now, with all that has come until then
        (``engine.lookahead``).
        """
        course = self._scheduler.promises.pace.course_of(plan.batch, self._now_s)
        at_s = self._now_s if course is None else min(max(self._now_s, course.plan_s), ends_s)
        self._hand_over(at_s)
        while self._coming and self._coming[0].at_s <= at_s:
            self._ask(heapq.heappop(self._coming))
        return self._scheduler.follow_on(plan, at_s, ends_s=course.ends_s if course else None)

    def _takes_s(self, batch: Batch) -> float:
        seconds = self._device.takes_s(batch) * self._dice.uniform(*NOISE)
        tokens = sum(one.count for one in batch.segments if one.count > 1)
        if not tokens:
            return seconds
        seconds += self._trial.host_s
        size = -(-tokens // SIZE_TOKENS)
        self._sizes[size] += 1
        compiles = self._sizes[size] <= self._trial.compiled_steps
        return seconds * self._dice.uniform(*COMPILING) if compiles else seconds

    def _hand_out(self, plan: Plan) -> None:
        self._hand_over(self._now_s + WAY_S)
        self._gateways.receive(self._now_s)
        for request in plan.sampled:
            answer, first = self._answers[request.key], request.first_s is None
            gateway, last = self._through[request.key], request.about_to_end
            told_s = self._gateways.tell(gateway, first=first, last=last)
            if first:
                request.first_s, request.first_position = self._now_s, request.position
                answer.first_s = told_s
            else:
                answer.gaps_s.append(told_s - answer.last_s)
            answer.last_s = told_s
            answer.output_tokens, answer.events = answer.output_tokens + 1, answer.events + 1
            if request.accept(0) is not None:
                self._scheduler.end(request, RequestEvent.FINISH)
                if self._next:
                    self._gateways.ask(told_s, self._next.pop(0), gateway)
