"""A batch whose tokens a device is drawing while the host is further on: one step of lookahead.

::

    host     launch n | launch n + 1 | wait for n, hand out n | launch n + 2 | wait for n + 1, hand out n + 1 | ...
    device             [ n ............. )[ n + 1 ................. )[ n + 2 ....

The tokens of n are the inputs of n + 1 before the host has seen them. What the host then learns from n (a stop token, an abort, a
preemption) makes a row of n + 1 nobody's: its result is dropped. Its key and value went where the request's next position was, on the
device's stream before anything that is started later: whoever gets that block writes it after.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.engine.compute import Launcher
from pilotlight.engine.core.batch import Plan
from pilotlight.engine.core.lifecycle import RequestState
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.logits import Draw
from pilotlight.engine.device.sampler import Drawn, PendingTokens, Undrawn


@dataclass(frozen=True, slots=True)
class Landed:
    """What is left of a batch when its tokens are there."""

    plan: Plan
    """Of the requests that still run as they did."""
    requests: tuple[Request, ...]
    """Those of them that got a token."""
    drawn: tuple[Drawn | Undrawn, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch under way on the device."""

    plan: Plan
    takes: tuple[int, ...]
    """How often each of the plan's requests had been taken up: one that was preempted since is another one."""
    tokens: PendingTokens

    def land(self) -> Landed:
        """Waits for the tokens."""
        drawn = self.tokens.wait()
        alive = {
            place
            for place, (request, takes) in enumerate(zip(self.plan.requests, self.takes, strict=True))
            if request.state is RequestState.RUNNING and request.takes == takes
        }
        wanting = [place for place, segment in enumerate(self.plan.batch.segments) if segment.wants_logits]
        rows = [row for row, place in enumerate(wanting) if place in alive]
        return Landed(
            plan=self.plan if len(alive) == len(self.takes) else self.plan.only(alive),
            requests=tuple(self.plan.requests[wanting[row]] for row in rows),
            drawn=tuple(drawn[row] for row in rows),
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


def take_off(plan: Plan, logits: Tensor, launch: Launcher, *, ahead: int) -> Flight | None:
    """Has the tokens of a batch drawn that has been started; None if some request needs more than a simple draw.

    Args:
        plan: of the batch.
        logits: of the requests that get a token.
        launch: draws.
        ahead: tokens of each request that are not known yet.
    """
    draws = simple_draws(plan.sampled, ahead=ahead)
    if draws is None:
        return None
    return Flight(plan, tuple(request.takes for request in plan.requests), launch(logits, draws))


def simple_draws(requests: Sequence[Request], *, ahead: int) -> tuple[Draw, ...] | None:
    """How the tokens of requests are drawn, ``ahead`` positions behind the next; None if not all are drawn simply."""
    draws = tuple(Draw(request.sampling, request.position + ahead, counts=request.counts) for request in requests)
    simple = all(draw.simple for draw in draws) and all(request.control is None for request in requests)
    return draws if simple else None
