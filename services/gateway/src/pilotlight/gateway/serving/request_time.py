"""How long a request may be held, until when it must have ended, and its ticket for the queue."""

import math

from pilotlight.common.clock import Clock
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.gateway.serving.ticket import Ticket
from pilotlight.gateway.serving.token_request import TokenRequest
from pilotlight.policy.request import Promise


class RequestTime:
    """One request's time, from its arrival on."""

    __slots__ = ("_clock", "_hold_s", "_request", "held_until_s", "since_s")

    def __init__(self, clock: Clock, request: TokenRequest, hold_s: float) -> None:
        """``hold_s`` is how long it may be held, each time that it waits."""
        self._clock = clock
        self._request = request
        self._hold_s = hold_s
        self.held_until_s = min(request.arrived_s + hold_s, request.deadline_s)
        """Until when it may be held, or be with an instance that is loading."""
        self.since_s = request.arrived_s
        """Since when it waits for an instance: what was served has no claim on the time in which it
        was."""

    def left_s(self) -> float:
        """Until the request must have ended."""
        return self._request.deadline_s - self._clock.monotonic_s()

    @property
    def deadline_in_s(self) -> float | None:
        """As in ``Submit``."""
        left_s = self.left_s()
        return left_s if math.isfinite(left_s) else None

    def promise(self, has_tokens: bool) -> Promise:
        """What its model's SLO says of it, from now on."""
        slo, waited_s = self._request.model.slo, self._clock.monotonic_s() - self._request.arrived_s
        return Promise(
            first_token_in_s=None if has_tokens else slo.ttft_ms / 1000 - waited_s,
            token_s=slo.tpot_ms / 1000,
        )

    def held_left_s(self) -> float:
        """Until it is held no longer."""
        return self.held_until_s - self._clock.monotonic_s()

    def ticket(self, output_tokens: int) -> Ticket:
        """What the queue must know of it, with this much of its answer there."""
        request, prompt_tokens = self._request, len(self._request.prompt_ids)
        return Ticket(
            model=request.model.name,
            digest=request.model.digest,
            needed_tokens=prompt_tokens + request.sampling.max_tokens,
            held_tokens=prompt_tokens + output_tokens + 1,
            since_s=self.since_s,
            deadline_s=self.held_until_s,
            trace_parent=request.trace_parent,
            siblings=request.siblings,
            cold_start=request.cold_start,
            share=request.share,
            key_id=request.key_id,
        )

    def too_late(self, output_tokens: int) -> DeadlineExceeded:
        """The error of a request that did not end in time, with this much of its answer there."""
        limit_s = self._request.deadline_s - self._request.arrived_s
        return DeadlineExceeded(
            f"the answer was not complete within {limit_s:.3g} s; it had {output_tokens} tokens"
        )

    def wait_anew(self) -> None:
        """From now on it waits as one that has just come."""
        self.since_s = self._clock.monotonic_s()
        self.renew()

    def renew(self) -> None:
        """It may be held for a whole waiting time from now on."""
        self.held_until_s = min(self._clock.monotonic_s() + self._hold_s, self._request.deadline_s)
