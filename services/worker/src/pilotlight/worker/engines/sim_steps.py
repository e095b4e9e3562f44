"""The steps of a simulated engine: the time that they take, and what is said of them."""

import itertools

from pilotlight.common.clock import Clock
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.engine import StepDone
from pilotlight.common.waiting import pause
from pilotlight.worker.engines.event_queue import EventQueue
from pilotlight.worker.engines.sim_requests import Batch, SimRequests

AT_ONCE = 64
"""Requests that advance in one step, unless it is told otherwise; the others wait."""
NO_TIME_S = 1e-6
"""A step that takes less takes no time."""
TOKENS_AT_ONCE = 64
"""Of steps that take no time, one after the other: then others have their turn."""


class SimSteps:
    """Lets steps pass and end.

    Steps that take no time are many before others have a turn: as an engine in a process of its
    own, one that is so fast has said much when it is heard next.
    """

    def __init__(
        self, requests: SimRequests, events: EventQueue, clock: Clock, at_once: int = AT_ONCE
    ) -> None:
        self.at_once = at_once
        self._requests = requests
        self._events = events
        self._clock = clock
        self._tokens_at_once = 0
        """Since others had their turn."""

    async def pass_time(self, seconds: float, tokens: int) -> None:
        """Let a step's time pass; others have their turn meanwhile."""
        self._tokens_at_once += tokens
        if seconds >= NO_TIME_S or self._tokens_at_once > TOKENS_AT_ONCE:
            self.rest()
            await pause(seconds if seconds >= NO_TIME_S else 0.0)

    def rest(self) -> None:
        """Others have their turn."""
        self._tokens_at_once = 0

    def end(self, batch: Batch, prompt_tokens: int, fresh: int, start_s: float) -> StepDone:
        """A token for each request, and what is said of the step.

        Args:
            batch: those that advance, but for any that was aborted while time passed.
            prompt_tokens: of the prompts that were worked on.
            fresh: as many requests had them.
            start_s: when it began.
        """
        requests = self._requests
        produced = requests.advance(batch)
        waiting, used_tokens = requests.waiting(self.at_once), requests.kv_used_tokens
        return StepDone(
            produced=(*requests.take_ended(), *produced),
            waiting=waiting,
            running=len(requests) - waiting,
            kv_free_tokens=max(0, requests.kv_capacity_tokens - used_tokens),
            step_time_s=self._clock.monotonic_s() - start_s,
            kv_used_tokens=used_tokens,
            batch_tokens=prompt_tokens + len(batch) - fresh,
        )

    def again(self, batch: Batch) -> None:
        """Step on without time, as long as the batch is all requests and none of them ends:
        nothing else is to be decided then.
        """
        requests, count = self._requests, len(batch)
        if not count or len(requests) != count:
            return
        start_s = self._clock.monotonic_s()
        room_tokens = TOKENS_AT_ONCE - self._tokens_at_once
        at_most = min(
            requests.steps_that_fit(self.at_once), -(-room_tokens // count), self._events.room
        )
        used_tokens, capacity_tokens = requests.kv_used_tokens, requests.kv_capacity_tokens
        steps = requests.advance_together(batch, at_most)
        if not steps:
            return
        step_time_s = (self._clock.monotonic_s() - start_s) / len(steps)
        self._tokens_at_once += count * len(steps)
        self._events.put_all_now(
            [
                Timed(
                    StepDone(
                        produced=produced,
                        waiting=0,
                        running=count,
                        kv_free_tokens=max(0, capacity_tokens - used),
                        step_time_s=step_time_s,
                        kv_used_tokens=used,
                        batch_tokens=count,
                    )
                )
                for used, produced in zip(itertools.count(used_tokens + count, count), steps)
            ]
        )
