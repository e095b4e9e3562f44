"""One step of lookahead: the host launches a batch before it has read the tokens of the batch
before.

::

    host     launch n | launch n + 1 | wait for n, hand out n | launch n + 2 | wait for n + 1, hand out n + 1 | ...
    device             [ n ............. )[ n + 1 ................. )[ n + 2 ....

The tokens of n are the inputs of n + 1 before the host has seen them. What the host then learns
from n (a stop token, an abort, a preemption) makes a row of n + 1 void: its result is dropped. Its
key and value went where the request's next position was. If another request gets that block, it
writes there later on the same stream, over them.

Prompts join n + 1, too: else the device would wait at each newcomer, and at each step that promises
keep free of prompts, for the host to have planned. Behind a step with prompts, which is long, that
is planned shortly before its end, with all that has come by then; until then the host rests, and
hears who comes (``LaunchedStep.rest_s``).
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.compute import Launcher
from pilotlight.engine.core.batch import Plan
from pilotlight.engine.core.lifecycle import RequestState
from pilotlight.engine.core.pace import Pace
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.sampler import NotSampled, PendingTokens, SampledToken

SHORT_S = 0.0005
"""Not worth a look at anything else."""
LOOK_S = 0.002
"""So often is looked whether a step has ended after all."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """What is left of a launched batch when its tokens are there."""

    plan: Plan
    """Of the requests that still run as they did."""
    requests: tuple[Request, ...]
    """Those of them that got a token."""
    sampled: tuple[SampledToken | NotSampled, ...]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A batch that is under way on the device, and its tokens."""

    plan: Plan
    takes: tuple[int, ...]
    """How often each of the plan's requests had been taken up: one that was preempted since is
    another one."""
    tokens: PendingTokens
    since_s: float = -math.inf
    """Since when the device runs it, on the engine's clock; long ago, before the batch before has
    ended."""
    ends_s: float | None = None
    """When it is expected to end; None: not known."""
    plan_s: float = -math.inf
    """When what follows is to be planned."""

    def begun(self, now_s: float, pace: Pace) -> "LaunchedStep":
        """The same, from when the device runs it."""
        course = pace.course_of(self.plan.batch, now_s)
        if course is None:
            return replace(self, since_s=now_s)
        return replace(self, since_s=now_s, ends_s=course.ends_s, plan_s=course.plan_s)

    def rest_s(self, now_s: float) -> float:
        """How long the host has nothing to do for what follows, which is planned as late as can be:
        for what comes meanwhile.
        """
        left_s = self.plan_s - now_s
        return 0.0 if left_s < SHORT_S or self.tokens.there else min(left_s, LOOK_S)

    def wait(self) -> FinishedStep:
        """Waits for the tokens."""
        sampled = self.tokens.wait()
        alive = {
            place
            for place, (request, takes) in enumerate(
                zip(self.plan.requests, self.takes, strict=True)
            )
            if request.state is RequestState.RUNNING and request.takes == takes
        }
        wanting = [
            place for place, segment in enumerate(self.plan.batch.segments) if segment.wants_logits
        ]
        rows = [row for row, place in enumerate(wanting) if place in alive]
        return FinishedStep(
            plan=self.plan if len(alive) == len(self.takes) else self.plan.only(alive),
            requests=tuple(self.plan.requests[wanting[row]] for row in rows),
            sampled=tuple(sampled[row] for row in rows),
        )

    def inputs_of(self, following: Plan) -> Tensor:
        """The token ids that a plan made by ``follow_on`` runs, on the device: those of this batch,
        and of prompts that joined it.
        """
        sampled, inputs = self.plan.sampled, self.tokens.inputs
        if following.requests == sampled:
            return inputs
        rows = {request: row for row, request in enumerate(sampled)}
        chosen = [rows[request] for request in following.requests if request in rows]
        streams = inputs.index_select(0, _sent(chosen, inputs.device))
        if len(chosen) == len(following.requests):
            return streams
        ids = np.zeros(following.batch.num_tokens, dtype=np.int64)
        places, place = list[int](), 0
        for request, segment in zip(following.requests, following.batch.segments, strict=True):
            if request in rows:
                places.append(place)
            else:
                ids[place : place + segment.count] = request.token_ids[segment.start : segment.stop]
            place += segment.count
        known = _sent(ids, inputs.device)
        return known.index_copy_(0, _sent(places, inputs.device), streams.to(known.dtype))


def _sent(words: "Sequence[int] | np.ndarray[Any, Any]", device: torch.device) -> Tensor:
    here = torch.as_tensor(np.asarray(words, dtype=np.int64))
    # The driver may wait for all that is under way before it sends what is not pinned.
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def may_follow(request: Request) -> bool:
    """Whether a step with its prompt can be launched before the tokens of the step before it are
    known: its sampling is simple, and nothing waits for the device to read its prompt.
    """
    return (
        request.scores is None
        and request.pooled is None
        and simple_specs((request,), under_way=()) is not None
    )


def launch_step(
    plan: Plan, logits: Tensor, launch: Launcher, *, under_way: Container[Request]
) -> LaunchedStep | None:
    """Samples the tokens of a batch that runs on the device, without waiting; None if a request
    needs more than simple sampling.

    Args:
        plan: of the batch.
        logits: of the requests that get a token.
        launch: samples.
        under_way: requests of which one token is not known yet.
    """
    specs = simple_specs(plan.sampled, under_way=under_way)
    if specs is None:
        return None
    return LaunchedStep(
        plan, tuple(request.takes for request in plan.requests), launch(logits, specs)
    )


def simple_specs(
    requests: Sequence[Request], *, under_way: Container[Request]
) -> tuple[SampleSpec, ...] | None:
    """How requests are sampled next, those with a token under way at the position after it; None if
    not all of it is simple.
    """
    specs = tuple(
        SampleSpec(
            request.sampling, request.position + (request in under_way), counts=request.counts
        )
        for request in requests
    )
    simple = all(spec.simple for spec in specs) and all(
        request.control is None for request in requests
    )
    return specs if simple else None
