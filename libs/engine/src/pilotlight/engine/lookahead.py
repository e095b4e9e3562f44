"""One step of lookahead: the host launches a batch before it has read the tokens of the batch
before.

::

    host     launch n | launch n + 1 | wait for n, hand out n | launch n + 2 | wait for n + 1, hand out n + 1 | ...
    device             [ n ............. )[ n + 1 ................. )[ n + 2 ....

The tokens of n are the inputs of n + 1 before the host has seen them. What the host then learns
from n (a stop token, an abort, a preemption) makes a row of n + 1 void: its result is dropped. Its
key and value went where the request's next position was. If another request gets that block, it
writes there later on the same stream, over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.engine.compute import Launcher
from pilotlight.engine.core.batch import Plan
from pilotlight.engine.core.lifecycle import RequestState
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.sampler import NotSampled, PendingTokens, SampledToken


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
        """The token ids that a plan made by ``follow_on`` runs, on the device."""
        sampled = self.plan.sampled
        if len(sampled) == len(following.requests):
            return self.tokens.inputs
        rows = {request: row for row, request in enumerate(sampled)}
        inputs = self.tokens.inputs
        chosen = torch.tensor([rows[request] for request in following.requests])
        return inputs.index_select(0, chosen.to(inputs.device, non_blocking=True))


def launch_step(plan: Plan, logits: Tensor, launch: Launcher, *, ahead: int) -> LaunchedStep | None:
    """Samples the tokens of a batch that runs on the device, without waiting; None if a request
    needs more than simple sampling.

    Args:
        plan: of the batch.
        logits: of the requests that get a token.
        launch: samples.
        ahead: tokens of each request that are not known yet.
    """
    specs = simple_specs(plan.sampled, ahead=ahead)
    if specs is None:
        return None
    return LaunchedStep(
        plan, tuple(request.takes for request in plan.requests), launch(logits, specs)
    )


def simple_specs(requests: Sequence[Request], *, ahead: int) -> tuple[SampleSpec, ...] | None:
    """How requests are sampled ``ahead`` positions after the next; None if not all of it is
    simple.
    """
    specs = tuple(
        SampleSpec(request.sampling, request.position + ahead, counts=request.counts)
        for request in requests
    )
    simple = all(spec.simple for spec in specs) and all(
        request.control is None for request in requests
    )
    return specs if simple else None
